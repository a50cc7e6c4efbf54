//! Facts about the host's KVM.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvm_ioctls::Kvm;
use tally_machine::kvm::{self, Capability, KvmError, MODULES, OPTIONAL, own_pmu_state};
use tally_machine::pmu::Choice;

use crate::host::fact::Fact;
use crate::host::kvm::{MediatedPmu, NoKvm, SYS_MODULE, open_any};
use crate::host::lab;

/// Subject of the facts about `/dev/kvm`. A bad fact of this or the next two subjects means that no Linux guest runs.
pub const ABOUT: &str = "kvm";
/// Subject of the facts about KVM's capabilities.
pub const CAPABILITY: &str = "capability";
/// Subject of the fact about Linux guests.
pub const LINUX: &str = "guests";

/// Returns the facts about KVM.
pub fn facts() -> Vec<Fact> {
    let module = MODULES.iter().copied().find(|(name, _)| Path::new(SYS_MODULE).join(name).exists());
    let mut facts = match open_any() {
        Ok(kvm) => usable(&kvm, module),
        Err(NoKvm::Absent(_)) => vec![absent(Path::new(SYS_MODULE))],
        Err(NoKvm::Refused(KvmError::Forbidden)) => vec![forbidden()],
        Err(error) => vec![Fact::bad(ABOUT, error.to_string())],
    };
    facts.extend(parameters(Path::new(SYS_MODULE)));
    facts.push(match guest_images::host::obstacle() {
        None => Fact::good(LINUX, "Linux runs here as it is"),
        Some(obstacle) => Fact::bad(LINUX, format!("{obstacle}{}", lab::LAB_HINT)),
    });
    facts
}

fn usable(kvm: &Kvm, module: Option<(&str, &str)>) -> Vec<Fact> {
    let (name, virtualization) = module.unwrap_or(("built into the kernel", "how is not known"));
    let version = kvm.get_api_version();
    let says = format!("/dev/kvm can be used ({name}, {virtualization}), version {version} of its interface");
    let opened = if version == kvm::API_VERSION {
        Fact::good(ABOUT, says)
    } else {
        Fact::bad(ABOUT, format!("{says}, not {}", kvm::API_VERSION))
    };
    let mut facts = vec![opened];
    let has = |capability: &Capability| kvm.check_extension(capability.cap);
    facts
        .extend(kvm::required_capabilities(Choice::Auto).map(|required| capability(required, has(required))));
    facts.extend(OPTIONAL.iter().map(|capability| optional(capability, has(capability))));
    facts.push(Fact::note(CAPABILITY, own_pmu_state(kvm)));
    facts
}

fn capability(capability: &Capability, is_there: bool) -> Fact {
    let Capability { name, purpose, .. } = capability;
    if is_there {
        Fact::good(CAPABILITY, format!("{name} is there, for {purpose}"))
    } else {
        Fact::bad(
            CAPABILITY,
            format!("{name} is missing, for {purpose}: no guest runs without; a newer kernel may have it"),
        )
    }
}

fn optional(capability: &Capability, is_there: bool) -> Fact {
    let Capability { name, purpose, .. } = capability;
    let there = if is_there { "is there" } else { "is missing" };
    Fact::note(CAPABILITY, format!("{name} {there}, for {purpose}; guests run without, too"))
}

/// Explains why there is no `/dev/kvm`: a container without the device, or a module that is not loaded.
fn absent(modules: &Path) -> Fact {
    if modules.join("kvm").exists() {
        return Fact::bad(
            ABOUT,
            "no /dev/kvm, though this kernel has KVM: make it, `sudo mknod /dev/kvm c 10 232`, or in a container give it \
             along: `docker run --device /dev/kvm ...`",
        );
    }
    Fact::bad(
        ABOUT,
        format!(
            "no /dev/kvm: this kernel has no KVM, or its module is not loaded: {}",
            kvm::modprobe_commands("sudo ")
        ),
    )
}

fn forbidden() -> Fact {
    let (mode, group) =
        fs::metadata("/dev/kvm").map_or((0, 0), |device| (device.mode() & 0o777, device.gid()));
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    Fact::bad(ABOUT, refusal(mode, group, &groups))
}

