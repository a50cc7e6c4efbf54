//! Facts about a RISC-V host's processor.

use std::fs;

use guest_images::host::has_hypervisor_extension;

use crate::arch::value;
use crate::host::fact::Fact;

/// Where a build leaves a kernel in its tree.
pub const IMAGE_IN_TREE: &str = "arch/riscv/boot/Image";

/// Returns the facts about the processor.
pub fn facts() -> Vec<Fact> {
    vec![virtualisation(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())]
}

fn virtualisation(cpuinfo: &str) -> Fact {
    let about = "processor";
    let isa = value(cpuinfo, "isa");
    if has_hypervisor_extension(cpuinfo) {
        Fact::good(about, format!("{isa}, with the hypervisor extension"))
    } else {
        Fact::bad(about, format!("{isa}, without the hypervisor extension (H): no guest runs here"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fact::State;

    #[test]
    fn the_hypervisor_extension_is_one_of_the_letters() {
        let state = |isa: &str| virtualisation(&format!("processor\t: 0\nisa\t\t: {isa}\n")).state;
        assert_eq!(state("rv64imafdch_zicsr"), State::Good);
        assert_eq!(state("rv64imafdc_zihintpause_sscofpmf"), State::Bad);
    }
}
