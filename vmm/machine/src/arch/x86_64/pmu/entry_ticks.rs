//! Finds out whether this host's processor counts each entry into a guest as something that the guest does. Zen 5
//! counts an instruction and a branch for each VMRUN; for other processors of AMD's nobody has published it. So a guest
//! of a few instructions exits a known number of times, in its kernel and in user mode: what its counters say too much
//! is the entries'.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vpmu::event::{Event, Filter};
use vpmu::x86::Vendor;
use vpmu_perf::{EntryTicks, HostPmu, Measurement, Ticks};

use super::super::cr;
use crate::kvm_stats::KvmStats;

/// Why it is not known what entries add.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    #[error("KVM does not run the guest that finds it out: {0}")]
    Kvm(#[from] kvm_ioctls::Error),
    #[error("the guest that finds it out has no memory: {0}")]
    Memory(String),
    #[error("the guest that finds it out exits with {0}")]
    Exit(String),
    #[error("this KVM has no statistics")]
    NoStatistics,
    #[error("the host counts no {0:#x}")]
    NotCounted(u64),
    #[error("{entries} entries added {added} to event {event:#x}")]
    Uneven { entries: u64, added: i64, event: u64 },
}

/// AMD's numbers of the events that may count entries.
const INSTRUCTIONS: u64 = 0xc0;
const BRANCHES: u64 = 0xc2;
const TAKEN_BRANCHES: u64 = 0xc4;

/// How often the guest exits before it has ended.
const EXITS: u8 = 8;

/// The guest: exits by OUT, again and again. An instruction that exits retires in no guest.
#[rustfmt::skip]
const CODE: [u8; 12] = [
    0xb9, EXITS, 0, 0, 0, // mov ecx, EXITS
    0xe6, PORT,                 // out PORT, al
    0x49,                       // dec ecx
    0x75, 0xfb,                 // jnz the first OUT
    0xe6, PORT,                 // out PORT, al
];
const PORT: u8 = 0x80;
/// What the guest executes itself: the MOV, and the DEC and the JNZ of each round.
const EXECUTED: u64 = 1 + 2 * BRANCHED;
const BRANCHED: u64 = EXITS as u64;
const TAKEN: u64 = BRANCHED - 1;

const ADDRESS: u64 = 0x1000;
const PAGE: usize = 0x1000;

/// Finds out what entries add on this host, whose processor is of this vendor. Must be called on a thread that may open
/// perf events.
pub fn of_this_host(vendor: Vendor, pmu: HostPmu) -> Result<EntryTicks, Unknown> {
    if vendor != Vendor::Amd {
        // Intel's events do not count VM entries (SDM volume 3, 20.2): the VMM's instruction retires in the VMM.
        return Ok(EntryTicks::default());
    }
    let mut guest = Guest::new()?;
    let mut ticks = |filter| -> Result<Ticks, Unknown> {
        let mut of = |event, expected| guest.ticks(pmu, filter, event, expected);
        Ok(Ticks {
            instructions: of(INSTRUCTIONS, EXECUTED)?,
            branches: of(BRANCHES, BRANCHED)?,
            taken_branches: of(TAKEN_BRANCHES, TAKEN)?,
        })
    };
    Ok(EntryTicks { user: ticks(Filter::User)?, kernel: ticks(Filter::Kernel)? })
}

/// Returns what reads how often KVM has entered a vCPU.
pub fn entries(vcpu: &VcpuFd) -> Option<impl Fn() -> Option<u64> + 'static> {
    KvmStats::of(vcpu)?.counter("exits")
}

/// The guest, in protected mode without paging.
struct Guest {
    vcpu: VcpuFd,
    entries: Box<dyn Fn() -> Option<u64>>,
    /// Keeps its memory mapped.
    _memory: GuestMemoryMmap,
}

