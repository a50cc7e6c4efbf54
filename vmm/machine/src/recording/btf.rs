//! Where the members of a guest kernel's structures are, by the kernel's own description of its types (BTF,
//! `include/uapi/linux/btf.h` in Linux). The guest may have written anything there.

/// Types of a kernel.
pub struct Types<'a> {
    bytes: &'a [u8],
    strings: &'a [u8],
    /// Where each type begins, from type 1 on.
    begins: Vec<usize>,
    /// Where each structure begins.
    structures: Vec<usize>,
}

/// Maximum size of a description.
pub const MAX_SIZE: u64 = 32 << 20;

/// Maximum number of structures, all of which are looked at for each that is looked for: about ten times as many as a
/// distribution's kernel has.
const MAX_STRUCTURES: usize = 1 << 17;

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Structures without a name, in which a member may be: maximum depth.
const MAX_DEPTH: u32 = 8;
/// Maximum number of members that are looked at for one: a description may lead to the same structures again and again.
const MAX_LOOKS: u32 = 1 << 20;

impl<'a> Types<'a> {
    /// Reads a description.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        if u16::from_le_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        let field = |number: usize| word(bytes, 4 + 4 * number).and_then(|word| usize::try_from(word).ok());
        let part = |offset: usize, len: usize| {
            let start = field(0)?.max(HEADER).checked_add(offset)?;
            bytes.get(start..start.checked_add(len)?)
        };
        let (types, strings) = (part(field(1)?, field(2)?)?, part(field(3)?, field(4)?)?);
        let (mut begins, mut structures) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < types.len() {
            let info = word(types, at + 4)?;
            begins.push(at);
            if kind(info) == STRUCT {
                structures.push(at);
            }
            at = at.checked_add(size(info)?)?;
        }
        let types = Self { bytes: types, strings, begins, structures };
        (types.structures.len() <= MAX_STRUCTURES).then_some(types)
    }

    /// Returns the offset in bytes of a member of a structure.
    pub fn offset(&self, structure: &str, member: &str) -> Option<u64> {
        self.bit(structure, member).filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8)
    }

    /// Returns the offset in bits of a member of a structure.
    pub fn bit(&self, structure: &str, member: &str) -> Option<u64> {
        let is_it = |at: &&usize| self.is_called(**at, structure) && self.members(**at).is_some();
        let mut looks = MAX_LOOKS;
        self.structures.iter().filter(is_it).find_map(|at| self.bits(*at, member, 0, &mut looks))
    }

    /// Returns the size of a structure.
    pub fn size(&self, structure: &str) -> Option<u64> {
        let mut structures = self.structures.iter();
        structures
            .find(|at| self.is_called(**at, structure))
            .and_then(|at| word(self.bytes, at + 8))
            .map(u64::from)
    }

    /// Returns the offset of a member in bits, which may be in a structure without a name.
    fn bits(&self, at: usize, member: &str, depth: u32, looks: &mut u32) -> Option<u64> {
        let has_sizes = word(self.bytes, at + 4)? >> 31 == 1;
        self.members(at)?.find_map(|at| {
            *looks = looks.checked_sub(1)?;
            let offset = word(self.bytes, at + 8)?;
            let offset = u64::from(if has_sizes { offset & 0xff_ffff } else { offset });
            if self.is_called(at, member) {
                return Some(offset);
            }
            if word(self.bytes, at)? != 0 || depth == MAX_DEPTH {
                return None;
            }
            let inner = usize::try_from(word(self.bytes, at + 4)?).ok()?.checked_sub(1)?;
            offset.checked_add(self.bits(*self.begins.get(inner)?, member, depth + 1, looks)?)
        })
    }

    /// Returns where the members of a structure are described.
    fn members(&self, at: usize) -> Option<impl Iterator<Item = usize>> {
        let is_structure = matches!(self.kind(at)?, STRUCT | UNION);
        let count = usize::try_from(word(self.bytes, at + 4)? & 0xffff).ok()?;
        is_structure.then(|| (0..count).map(move |number| at + 12 + 12 * number))
    }

    fn kind(&self, at: usize) -> Option<u32> {
        word(self.bytes, at + 4).map(kind)
    }

    /// Returns whether the type or member that is described here has this name.
    fn is_called(&self, at: usize, name: &str) -> bool {
        let offset = word(self.bytes, at).and_then(|offset| usize::try_from(offset).ok());
        let rest = offset.and_then(|offset| self.strings.get(offset..));
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes())).is_some_and(|rest| rest.first() == Some(&0))
    }
}

