//! A vCPU on its thread, and the one place that sees what `KVM_RUN` comes back with: I/O ports, and the MSRs that are the PMU's.

use std::ptr::NonNull;

use devices::End;
use kvm_bindings::kvm_run;
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use vpmu::Outcome;

use super::board::Buses;
use super::pmu::Kind as PmuKind;
use crate::architecture::Run;
use crate::exit::{self, Bytes, Kind};
use crate::memory::GuestRam;

/// Why a vCPU has left its guest.
pub type Exit = exit::Exit<OwnExit>;

/// The exits that other architectures do not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnExit {
    /// The guest executes an `in`, or several at once by a string instruction.
    PortRead(PortAccess),
    /// It executes an `out`, or several at once.
    PortWrite(PortAccess),
    /// It executes an RDMSR of this register.
    ReadMsr(u32),
    /// It executes a WRMSR of this register and value.
    WriteMsr(u32, u64),
}

/// An access to an I/O port. What is accessed are items: see [`KvmRun::take_item`] and [`KvmRun::give_item`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAccess {
    /// Which port.
    pub port: u16,
    /// How many bytes an item has.
    pub width: usize,
}

impl OwnExit {
    /// What it is counted as.
    pub fn kind(self) -> Kind {
        match self {
            Self::PortRead(_) => Kind::PortRead,
            Self::PortWrite(_) => Kind::PortWrite,
            Self::ReadMsr(_) => Kind::PmuRead,
            Self::WriteMsr(..) => Kind::PmuWrite,
        }
    }
}

/// A vCPU's file, and the pages that KVM shares for it. It stays on the thread that runs the vCPU.
pub struct KvmRun {
    fd: VcpuFd,
    items: Option<Items>,
}

/// The items of an access to a port that were not dealt with yet.
struct Items {
    /// Where they are in the pages that KVM shares.
    data: NonNull<[u8]>,
    /// How wide each is.
    width: usize,
    /// Where the next begins.
    at: usize,
}

impl Items {
    /// Returns where the next item is, and goes on to the one behind it.
    fn next(&mut self) -> Option<std::ops::Range<usize>> {
        let item = self.at..self.at + self.width;
        self.at = item.end;
        (item.end <= self.data.len()).then_some(item)
    }
}

impl KvmRun {
    fn port_access(&mut self, port: u16, data: NonNull<[u8]>) -> PortAccess {
        let width = item_width(self.fd.get_kvm_run());
        self.items = Some(Items { data, width, at: 0 });
        PortAccess { port, width }
    }

    /// Takes the next item that the guest writes to a port, if there is one more.
    pub fn take_item(&mut self) -> Option<Bytes> {
        let items = self.items.as_mut()?;
        let item = items.next()?;
        // SAFETY: KVM gave this slice of the vCPU's shared pages at the last exit. They are mapped as long as `self.fd` is open,
        // and since then `self.fd` was neither entered nor lent to anybody, either of which clears `items`. So nobody else
        // has a reference to the slice, and KVM does not touch it.
        let data = unsafe { items.data.as_ref() };
        Some(Bytes::copy_of(&data[item]))
    }

    /// Gives the guest the next item that it reads from a port, which `read` gets. Returns false if it wants no more.
    pub fn give_item(&mut self, read: impl FnOnce() -> Bytes) -> bool {
        let Some(items) = &mut self.items else { return false };
        let Some(item) = items.next() else { return false };
        let given = read();
        // SAFETY: as for `take_item`. The exit was a read of a port, for which KVM gave the slice to be written to.
        let data = unsafe { items.data.as_mut() };
        data[item].copy_from_slice(&given);
        true
    }

    /// Ends the guest's RDMSR with this value, or with a fault.
    fn answer_read(&mut self, outcome: Outcome) {
        let answer = &mut self.fd.get_kvm_run().__bindgen_anon_1;
        match outcome {
            Outcome::Value(value) => answer.msr.data = value,
            Outcome::Handled | Outcome::Fault | Outcome::NotMine => answer.msr.error = 1,
        }
    }

