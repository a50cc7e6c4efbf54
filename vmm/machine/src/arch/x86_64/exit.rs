//! What `KVM_RUN` comes back for here: I/O ports, and the MSRs that are the PMU's.

use devices::End;
use kvm_bindings::kvm_run;
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use vpmu::Outcome;

use crate::pmu::thread::ThreadPmu;
use crate::vcpu::{Exit, Vcpu};

/// What says where a vCPU is.
pub const POINTER: &str = "RIP";

/// What it came back for, free of the borrow of the vCPU's file.
enum Left {
    /// An `in`, to be answered into this memory.
    In(u16, *mut [u8]),
    /// An `out` of what is in this memory.
    Out(u16, *const [u8]),
    /// Anything else.
    Otherwise(Exit),
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

impl Vcpu {
    /// Runs the guest until it leaves.
    pub fn enter(&mut self, pmu: &mut ThreadPmu) -> Exit {
        let left = self.run_once(pmu);
        self.buses.drain(&mut self.fd);
        match left {
            Left::In(port, data) => {
                self.input(port, data);
                Exit::Nothing
            }
            Left::Out(port, data) => self.output(port, data).map_or(Exit::Nothing, Exit::End),
            Left::Otherwise(exit) => exit,
        }
    }

    fn run_once(&mut self, pmu: &mut ThreadPmu) -> Left {
        Left::Otherwise(match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                self.exits.port_reads += 1;
                return Left::In(port, data);
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                self.exits.port_writes += 1;
                return Left::Out(port, data);
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.exits.memory_reads += 1;
                self.buses.memory.read(address, data);
                Exit::Nothing
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.exits.memory_writes += 1;
                self.buses.memory.write(address, data);
                Exit::Nothing
            }
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                self.exits.pmu_reads += 1;
                self.stopwatch.exits_for_pmu();
                let (msr, data, error) = (exit.index, &raw mut *exit.data, &raw mut *exit.error);
                match pmu.read(&self.fd, msr) {
                    // SAFETY: as for `input`.
                    Outcome::Value(value) => unsafe { *data = value },
                    // SAFETY: as for `input`.
                    Outcome::Handled | Outcome::Fault | Outcome::NotMine => unsafe { *error = 1 },
                }
                Exit::Nothing
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                self.exits.pmu_writes += 1;
                self.stopwatch.exits_for_pmu();
                let (msr, data, error) = (exit.index, exit.data, &raw mut *exit.error);
                if pmu.write(&self.fd, msr, data) != Outcome::Handled {
                    // SAFETY: as for `input`.
                    unsafe { *error = 1 };
                }
                Exit::Nothing
            }
            Ok(other) => Exit::of(&other).unwrap_or_else(|| self.rare_exit()),
            Err(error) => self.failed_run(error),
        })
    }

    fn input(&mut self, port: u16, data: *mut [u8]) {
        let width = access_width(self.fd.get_kvm_run());
        // SAFETY: KVM gave this slice of the vCPU's shared pages, which stay mapped as long as `self.fd` is open;
        // the borrow it came with is over, and nothing else touches it before the next `KVM_RUN`.
        let data = unsafe { &mut *data };
        for item in data.chunks_exact_mut(width) {
            self.buses.ports.read(port, item);
        }
    }

    fn output(&mut self, port: u16, data: *const [u8]) -> Option<End> {
        let width = access_width(self.fd.get_kvm_run());
        // SAFETY: as for input.
        let data = unsafe { &*data };
        data.chunks_exact(width).find_map(|item| {
            self.buses.coalescing.watch(port, item);
            self.buses.ports.write(port, item)
        })
    }
}

/// How wide each access of the port exit is; a string instruction makes several of them at once.
fn access_width(run: &kvm_run) -> usize {
    // SAFETY: called for a port exit only, where the kernel has filled in this member of the union.
    let io = unsafe { run.__bindgen_anon_1.io };
    usize::from(io.size).max(1)
}
