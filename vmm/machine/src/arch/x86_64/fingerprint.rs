//! What a guest sees of the processor, in a snapshot: a guest is restored only where it sees the same.

use kvm_bindings::CpuId;
use serde::{Deserialize, Serialize};

/// CPUID as the first vCPU has it, and the MSRs that KVM lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    leaves: Vec<Leaf>,
    msrs: Vec<u32>,
}

/// One leaf of CPUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Leaf {
    function: u32,
    index: u32,
    flags: u32,
    /// EAX, EBX, ECX and EDX.
    registers: [u32; 4],
}

const REGISTERS: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];

impl Fingerprint {
    /// Describes what a vCPU with this CPUID sees, on a KVM that lists these MSRs.
    pub fn new(cpuid: &CpuId, msrs: Vec<u32>) -> Self {
        let leaves = cpuid.as_slice().iter().map(|leaf| Leaf {
            function: leaf.function,
            index: leaf.index,
            flags: leaf.flags,
            registers: [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx],
        });
        Self { leaves: leaves.collect(), msrs }
    }

    /// Returns in what this host's processor differs for a guest. MSRs matter only if the guest has set them, which
    /// restoring them finds out.
    pub fn difference(&self, here: &Self) -> Option<String> {
        let name = |leaf: &Leaf| format!("CPUID {:#x}.{:#x}", leaf.function, leaf.index);
        let in_other = |leaf: &Leaf, other: &Self| {
            let is_same = |found: &&Leaf| (found.function, found.index) == (leaf.function, leaf.index);
            other.leaves.iter().find(is_same).copied()
        };
        let changed = |saved: &Leaf| {
            let Some(found) = in_other(saved, here) else {
                return Some(format!("it has no {}", name(saved)));
            };
            let mut registers = REGISTERS.iter().zip(saved.registers.into_iter().zip(found.registers));
            let (register, (was, is)) = registers.find(|(_, (was, is))| was != is)?;
            Some(match was & !is {
                0 => format!("its {} {register} is {is:#x}, and was {was:#x}", name(saved)),
                lost => format!("its {} {register} lacks {lost:#x}", name(saved)),
            })
        };
        let more =
            |leaf: &Leaf| in_other(leaf, self).is_none().then(|| format!("it has {} as well", name(leaf)));
        self.leaves.iter().find_map(changed).or_else(|| here.leaves.iter().find_map(more))
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    fn fingerprint(leaves: &[(u32, u32, u32)]) -> Fingerprint {
        let entry = |(function, index, ebx): &(u32, u32, u32)| kvm_cpuid_entry2 {
            function: *function,
            index: *index,
            ebx: *ebx,
            ..Default::default()
        };
        let entries: Vec<_> = leaves.iter().map(entry).collect();
        Fingerprint::new(&CpuId::from_entries(&entries).unwrap(), vec![0x10])
    }

    #[test]
    fn a_guest_is_told_what_a_host_lacks_or_has_in_addition() {
        let saved = fingerprint(&[(1, 0, 0x10), (7, 0, 0x30)]);
        let difference = |leaves: &[(u32, u32, u32)]| saved.difference(&fingerprint(leaves));
        assert_eq!(difference(&[(7, 0, 0x30), (1, 0, 0x10)]), None);
        let said = |leaves: &[(u32, u32, u32)]| difference(leaves).unwrap();
        assert_eq!(said(&[(1, 0, 0x10), (7, 0, 0x10)]), "its CPUID 0x7.0x0 EBX lacks 0x20");
        assert_eq!(said(&[(1, 0, 0x11), (7, 0, 0x30)]), "its CPUID 0x1.0x0 EBX is 0x11, and was 0x10");
        assert_eq!(said(&[(1, 0, 0x10)]), "it has no CPUID 0x7.0x0");
        assert_eq!(said(&[(1, 0, 0x10), (7, 0, 0x30), (7, 1, 0)]), "it has CPUID 0x7.0x1 as well");
        let elsewhere = Fingerprint { msrs: Vec::new(), ..saved.clone() };
        assert_eq!(saved.difference(&elsewhere), None);
    }
}
