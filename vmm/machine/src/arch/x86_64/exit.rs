//! Runs a vCPU and handles the exits that only x86 has: accesses to I/O ports and to the PMU's MSRs. Only this file
//! evaluates what `KVM_RUN` returns on x86.

use std::ptr::NonNull;

use devices::End;
use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::Outcome;
use vpmu::x86::rdpmc_in_program;

use super::board::Board;
use super::pmu::VcpuPmu;
use super::stored;
use crate::exit::{self, Bytes, ExitKind};
use crate::memory::GuestRam;

/// Reason for an exit to userspace.
pub type Exit = exit::Exit<ArchExit>;

/// Exits that only x86 has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchExit {
    /// The guest executes an IN, or several at once by a string instruction.
    PortRead(PortAccess),
    /// The guest executes an OUT, or several at once by a string instruction.
    PortWrite(PortAccess),
    /// The guest executes RDMSR of this register.
    ReadMsr(u32),
    /// The guest executes WRMSR of this register, with this value.
    WriteMsr(u32, u64),
}

/// An access to an I/O port. It has one item, or several for a string instruction, which [`KvmRun::take_item`] and
/// [`KvmRun::give_item`] transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAccess {
    /// Number of the port.
    pub port: u16,
    /// Number of bytes of each item.
    pub width: usize,
}

/// A vCPU's file descriptor, and the pages that KVM shares for the vCPU. It stays on the thread that runs the vCPU.
pub struct KvmRun {
    fd: VcpuFd,
    items: Option<Items>,
}

/// Items of an access to a port that are not transferred yet.
struct Items {
    /// All items of the access, in the pages that KVM shares.
    data: NonNull<[u8]>,
    /// Number of bytes of each item.
    width: usize,
    /// Offset of the next item in `data`.
    at: usize,
}

impl Items {
    /// Returns the range of the next item in `data` and advances past it. Returns `None` if no item is left.
    fn next(&mut self) -> Option<std::ops::Range<usize>> {
        let item = self.at..self.at + self.width;
        self.at = item.end;
        (item.end <= self.data.len()).then_some(item)
    }
}

