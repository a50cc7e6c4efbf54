//! What the simulated machines are: what QEMU and the kernel are told of each kind of host is here and nowhere else.

use guest_images::Arch;

/// Which interface the PMU of an x86-64 host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostPmu {
    /// Six core counters, each switched on and off by itself.
    #[default]
    PerfCtrCore,
    /// The same with the global registers of PerfMonV2.
    PerfMonV2,
}

/// A simulated machine, as QEMU and Linux are told.
#[derive(Debug, Clone)]
pub struct Board {
    /// The machine.
    pub machine: &'static str,
    /// The processor.
    pub cpu: String,
    /// What runs before the kernel.
    pub firmware: &'static str,
    /// The host's kernel command line.
    pub command_line: &'static str,
    /// What the monitor calls the register with the address of the next instruction.
    pub instruction_pointer: &'static str,
}

/// An AMD Zen with virtualisation that does not look like a virtual machine itself. The family decides which events Linux
/// uses; see `cpu/README.md`. That family has no fast byte-wise string instructions, and simulating those is anything but
/// fast.
const ZEN: &str = "max,family=23,model=49,stepping=0,+svm,-hypervisor,+perfctr-core,-erms";
/// With virtualisation, and overflow interrupts of its counters. KVM gives those to guests only with an AIA.
const RISCV: &str = "rv64,h=true,sscofpmf=true,pmu-num=8";
/// `nokaslr` and a fixed seed make every boot the same; the watchdog would hold a counter; the rest spares the simulated
/// processor work.
const ZEN_COMMAND_LINE: &str = "console=ttyS0 quiet nokaslr nmi_watchdog=0 tsc=reliable no_timer_check mitigations=off \
                                random.trust_cpu=on cryptomgr.notests init_on_alloc=0 panic=-1 oops=panic";
/// The same, as far as there is such a thing.
const RISCV_COMMAND_LINE: &str =
    "console=ttyS0 quiet nokaslr random.trust_cpu=on cryptomgr.notests init_on_alloc=0 panic=-1 oops=panic";

impl Board {
    /// That of a kind of host.
    pub fn of(arch: Arch, pmu: HostPmu) -> Self {
        match arch {
            Arch::X86_64 => Self {
                machine: "pc,usb=off",
                cpu: match pmu {
                    HostPmu::PerfCtrCore => ZEN.to_owned(),
                    HostPmu::PerfMonV2 => format!("{ZEN},+perfmon-v2"),
                },
                firmware: "qboot.rom",
                command_line: ZEN_COMMAND_LINE,
                instruction_pointer: "RIP=",
            },
            Arch::Riscv64 => Self {
                machine: "virt,aia=aplic-imsic,aia-guests=3",
                cpu: RISCV.to_owned(),
                firmware: "fw_dynamic.bin",
                command_line: RISCV_COMMAND_LINE,
                instruction_pointer: " pc ",
            },
        }
    }

    /// The address of the next instruction, if this line of what the monitor says of the registers has it.
    pub fn address(&self, line: &str) -> Option<u64> {
        let (_, rest) = line.split_once(self.instruction_pointer)?;
        u64::from_str_radix(rest.trim_start().get(..16)?, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitors_registers_are_read() {
        let address = |arch, line| Board::of(arch, HostPmu::default()).address(line);
        let x86 = "RIP=ffffffff810a0b1c RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\\r\\n";
        assert_eq!(address(Arch::X86_64, x86), Some(0xffff_ffff_810a_0b1c));
        let riscv = " pc       ffffffff80b9e0f4\\r\\n mhartid  0000000000000000\\r\\n";
        assert_eq!(address(Arch::Riscv64, riscv), Some(0xffff_ffff_80b9_e0f4));
        assert_eq!(address(Arch::Riscv64, " mepc     ffffffff80b9e0f4"), None);
    }
}