impl Guest {
    fn new() -> Result<Self, Unknown> {
        let vm = Kvm::new()?.create_vm()?;
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(ADDRESS), PAGE)])
            .map_err(|error| Unknown::Memory(error.to_string()))?;
        memory
            .write_slice(&CODE, GuestAddress(ADDRESS))
            .map_err(|error| Unknown::Memory(error.to_string()))?;
        for region in memory.iter() {
            let region = kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: ADDRESS,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the region stays mapped as long as the vCPU, which keeps the VM: they are dropped together.
            unsafe { vm.set_user_memory_region(region) }?;
        }
        let vcpu = vm.create_vcpu(0)?;
        let entries = Box::new(entries(&vcpu).ok_or(Unknown::NoStatistics)?);
        Ok(Self { vcpu, entries, _memory: memory })
    }

    /// Returns what each entry adds to an event, of which the guest itself causes so many. Processors may count
    /// something else once, so what two measurements agree on is taken, if the first is not that nothing is added.
    fn ticks(&mut self, pmu: HostPmu, filter: Filter, event: u64, expected: u64) -> Result<u32, Unknown> {
        const MOST_MEASUREMENTS: u32 = 6;
        let mut before = None;
        for _ in 1..MOST_MEASUREMENTS {
            let measured = self.measure(pmu, filter, event, expected)?;
            match measured {
                Ok(0) if before.is_none() => return Ok(0),
                Ok(ticks) if before == Some(Ok(ticks)) => return Ok(ticks),
                _ => before = Some(measured),
            }
        }
        let (added, entries) = before.and_then(Result::err).unwrap_or_default();
        Err(Unknown::Uneven { entries, added, event })
    }

    /// Measures what each entry adds to an event; or else what all have added, and how many there were.
    fn measure(
        &mut self,
        pmu: HostPmu,
        filter: Filter,
        event: u64,
        expected: u64,
    ) -> Result<Result<u32, (i64, u64)>, Unknown> {
        let counter = Measurement::of_this_thread(pmu, Event::Raw(event), filter)
            .map_err(|_| Unknown::NotCounted(event))?;
        let before = (self.entries)().ok_or(Unknown::NoStatistics)?;
        self.run(filter)?;
        let entries = (self.entries)().ok_or(Unknown::NoStatistics)? - before;
        let count = counter.exact().ok_or(Unknown::NotCounted(event))?;
        Ok(each(count, expected, entries).ok_or((count.wrapping_sub(expected).cast_signed(), entries)))
    }

    /// Runs the guest from its beginning to its end, in its kernel or in user mode.
    fn run(&mut self, filter: Filter) -> Result<(), Unknown> {
        /// Segment types: execute and read, accessed; read and write, accessed.
        const EXECUTE: u8 = 0xb;
        const WRITE: u8 = 0x3;
        /// All levels may access ports; and the bit that is always set.
        const FLAGS: u64 = 3 << 12 | 1 << 1;
        let level = if filter == Filter::User { 3 } else { 0 };
        let mut sregs = self.vcpu.get_sregs()?;
        let flat = |type_| kvm_segment {
            base: 0,
            limit: u32::MAX,
            selector: 8 | u16::from(level),
            type_,
            present: 1,
            dpl: level,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        sregs.cs = flat(EXECUTE);
        (sregs.ss, sregs.ds, sregs.es) = (flat(WRITE), flat(WRITE), flat(WRITE));
        sregs.cr0 = cr::CR0_PE | cr::CR0_ET;
        self.vcpu.set_sregs(&sregs)?;
        self.vcpu.set_regs(&kvm_regs { rip: ADDRESS, rflags: FLAGS, ..Default::default() })?;
        for _ in 0..=EXITS {
            loop {
                match self.vcpu.run() {
                    Ok(VcpuExit::IoOut(..)) => break,
                    Ok(exit) => return Err(Unknown::Exit(format!("{exit:?}"))),
                    Err(error) if error.errno() == libc::EINTR => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}

/// Returns what each entry has added to a count, if all have added the same.
fn each(count: u64, expected: u64, entries: u64) -> Option<u32> {
    let added = count.checked_sub(expected)?;
    let each = added.checked_div(entries)?;
    (each * entries == added).then(|| u32::try_from(each).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_entries_add_the_same_or_it_is_not_known_what() {
        assert_eq!([each(65, 65, 33), each(98, 65, 33), each(131, 65, 33)], [Some(0), Some(1), Some(2)]);
        assert_eq!([each(97, 65, 33), each(64, 65, 33), each(65, 65, 0)], [None; 3]);
    }
}
