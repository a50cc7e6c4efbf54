use super::*;
use vpmu::policy::{Allowed, Tier};

/// Returns the error message for a text.
fn mistake(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.toml");
    fs::write(&path, text).unwrap();
    let told = of_file(&path).unwrap_err().to_string();
    assert!(!told.contains('\n'), "{told}");
    told.split_once("p.toml").unwrap().1.to_owned()
}

fn policy(text: &str) -> Policy {
    settings_of(text).unwrap().iter().fold(Policy::default(), Policy::with)
}

#[test]
fn an_empty_file_is_the_default_policy() {
    assert_eq!(policy(""), Policy::default());
    assert_eq!(policy("# Nothing.\n"), Policy::default());
}

#[test]
fn a_file_can_have_every_key() {
    let text = "tier = \"standard\"\nmin-period = 10_000\nmax-interrupts-per-second = 500\n\
                freeze = \"hybrid\"\non-starvation = \"scale\"\nspare-counters = 2\nebb = false\n\
                record = false\n";
    let said = Policy {
        allowed: Allowed::Tier(Tier::Standard),
        min_period: NonZeroU64::new(10_000).unwrap(),
        max_interrupts_per_second: NonZeroU32::new(500),
        freeze: Freeze::Hybrid,
        on_starvation: OnStarvation::Scale,
        spare_counters: 2,
        ebb: false,
        record: false,
    };
    assert_eq!(policy(text), said);
}

#[test]
fn events_are_allowed_by_name_and_by_mask() {
    let rules = ["instructions", "r00c0/00ff", "r1000001c0"].map(|rule| rule.parse().unwrap());
    let said =
        policy("allow = [\n  \"instructions\", # All of them.\n  \"r00c0/00ff\",\n  \"r1000001c0\",\n]\n");
    assert_eq!(said.allowed, Allowed::These(rules.to_vec()));
    assert_eq!(policy("allow = []").allowed, Allowed::These(Vec::new()));
}

#[test]
fn mistakes_are_reported_with_their_line_and_a_suggestion() {
    for (text, told) in [
        ("tires = \"standard\"", ", line 1: unknown key `tires`: did you mean `tier`?"),
        ("\n\n[guests]\n", ", line 3: unknown key `guests` (there are tier, allow, "),
        ("tier = \"standart\"", ", line 1: tier: unknown word `standart`: did you mean `standard`?"),
        ("tier = \"gold\"", "unknown word `gold` (there are architectural, standard, enhanced)"),
        ("tier = 1", ", line 1: tier is `architectural`, `standard` or `enhanced`"),
        (
            "# Events\nallow = [\n \"cycles\",\n \"instrutions\" ]",
            ", line 4: allow: unknown event `instrutions`: did you mean `instructions`?",
        ),
        ("allow = [\"r\"]", "unknown event `r`: write a name of `perf`"),
        ("allow = [\"r12/\"]", "unknown event `r12/`: an encoding is `r`, "),
        ("allow = [\"r01c0/00ff\"]", "`r01c0/00ff` can be no event: its mask 0xff leaves out bits of 0x1c0"),
        ("allow = [1]", "allow is a list of events"),
        ("min-period = 0", ", line 1: min-period is a number of counts, from 1 on"),
        ("min-period = -5", "min-period is a number of counts, from 1 on"),
        ("max-interrupts-per-second = 0", "max-interrupts-per-second is a number from 1 on, or `none`"),
        ("max-interrupts-per-second = 5000000000", "is a number from 1 on"),
        ("freeze = \"hsot\"", "freeze: unknown word `hsot`: did you mean `host`?"),
        ("spare-counters = -1", ", line 1: spare-counters is a number of counters"),
        ("on-starvation = true", "on-starvation is `report`, `scale` or `stop`"),
        (
            "allow = []\nfreeze = \"guest\"\ntier = \"standard\"",
            ", line 3: `allow` and `tier` both say which events are allowed",
        ),
        ("freeze = \"guest\"\nfreeze = \"host\"", ", line 2: duplicate key"),
        ("tier: standard", ", line 1: "),
    ] {
        let mistake = mistake(text);
        assert!(mistake.contains(told), "{text}: {mistake}");
    }
}

#[test]
fn tenant_is_built_in_and_limits_everything_that_a_guest_could_do_to_others() {
    let tenant = of_file(Path::new("tenant")).unwrap();
    assert_eq!(tenant.allowed, Allowed::Tier(Tier::Architectural));
    assert!(tenant.max_interrupts_per_second.is_some() && tenant.min_period > NonZeroU64::MIN);
    assert_eq!((tenant.freeze, tenant.on_starvation), (Freeze::Guest, OnStarvation::Report));
    assert_eq!((tenant.spare_counters, tenant.offered_counters(6), tenant.ebb), (1, 5, false));
    let keys = settings_of(TENANT_TEXT).unwrap().len();
    assert_eq!(keys, KEYS.len() - 1, "it says everything but `allow`: another default changes nothing");
}

