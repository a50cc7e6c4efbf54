//! The hosts that the lab simulates: their processors and PMUs.

use std::str::FromStr;

use guest_images::Arch;

/// In what a simulated host differs from a distribution's.
const DIFFERENCES: &str = include_str!("../../host/differences");

/// A simulated processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// An AMD Zen, by QEMU.
    Amd,
    /// An Intel Core, by Bochs.
    Intel,
    /// A RISC-V processor with the hypervisor extension, by QEMU.
    Riscv64,
}

/// PMU of an x86-64 host, which also says whose processor it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostPmu {
    /// AMD: six core counters without global registers.
    #[default]
    PerfCtrCore,
    /// AMD: six core counters with the global registers of PerfMonV2.
    PerfMonV2,
    /// Intel: architectural performance monitoring.
    Intel(Perfmon),
}

/// Version of Intel's architectural performance monitoring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Perfmon {
    /// Version 2: four counters, whose writes have 32 bits.
    V2,
    /// Version 4: four counters.
    V4,
    /// Version 5: eight counters.
    #[default]
    V5,
}

impl HostPmu {
    /// The default PMU of an Intel host.
    pub const INTEL: Self = Self::Intel(Perfmon::V5);
}

impl Perfmon {
    /// Returns the version with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::V2, Self::V4, Self::V5].into_iter().find(|version| version.number() == number)
    }

    /// Returns the version's number.
    pub fn number(self) -> u8 {
        match self {
            Self::V2 => 2,
            Self::V4 => 4,
            Self::V5 => 5,
        }
    }
}

impl FromStr for Processor {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = [Self::Amd, Self::Intel, Self::Riscv64];
        all.into_iter()
            .find(|processor| processor.name() == name)
            .ok_or_else(|| "the hosts are amd, intel and riscv64".to_owned())
    }
}

impl Processor {
    /// Returns the processor's architecture.
    pub fn arch(self) -> Arch {
        match self {
            Self::Amd | Self::Intel => Arch::X86_64,
            Self::Riscv64 => Arch::Riscv64,
        }
    }

    /// Returns the name of hosts with this processor.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd => "amd",
            Self::Intel => "intel",
            Self::Riscv64 => "riscv64",
        }
    }

    /// Returns the processor of a host of this architecture, on which an x86-64 host has this PMU.
    pub fn of(arch: Arch, pmu: HostPmu) -> Self {
        match (arch, pmu) {
            (Arch::X86_64, HostPmu::PerfCtrCore | HostPmu::PerfMonV2) => Self::Amd,
            (Arch::X86_64, HostPmu::Intel(_)) => Self::Intel,
            (Arch::Riscv64, _) => Self::Riscv64,
        }
    }

    /// Returns the kernel's command line: what this host's kernel is told in [`DIFFERENCES`].
    pub fn command_line(self) -> String {
        let is_for_this = |hosts: &str| match hosts {
            "all" => true,
            "x86" => self.arch() == Arch::X86_64,
            host => host == self.name(),
        };
        let lines = DIFFERENCES.lines().filter(|line| !line.starts_with('#'));
        let words = lines.filter_map(|line| {
            let (hosts, rest) = line.split_once(' ')?;
            is_for_this(hosts).then(|| rest.split_whitespace().next()).flatten()
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_told_what_is_for_all_and_what_is_for_it() {
        let has = |processor: Processor, word| processor.command_line().split(' ').any(|one| one == word);
        for (word, on) in [
            ("quiet", [true, true, true]),
            ("tsc=reliable", [true, true, false]),
            ("console=ttyS0,115200", [false, true, false]),
        ] {
            assert_eq!(
                [Processor::Amd, Processor::Intel, Processor::Riscv64].map(|host| has(host, word)),
                on,
                "{word}"
            );
        }
    }

    #[test]
    fn every_difference_has_a_reason() {
        for line in DIFFERENCES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            assert!(line.split_whitespace().count() > 3, "{line}");
        }
    }
}
