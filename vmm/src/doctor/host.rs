//! The processor and the kernel.

use std::fs;

use super::fact::Fact;

/// What there is to know of them.
pub fn facts() -> Vec<Fact> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    vec![virtualisation(&cpuinfo), Fact::note("kernel", named_kernel())]
}

/// The first processor: its name, and the numbers by which it is known.
pub fn processor() -> String {
    described(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// The kernel that runs.
pub fn named_kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("Linux {}", release.trim())
}

fn virtualisation(cpuinfo: &str) -> Fact {
    let has = |flag: &str| value(cpuinfo, "flags").split(' ').any(|word| word == flag);
    let processor = described(cpuinfo);
    match (has("svm"), has("vmx")) {
        (true, _) => Fact::good("processor", format!("{processor}, with AMD-V")),
        (_, true) => Fact::good("processor", format!("{processor}, with VT-x")),
        _ => Fact::bad(
            "processor",
            format!(
                "{processor}, without hardware virtualisation: switch it on in the firmware's settings (SVM, VT-x); in a \
                 virtual machine, have its host allow nested ones"
            ),
        ),
    }
}

fn described(cpuinfo: &str) -> String {
    format!(
        "{} (family {}, model {}, stepping {}, microcode {})",
        value(cpuinfo, "model name"),
        value(cpuinfo, "cpu family"),
        value(cpuinfo, "model"),
        value(cpuinfo, "stepping"),
        value(cpuinfo, "microcode")
    )
}

/// What the first processor has for a key.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::super::fact::State;
    use super::*;

    const CPUINFO: &str =
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 151\nmodel name\t: A core\nstepping\t: 2\n";

    #[test]
    fn a_processor_is_named_with_its_numbers() {
        assert_eq!(described(CPUINFO), "A core (family 6, model 151, stepping 2, microcode ?)");
    }

    #[test]
    fn virtualisation_is_known_by_its_flag() {
        let says = |flags: &str| virtualisation(&format!("{CPUINFO}flags\t\t: fpu {flags} lm\n"));
        assert!(says("svm").says.ends_with("with AMD-V") && says("vmx").says.ends_with("with VT-x"));
        assert_eq!(says("svm_lock").state, State::Bad);
    }
}