#[test]
fn tenant_can_be_printed_and_used_as_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = text_of_file(Path::new("tenant")).unwrap();
    assert!(text.contains("# "), "{text}");
    let mine = folder.path().join("mine.toml");
    fs::write(&mine, &text).unwrap();
    assert_eq!(of_file(&mine).unwrap(), of_file(Path::new("tenant")).unwrap());
    assert_eq!(settings_of(&text_of_file(&mine).unwrap()), settings_of(&text));
    // Only the bare word is the policy.
    let file = folder.path().join("tenant");
    fs::write(&file, "tier = \"standard\"").unwrap();
    assert_eq!(of_file(&file).unwrap().allowed, Allowed::Tier(Tier::Standard));
    let told = of_file(Path::new("./tenant")).unwrap_err().to_string();
    assert!(told.starts_with("./tenant: No such file"), "{told}");
}

#[test]
fn a_running_guest_keeps_its_counters() {
    let before = Policy { spare_counters: 2, ..Policy::default() };
    let after = before.changed_by(&change(Some(Path::new("tenant")), &[]).unwrap());
    assert_eq!(after, Policy { spare_counters: 2, ..of_file(Path::new("tenant")).unwrap() });
}

#[test]
fn a_missing_file_is_named() {
    let told = of_file(Path::new("/does/not/exist.toml")).unwrap_err().to_string();
    assert!(told.starts_with("/does/not/exist.toml: No such file"), "{told}");
}

#[test]
fn a_setting_is_written_as_key_and_value() {
    let said = |text: &str| assignment(text).map(|setting| Policy::default().with(&setting));
    let standard = Policy { allowed: Allowed::Tier(Tier::Standard), ..Policy::default() };
    assert_eq!(said("tier=standard").unwrap(), standard);
    assert_eq!(said("allow=cycles,r00c0/00ff").unwrap(), policy("allow = [\"cycles\", \"r00c0/00ff\"]"));
    assert_eq!(said("allow=").unwrap(), policy("allow = []"));
    assert_eq!(said("min-period=10000").unwrap(), policy("min-period = 10_000"));
    assert_eq!(said("max-interrupts-per-second=none").unwrap(), Policy::default());
    for (text, told) in [
        ("standard", "`standard` is no KEY=VALUE; the keys are tier, allow, "),
        ("teir=standard", "unknown key `teir`: did you mean `tier`?"),
        ("tier=architectual", "did you mean `architectural`?"),
        ("allow=cycels", "allow: unknown event `cycels`: did you mean `cycles`?"),
        ("min-period=10k", "min-period is a number of counts, from 1 on"),
    ] {
        let mistake = assignment(text).unwrap_err().to_string();
        assert!(mistake.contains(told), "{text}: {mistake}");
    }
}

#[test]
fn settings_keep_the_rest_of_a_policy_and_a_file_replaces_it() {
    let before = policy("tier = \"standard\"\nmin-period = 5");
    let settings = [assignment("min-period=7").unwrap()];
    let after = before.changed_by(&change(None, &settings).unwrap());
    assert_eq!(after, policy("tier = \"standard\"\nmin-period = 7"));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "freeze = \"host\"\nmin-period = 9").unwrap();
    let after = before.changed_by(&change(Some(file.path()), &settings).unwrap());
    assert_eq!(after, policy("freeze = \"host\"\nmin-period = 7"));
}

#[test]
fn a_policy_that_is_printed_can_be_read_again() {
    let tiers = [Tier::Architectural, Tier::Standard, Tier::Enhanced].map(Allowed::Tier);
    let lists = [Allowed::These(vec!["cycles".parse().unwrap(), "r00c0/00ff".parse().unwrap()])];
    let ways = [OnStarvation::Report, OnStarvation::Scale, OnStarvation::Stop];
    for allowed in tiers.into_iter().chain(lists) {
        for (freeze, on_starvation) in [Freeze::Guest, Freeze::Hybrid, Freeze::Host].into_iter().zip(ways) {
            let spare_counters = 3;
            let policy = Policy {
                allowed: allowed.clone(),
                freeze,
                on_starvation,
                spare_counters,
                ebb: freeze == Freeze::Guest,
                ..Policy::default()
            };
            let settings = settings_of(&toml(&policy)).unwrap();
            assert_eq!(settings.iter().fold(Policy::default(), Policy::with), policy);
        }
    }
}
