//! The whole memory of a guest, for what `tally record`, `tally top` and `tally symbols` read there: the kernel's
//! symbols, types and modules, the threads that its vCPUs run, their callers, and the files that they have mapped.
//!
//! Nothing of the memory is changed. Chains and paths have their maximum lengths, a mapping is one of an address of its
//! sample, and no name has a control character.
//!
//! An input is a sparse memory, so that a short one can be that of a kernel with all that is looked for: the registers
//! of the vCPUs, then pieces of the memory.

#[cfg(all(test, target_arch = "x86_64"))]
mod linux;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Size of the memory.
const MEMORY: usize = 1 << 18;

/// Maximum number of vCPUs.
const MAX_VCPUS: u8 = 4;

/// What is in front of a piece: its address in three bytes, its length in two, and how often it is repeated.
const HEADER: usize = 6;

/// Size of what an input has of a vCPU.
const VCPU: usize = 1 + 8 * 18;

/// A machine that is recorded.
struct Guest {
    memory: GuestMemoryMmap,
    vcpus: Vec<[u8; VCPU]>,
}

impl Guest {
    /// Reads an input: the number of vCPUs, their registers, and pieces of the memory.
    fn read(data: &[u8]) -> Option<Self> {
        let (count, mut rest) = data.split_first()?;
        let mut vcpus = Vec::new();
        for _ in 0..=count % MAX_VCPUS {
            let (vcpu, behind) = rest.split_first_chunk()?;
            vcpus.push(*vcpu);
            rest = behind;
        }
        let ranges = [(GuestAddress(0), MEMORY)];
        let memory = GuestMemoryMmap::from_ranges(&ranges).expect("there is memory");
        while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
            let [low, middle, high, len @ .., times] = *header;
            let start = usize::try_from(u32::from_le_bytes([low, middle, high, 0])).expect("it is 24 bits");
            let (piece, behind) = behind.split_at(usize::from(u16::from_le_bytes(len)).min(behind.len()));
            let bytes = piece.repeat(1 + crate::repetitions(times, piece.len(), piece.len()));
            let start = start % MEMORY;
            let fits = bytes.len().min(MEMORY - start);
            memory.write_slice(&bytes[..fits], GuestAddress(start as u64)).expect("it fits");
            rest = behind;
        }
        Some(Self { memory, vcpus })
    }

    /// Returns the content of the memory.
    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; MEMORY];
        self.memory.read_slice(&mut content, GuestAddress(0)).expect("it is in memory");
        content
    }
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(guest) = Guest::read(data) else { return };
    if std::env::var_os(crate::REPLAY_VARIABLE).is_some() {
        eprintln!("{} vCPUs", guest.vcpus.len());
    }
    let before = guest.content();
    for text in record(&guest) {
        // The tab is in front of a module's name.
        let is_text = |c: char| matches!(c, ' '..='~' | '\t' | '\n');
        assert!(text.chars().all(is_text), "{:?}", text.lines().find(|line| !line.chars().all(is_text)));
    }
    assert!(guest.content() == before, "the guest's memory has changed");
}

/// Records the machine. Returns the texts of the symbols.
#[cfg(target_arch = "x86_64")]
fn record(guest: &Guest) -> Vec<String> {
    let recorded = x86_64::record(&guest.memory, &guest.vcpus);
    if std::env::var_os(crate::REPLAY_VARIABLE).is_some() {
        eprintln!("{recorded:#x?}");
    }
    vec![recorded.symbols, recorded.module_symbols]
}

/// On other architectures only the symbols have the same form.
#[cfg(not(target_arch = "x86_64"))]
fn record(guest: &Guest) -> Vec<String> {
    tally_machine::symbols(&guest.memory).iter().map(tally_machine::Symbols::text).collect()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::fs;

    use super::*;

    /// An input from which nothing is found would only fuzz the search for symbols, so runs begin with whole kernels.
    #[test]
    fn everything_is_found_of_each_linux_in_the_corpus() {
        for release in &linux::RELEASES {
            let guest = Guest::read(&linux::input(release)).expect("it is a guest");
            let recorded = x86_64::record(&guest.memory, &guest.vcpus);
            let name = release.name;
            assert!(
                recorded.symbols.contains("ffffffff8000e200 D init_task\n"),
                "{name}: {}",
                recorded.symbols
            );
            assert_eq!(recorded.build_id, Some(linux::BUILD_ID), "{name}");
            let [module] = &recorded.modules[..] else { panic!("{name}: {:?}", recorded.modules) };
            assert_eq!((module.name.as_str(), module.start, module.len), ("fuse", linux::MODULE, 0x1000));
            let symbols = "ffffffffc0000000 t read\t[fuse]\nffffffffc0000010 t write\t[fuse]\n";
            assert_eq!(recorded.module_symbols, symbols, "{name}");
            let functions: Vec<&str> = recorded.functions.iter().map(|found| &*found.name).collect();
            assert!(functions.contains(&"read [fuse]"), "{name}: {functions:?}");
            let [kernel, again, user, _] = &recorded.samples[..] else { panic!("{name}") };
            for sample in [kernel, user] {
                let task = sample.task.as_ref().unwrap_or_else(|| panic!("{name}: no thread is found"));
                assert_eq!((task.process, task.thread, task.name.as_str()), (7, 8, "sh"), "{name}");
                let [program] = &sample.mappings[..] else { panic!("{name}: {:?}", sample.mappings) };
                assert_eq!((program.path.as_str(), program.size), ("/srv/bin/prog", 4096), "{name}");
                assert_eq!((program.start, program.len), (0x40_0000, 0x1000), "{name}");
                assert_eq!(program.build_id, Some(linux::BUILD_ID), "{name}");
            }
            assert!(again.mappings.is_empty(), "{name}: the first sample has them");
            assert_eq!(kernel.kernel, release.callers(), "{name}");
            assert_eq!(kernel.user, linux::ENTRY_AND_CALLERS, "{name}");
            assert_eq!(user.user, linux::ENTRY_AND_CALLERS[1..], "{name}");
        }
    }

    #[test]
    fn each_linux_in_the_corpus_is_the_one_that_is_made_here() {
        let folder = crate::target("memory").expect("there is one").named();
        for release in &linux::RELEASES {
            let (path, made) = (folder.join(release.name), linux::input(release));
            if fs::read(&path).unwrap_or_default() != made {
                let new = std::env::temp_dir().join(release.name);
                fs::write(&new, made).expect("it can be written");
                panic!("cp {} {}", new.display(), path.display());
            }
        }
    }
}
