//! The simulated machines: QEMU's options and the kernel's command line for each architecture.

use guest_images::Arch;

/// Interface of an x86-64 host's PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostPmu {
    /// Six core counters without global registers.
    #[default]
    PerfCtrCore,
    /// Six core counters with the global registers of PerfMonV2.
    PerfMonV2,
}

/// A simulated machine.
#[derive(Debug, Clone)]
pub struct Board {
    /// Value of QEMU's `-machine`.
    pub machine: &'static str,
    /// Value of QEMU's `-cpu`.
    pub cpu: String,
    /// Value of QEMU's `-bios`.
    pub firmware: &'static str,
    /// Kernel command line of the host.
    pub command_line: &'static str,
    /// Text before the instruction pointer's value in the output of QEMU's `info registers`.
    pub instruction_pointer: &'static str,
}

/// An AMD Zen with virtualisation whose CPUID does not say that it is virtual. The family determines which events Linux
/// uses; see `cpu/README.md`. ERMS is off, as on processors of this family: the simulation is slow at REP MOVSB and REP
/// STOSB, which Linux would use with ERMS.
const ZEN: &str = "max,family=23,model=49,stepping=0,+svm,-hypervisor,+perfctr-core,-erms";
/// A processor with virtualisation and with overflow interrupts (Sscofpmf). KVM passes these on to guests only with an
/// AIA, which is an option of the machine.
const RISCV: &str = "rv64,h=true,sscofpmf=true,pmu-num=8";
/// `nokaslr` makes the addresses the same at every boot. The NMI watchdog would hold a counter. Most of the other
/// options save the simulated processor work.
const ZEN_COMMAND_LINE: &str = "console=ttyS0 quiet nokaslr nmi_watchdog=0 tsc=reliable no_timer_check mitigations=off \
                                random.trust_cpu=on cryptomgr.notests init_on_alloc=0 panic=-1 oops=panic";
/// Those of these options that exist on RISC-V.
const RISCV_COMMAND_LINE: &str =
    "console=ttyS0 quiet nokaslr random.trust_cpu=on cryptomgr.notests init_on_alloc=0 panic=-1 oops=panic";

impl Board {
    /// Returns the machine of an architecture. RISC-V ignores `pmu`.
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

    /// Returns the instruction pointer if this line of the monitor's `info registers` has it.
    pub fn address(&self, line: &str) -> Option<u64> {
        let (_, rest) = line.split_once(self.instruction_pointer)?;
        u64::from_str_radix(rest.trim_start().get(..16)?, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_pointer_is_found_in_the_monitors_output() {
        let address = |arch, line| Board::of(arch, HostPmu::default()).address(line);
        let x86 = "RIP=ffffffff810a0b1c RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\\r\\n";
        assert_eq!(address(Arch::X86_64, x86), Some(0xffff_ffff_810a_0b1c));
        let riscv = " pc       ffffffff80b9e0f4\\r\\n mhartid  0000000000000000\\r\\n";
        assert_eq!(address(Arch::Riscv64, riscv), Some(0xffff_ffff_80b9_e0f4));
        assert_eq!(address(Arch::Riscv64, " mepc     ffffffff80b9e0f4"), None);
    }
}