impl KvmRun {
    /// Runs the guest until its next exit.
    fn enter(&mut self) -> Exit {
        self.items = None;
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                let data = NonNull::from(data);
                Exit::Arch(ArchExit::PortRead(self.port_access(port, data)))
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                let data = NonNull::from(data);
                Exit::Arch(ArchExit::PortWrite(self.port_access(port, data)))
            }
            Ok(VcpuExit::X86Rdmsr(exit)) => Exit::Arch(ArchExit::ReadMsr(exit.index)),
            Ok(VcpuExit::X86Wrmsr(exit)) => Exit::Arch(ArchExit::WriteMsr(exit.index, exit.data)),
            Ok(other) => Exit::from_vcpu_exit(&other).unwrap_or_else(|| Exit::from_kvm_run(&mut self.fd)),
            Err(error) => Exit::from_run_error(error),
        }
    }

    /// Passes the writes that KVM has coalesced to their devices.
    fn drain(&mut self, exit: &Exit, board: &Board) {
        // Of these, an access may be one of the console's registers, and the others end the guest.
        let is_ordered = matches!(
            exit,
            Exit::Arch(ArchExit::PortRead(_) | ArchExit::PortWrite(_)) | Exit::End(_) | Exit::Fatal(_)
        );
        let next = || self.fd.coalesced_mmio_read().ok().flatten();
        board.coalescing.drain(next, &board.ports, is_ordered);
    }

    fn port_access(&mut self, port: u16, data: NonNull<[u8]>) -> PortAccess {
        let width = item_width(self.fd.get_kvm_run());
        self.items = Some(Items { data, width, at: 0 });
        PortAccess { port, width }
    }

    /// Returns the next item that the guest writes to a port, or `None` if no item is left.
    pub fn take_item(&mut self) -> Option<Bytes> {
        let items = self.items.as_mut()?;
        let item = items.next()?;
        // SAFETY: KVM reported this slice of the vCPU's shared pages at the last exit. The pages are mapped as long as
        // `self.fd` is open. Since that exit `self.fd` was neither run nor borrowed by a caller, because both `enter`
        // and `fd` clear `items`. So there is no other reference to the slice, and KVM does not access it.
        let data = unsafe { items.data.as_ref() };
        Some(Bytes::copy_of(&data[item]))
    }

    /// Calls `read` for the next item that the guest reads from a port and stores the result for the guest. Returns
    /// false, without a call of `read`, if no item is left.
    pub fn give_item(&mut self, read: impl FnOnce() -> Bytes) -> bool {
        let Some(items) = &mut self.items else { return false };
        let Some(item) = items.next() else { return false };
        let value = read();
        // SAFETY: as in `take_item`. The exit was a read of a port, for which KVM expects the slice to be written.
        let data = unsafe { items.data.as_mut() };
        data[item].copy_from_slice(&value);
        true
    }

    /// Completes the guest's RDMSR with a value, or with a fault (#GP).
    fn complete_rdmsr(&mut self, outcome: Outcome) {
        let answer = &mut self.fd.get_kvm_run().__bindgen_anon_1;
        match outcome {
            Outcome::Value(value) => answer.msr.data = value,
            Outcome::Handled | Outcome::Fault | Outcome::NotHandled => answer.msr.error = 1,
        }
    }

    /// Completes the guest's WRMSR. It faults (#GP) unless it was handled.
    fn complete_wrmsr(&mut self, outcome: Outcome) {
        if outcome != Outcome::Handled {
            self.fd.get_kvm_run().__bindgen_anon_1.msr.error = 1;
        }
    }

    /// Wraps the file descriptor. Must be called on the thread that runs the vCPU.
    pub fn new(fd: VcpuFd) -> Self {
        Self { fd, items: None }
    }

    /// Returns the vCPU's file descriptor, for all operations except `KVM_RUN`. Discards the items of a port access
    /// that are left, because the caller may invalidate them.
    pub fn fd(&mut self) -> &mut VcpuFd {
        self.items = None;
        &mut self.fd
    }

    /// Runs the guest until its next exit. Writes that KVM has coalesced are then passed to their devices, which so see
    /// all accesses in order.
    pub fn run(&mut self, board: &Board) -> Exit {
        let exit = self.enter();
        self.drain(&exit, board);
        exit
    }

    /// Returns the kind under which an exit is counted.
    pub fn kind(exit: &ArchExit) -> ExitKind {
        match exit {
            ArchExit::PortRead(_) => ExitKind::PortRead,
            ArchExit::PortWrite(_) => ExitKind::PortWrite,
            ArchExit::ReadMsr(_) => ExitKind::PmuRead,
            ArchExit::WriteMsr(..) => ExitKind::PmuWrite,
        }
    }

    /// Handles an exit that only this architecture has. Returns how the machine ends if the exit ends it.
    pub fn handle(
        &mut self,
        exit: ArchExit,
        pmu: &mut VcpuPmu,
        board: &Board,
        ram: &GuestRam,
    ) -> Option<End> {
        if let ArchExit::PortRead(_) | ArchExit::PortWrite(_) = exit {
            pmu.completes_instruction(|| Self::is_in_user_mode(&self.fd));
        }
        match exit {
            ArchExit::PortRead(PortAccess { port, width }) => {
                let read = || {
                    let mut item = Bytes::zeroes(width);
                    board.ports.read(port, &mut item);
                    item
                };
                while self.give_item(read) {}
            }
            ArchExit::PortWrite(PortAccess { port, .. }) => {
                while let Some(item) = self.take_item() {
                    board.coalescing.watch(port, &item);
                    if let Some(end) = board.ports.write(port, &item) {
                        return Some(end);
                    }
                }
            }
            ArchExit::ReadMsr(msr) => {
                let outcome = match rdpmc_in_program(msr) {
                    Some(counter) => pmu.read_in_program(self.fd(), ram, counter),
                    None => pmu.read(self.fd(), msr),
                };
                self.complete_rdmsr(outcome);
            }
            ArchExit::WriteMsr(msr, value) => {
                let outcome = pmu.write(self.fd(), msr, value);
                self.complete_wrmsr(outcome);
            }
        }
        None
    }

    /// Returns whether a vCPU is in user mode. The privilege level is in SS: in CS the kernel may have conforming code.
    pub fn is_in_user_mode(fd: &VcpuFd) -> bool {
        fd.get_sregs().is_ok_and(|sregs| sregs.ss.dpl == 3)
    }

    /// Returns a vCPU's instruction pointer. After a triple fault on AMD processors, KVM reports the value after a
    /// reset instead.
    pub fn instruction_pointer(fd: &VcpuFd) -> u64 {
        fd.get_regs().map_or(0, |regs| regs.rip)
    }

    /// Makes KVM store the registers at the next exits that [`Self::instruction_pointer_at_exit`] needs. A separate
    /// `KVM_GET_REGS` would cost more than the rest of the logging.
    pub fn store_instruction_pointer(fd: &mut VcpuFd) {
        stored::store_general(fd);
    }

    /// Makes KVM store the registers at the next exits by which a vCPU is looked at.
    pub fn store_registers(fd: &mut VcpuFd) {
        stored::store(fd);
    }

    /// Ends both.
    pub fn forget_registers(fd: &mut VcpuFd) {
        stored::forget(fd);
    }

    /// Returns the instruction pointer at the last exit. Must be called before anything else is done after it.
    pub fn instruction_pointer_at_exit(fd: &mut VcpuFd) -> u64 {
        stored::general(fd).map_or(0, |registers| registers.rip)
    }

    /// Tells the guest's kernel that its vCPU was paused (`KVM_KVMCLOCK_CTRL`), so that its watchdogs do not report a
    /// lockup. The ioctl fails if the guest does not use kvmclock; there is no other way to tell the guest.
    pub fn tell_guest_of_pause(fd: &VcpuFd) {
        let _ = fd.kvmclock_ctrl();
    }
}

/// Returns the number of bytes of each item of an access to a port. A string instruction has several items.
fn item_width(run: &kvm_run) -> usize {
    // SAFETY: only called after `KVM_EXIT_IO`, for which KVM fills in this member of the union.
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