    /// Ends the guest's WRMSR, with a fault unless it was handled.
    fn answer_write(&mut self, outcome: Outcome) {
        if outcome != Outcome::Handled {
            self.fd.get_kvm_run().__bindgen_anon_1.msr.error = 1;
        }
    }
}

impl Run for KvmRun {
    type OwnExit = OwnExit;
    type Buses = Buses;

    fn new(fd: VcpuFd) -> Self {
        Self { fd, items: None }
    }

    /// What is left of an access to a port is given up.
    fn fd(&mut self) -> &mut VcpuFd {
        self.items = None;
        &mut self.fd
    }

    fn run(&mut self) -> Exit {
        self.items = None;
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                let data = NonNull::from(data);
                Exit::Own(OwnExit::PortRead(self.port_access(port, data)))
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                let data = NonNull::from(data);
                Exit::Own(OwnExit::PortWrite(self.port_access(port, data)))
            }
            Ok(VcpuExit::X86Rdmsr(exit)) => Exit::Own(OwnExit::ReadMsr(exit.index)),
            Ok(VcpuExit::X86Wrmsr(exit)) => Exit::Own(OwnExit::WriteMsr(exit.index, exit.data)),
            Ok(other) => Exit::common(&other).unwrap_or_else(|| Exit::rare(&mut self.fd)),
            Err(error) => Exit::failed(error),
        }
    }

    fn drain(&mut self, buses: &Buses) {
        buses.coalescing.drain(|| self.fd.coalesced_mmio_read().ok().flatten(), &buses.ports);
    }
}

/// Deals with an exit that other architectures do not have.
pub fn serve(
    exit: OwnExit,
    run: &mut KvmRun,
    pmu: &mut PmuKind,
    buses: &Buses,
    _ram: &GuestRam,
) -> Option<End> {
    match exit {
        OwnExit::PortRead(PortAccess { port, width }) => {
            let read = || {
                let mut item = Bytes::zeroes(width);
                buses.ports.read(port, &mut item);
                item
            };
            while run.give_item(read) {}
        }
        OwnExit::PortWrite(PortAccess { port, .. }) => {
            while let Some(item) = run.take_item() {
                buses.coalescing.watch(port, &item);
                if let Some(end) = buses.ports.write(port, &item) {
                    return Some(end);
                }
            }
        }
        OwnExit::ReadMsr(msr) => {
            let outcome = pmu.read(run.fd(), msr);
            run.answer_read(outcome);
        }
        OwnExit::WriteMsr(msr, value) => {
            let outcome = pmu.write(run.fd(), msr, value);
            run.answer_write(outcome);
        }
    }
    None
}

/// Where a vCPU is. AMD's processors lose it in a triple fault: KVM then shows that of a reset.
pub fn place(fd: &VcpuFd) -> u64 {
    fd.get_regs().map_or(0, |regs| regs.rip)
}

/// From now on KVM says with each exit where the guest is: to ask it would cost more than the rest of the logging.
pub fn keep_place(fd: &mut VcpuFd) {
    fd.set_sync_valid_reg(SyncReg::Register);
}

/// What it has said.
pub fn kept_place(fd: &VcpuFd) -> u64 {
    fd.sync_regs().regs.rip
}

/// Tells the guest's kernel that a vCPU was away, lest it takes itself for hung. One that has no such clock cannot be told.
pub fn tell_of_pause(fd: &VcpuFd) {
    let _ = fd.kvmclock_ctrl();
}

/// How wide each item of an access to a port is; a string instruction makes several accesses at once.
fn item_width(run: &kvm_run) -> usize {
    // SAFETY: called for an access to a port only, where the kernel has filled in this member of the union.
    let io = unsafe { run.__bindgen_anon_1.io };
    usize::from(io.size).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_items_of_a_string_instruction_come_one_after_the_other() {
        let mut data = [0; 6];
        let mut items = Items { data: NonNull::from(&mut data[..]), width: 2, at: 0 };
        let places: Vec<_> = std::iter::from_fn(|| items.next()).collect();
        assert_eq!(places, [0..2, 2..4, 4..6]);
        assert_eq!(items.next(), None);
    }
}