fn kind(info: u32) -> u32 {
    info >> 24 & 0x1f
}

/// Returns the size of a type's description, by its second word.
fn size(info: u32) -> Option<usize> {
    let count = usize::try_from(info & 0xffff).ok()?;
    let rest = match kind(info) {
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Pointers and forward declarations, other names and qualifiers, functions, floating point.
        2 | 7..=12 | 16 | 18 => 0,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, enumerations of 64 bits.
        STRUCT | UNION | 15 | 19 => 12 * count,
        // Enumerations, prototypes.
        6 | 13 => 8 * count,
        _ => return None,
    };
    Some(12 + rest)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|word| u32::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the description of `struct task { int state; struct { int pid; }; }`.
    fn description() -> Vec<u8> {
        description_of(&[0, 4 << 24 | 1, 4, 12, 1, 0])
    }

    /// Returns the same with another structure within.
    fn description_of(inner: &[u32]) -> Vec<u8> {
        let strings = b"\0task\0state\0pid\0int\0";
        let int = vec![16, 1 << 24, 4, 32];
        let inner = inner.to_vec();
        let task = vec![1, 4 << 24 | 2, 8, 6, 1, 0, 0, 2, 32];
        let types: Vec<u8> = [int, inner, task].concat().into_iter().flat_map(u32::to_le_bytes).collect();
        let lengths = [24, 0, types.len(), types.len(), strings.len()];
        let mut bytes = [&MAGIC.to_le_bytes()[..], &[1, 0]].concat();
        bytes.extend(lengths.into_iter().flat_map(|len| u32::try_from(len).unwrap().to_le_bytes()));
        [bytes, types, strings.to_vec()].concat()
    }

    #[test]
    fn members_are_found_by_name_also_in_structures_without_a_name() {
        let bytes = description();
        let types = Types::read(&bytes).expect("it is a description");
        assert_eq!(types.offset("task", "state"), Some(0));
        assert_eq!(types.offset("task", "pid"), Some(4));
        assert_eq!(types.offset("task", "tgid"), None);
        assert_eq!(types.offset("tas", "pid"), None);
        assert_eq!((types.size("task"), types.size("tas")), (Some(8), None));
    }

    #[test]
    fn a_structure_that_contains_itself_is_no_trouble() {
        let mut bytes = description();
        // The inner structure's member has no name, and is the structure itself.
        let inner = 24 + 16 + 12;
        bytes[inner..inner + 8].copy_from_slice(&[0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(Types::read(&bytes).expect("it is a description").offset("task", "pid"), None);
    }

    #[test]
    fn a_structure_that_contains_itself_many_times_takes_no_time() {
        const MEMBERS: u32 = 200;
        let inner = [0, 4 << 24 | MEMBERS, 4];
        let members = (0..MEMBERS).flat_map(|_| [0, 2, 0]);
        let bytes = description_of(&inner.into_iter().chain(members).collect::<Vec<_>>());
        let types = Types::read(&bytes).expect("it is a description");
        assert_eq!((types.offset("task", "state"), types.offset("task", "pid")), (Some(0), None));
    }

    #[test]
    fn a_description_of_more_structures_than_any_kernel_has_is_none() {
        let with = |structures: usize| description_of(&[0, 4 << 24, 4].repeat(structures));
        assert!(Types::read(&with(MAX_STRUCTURES - 1)).is_some(), "there is one more behind them");
        assert!(Types::read(&with(MAX_STRUCTURES)).is_none());
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes_there_is_no_trouble(
            changes in prop::collection::vec((0..140_usize, any::<u8>()), 0..20),
        ) {
            let mut bytes = description();
            for (at, byte) in changes {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            if let Some(types) = Types::read(&bytes) {
                let _ = types.offset("task", "pid");
            }
        }
    }
}