/// Explains what a user can do about a device with this mode and group.
fn refusal(mode: u32, group: u32, groups: &str) -> String {
    const ROOT: u32 = 0;
    const GROUP_MAY: u32 = 0o060;
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        (number.parse() == Ok(group)).then_some(name)
    });
    if group == ROOT || mode & GROUP_MAY != GROUP_MAY {
        return format!(
            "/dev/kvm: permission denied, for it is root's alone (mode {mode:o}): `sudo chgrp kvm /dev/kvm`, \
             `sudo chmod 660 /dev/kvm` and `sudo usermod -aG kvm $USER`, then log in again"
        );
    }
    let name = named.map_or_else(|| group.to_string(), str::to_owned);
    format!(
        "/dev/kvm: permission denied: join the group {name} that owns it: `sudo usermod -aG {name} $USER`, then log in again"
    )
}

/// Returns the facts about parameters of KVM's modules.
fn parameters(modules: &Path) -> Vec<Fact> {
    let read = |module: &str, name: &str| {
        let value = fs::read_to_string(modules.join(module).join("parameters").join(name)).ok()?;
        Some(value.trim().to_owned())
    };
    let own = read("kvm", "enable_pmu").map(|value| {
        Fact::note(
            "kvm's pmu",
            format!("enable_pmu is {value}: Tally's guests do without KVM's own PMU either way"),
        )
    });
    let mediated = MediatedPmu::find(modules).map(|mediated| {
        let (module, parameter) = (mediated.module, MediatedPmu::NAME);
        let says = if mediated.is_on() {
            format!(
                "a guest with KVM's own PMU takes the counters from all others while it runs, and none are counted then; \
                 to have KVM loaded without: `echo options {module} {parameter}=0 | sudo tee /etc/modprobe.d/tally.conf`"
            )
        } else {
            format!(
                "no guest takes the counters from others; with {parameter}=1, one with `--pmu kvm` has them to itself"
            )
        };
        Fact::note("kvm's pmu", format!("{mediated}: {says}"))
    });
    let nested = MODULES.iter().find_map(|(module, _)| {
        let value = read(module, "nested")?;
        Some(Fact::note(
            "nested",
            format!("{module}'s nested is {value}: Tally's guests run no guests either way"),
        ))
    });
    [own, mediated, nested].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fact::State;

    #[test]
    fn the_group_that_owns_the_device_is_named() {
        let groups = "root:x:0:\nlibvirt:x:64:someone\n";
        assert!(refusal(0o660, 64, groups).contains("`sudo usermod -aG libvirt $USER`"));
        assert!(refusal(0o660, 65, groups).contains("`sudo usermod -aG 65 $USER`"));
        for (mode, group) in [(0o600, 64), (0o660, 0)] {
            assert!(refusal(mode, group, groups).contains("`sudo chmod 660 /dev/kvm`"), "{mode:o} {group}");
        }
    }

    #[test]
    fn parameters_of_kvms_modules_are_shown() {
        let modules = tempfile::tempdir().unwrap();
        assert!(parameters(modules.path()).is_empty());
        for (name, value) in [
            ("kvm/parameters/enable_pmu", "N\n"),
            (&format!("{}/parameters/{}", MODULES[0].0, MediatedPmu::NAME), "Y\n"),
            (&format!("{}/parameters/nested", MODULES[0].0), "1\n"),
        ] {
            let path = modules.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }
        let facts = parameters(modules.path());
        let [own, mediated, nested] = &facts[..] else { panic!("{facts:?}") };
        assert!(own.says.starts_with("enable_pmu is N"));
        let command = format!("`echo options {} enable_mediated_pmu=0 |", MODULES[0].0);
        assert!(mediated.says.contains(&command), "{mediated}");
        assert!(nested.says.starts_with(&format!("{}'s nested is 1", MODULES[0].0)));
    }

    #[test]
    fn a_missing_device_is_explained_with_or_without_a_module() {
        let modules = tempfile::tempdir().unwrap();
        assert!(absent(modules.path()).says.contains(&kvm::modprobe_commands("sudo ")));
        fs::create_dir(modules.path().join("kvm")).unwrap();
        assert!(absent(modules.path()).says.contains("--device /dev/kvm"));
    }

    #[test]
    fn a_missing_capability_that_every_guest_needs_is_bad() {
        let required = kvm::required_capabilities(Choice::Auto).next().unwrap();
        assert_eq!(
            (capability(required, true).state, capability(required, false).state),
            (State::Good, State::Bad)
        );
        assert_eq!(optional(required, false).state, State::Note);
    }
}
