//! The host's KVM.

use std::fs;
use std::path::Path;

use super::fact::Fact;
use crate::kvm;
use crate::pmu::Choice;

/// The modules that make KVM of a kernel.
const MODULES: [&str; 3] = ["kvm_amd", "kvm_intel", "kvm_pvm"];

/// What there is to know of it.
pub fn facts() -> Vec<Fact> {
    let loaded = MODULES.into_iter().find(|module| Path::new("/sys/module").join(module).exists());
    let usable = match kvm::open(Choice::Auto) {
        Ok(_) => Fact::good(
            "kvm",
            format!(
                "/dev/kvm can be used ({}), and has {}",
                loaded.unwrap_or("built in"),
                kvm::needed(Choice::Auto).collect::<Vec<_>>().join(", ")
            ),
        ),
        Err(error) => Fact::bad("kvm", error.to_string()),
    };
    let linux = match guest_images::host::obstacle() {
        None => Fact::good("guests", "Linux runs here as it is"),
        Some(obstacle) => {
            Fact::bad("guests", format!("{obstacle}: `tally lab run` runs it on a simulated host"))
        }
    };
    [Some(usable), own_pmu(), Some(linux)].into_iter().flatten().collect()
}

/// Whether KVM would give its guests a PMU of its own.
fn own_pmu() -> Option<Fact> {
    let setting = |name: &str| {
        let value = fs::read_to_string(Path::new("/sys/module/kvm/parameters").join(name)).ok()?;
        Some(format!("{name} is {}", value.trim()))
    };
    let settings: Vec<String> =
        ["enable_pmu", "enable_mediated_pmu"].into_iter().filter_map(setting).collect();
    (!settings.is_empty())
        .then(|| Fact::note("kvm's pmu", format!("{}; Tally's guests do without it", settings.join(", "))))
}
