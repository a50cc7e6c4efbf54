//! Tests of the guest's PMU with guests that have no operating system, on the lab's simulated host: register values,
//! counts, overflow interrupts, and hostile guests.
//!
//! All guests run in two boots of the host: one for short guests, and one for guests that run long or never end. Each
//! module adds its guests to them and checks what they printed. The words of a guest's command line are documented at
//! [`guest_images::payloads::BARE_METAL`].

mod counting;
mod delivery;
mod hostile;
mod registers;

use std::sync::LazyLock;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Results, StepOutput, Steps};
use guest_tests::suite::{Test, on_intel, second_tier};

/// The tests of this module's submodules.
pub fn tests() -> Vec<Test> {
    let below = [counting::tests, delivery::tests, hostile::tests, registers::tests];
    let also_on_intel = [counting::on_any_host(), delivery::on_any_host(), registers::tests()].concat();
    let on_intel = second_tier(on_intel(also_on_intel));
    below.into_iter().flat_map(|tests| tests()).chain(on_intel).collect()
}

/// A PMU model that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pmu {
    /// AMD's PMU with PerfMonV2: six counters and global registers.
    V2,
    /// AMD's PMU with `PerfCtrExtCore`: six counters without global registers.
    Core,
    /// AMD's PMU since the K7: four counters.
    K7,
    /// KVM's own vPMU, for comparison. It has the registers of `Core`.
    Kvm,
    /// Intel's architectural PMU of version 5, with four general counters and two fixed ones.
    Intel,
    /// Intel's architectural PMU of version 2, with the same counters.
    IntelV2,
}

const AMD: [Pmu; 3] = [Pmu::V2, Pmu::Core, Pmu::K7];
const INTEL: [Pmu; 2] = [Pmu::Intel, Pmu::IntelV2];
const EMULATED: [Pmu; 5] = [Pmu::V2, Pmu::Core, Pmu::K7, Pmu::Intel, Pmu::IntelV2];
/// All PMUs of guests on the AMD host.
const ALL: [Pmu; 6] = [Pmu::V2, Pmu::Core, Pmu::K7, Pmu::Kvm, Pmu::Intel, Pmu::IntelV2];

/// Returns the PMUs of guests on the current test's host. KVM's own has AMD's registers on the AMD host only.
fn all() -> &'static [Pmu] {
    match host::current() {
        Host::Amd => &ALL,
        Host::Intel => &EMULATED,
    }
}

impl Pmu {
    /// Returns the options of `tally run`.
    fn options(self) -> &'static str {
        match self {
            Self::V2 => "--pmu amd --cpus 2",
            Self::Core => "--pmu amd-legacy --cpus 2",
            Self::K7 => "--pmu amd-legacy --counters 4 --cpus 2",
            Self::Kvm => "--pmu kvm --cpus 2",
            Self::Intel => "--pmu intel --counters 4 --cpus 2",
            Self::IntelV2 => "--pmu intel-v2 --counters 4 --cpus 2",
        }
    }

    fn is_intel(self) -> bool {
        INTEL.contains(&self)
    }

    /// Returns the number of general counters.
    fn counters(self) -> u32 {
        if self == Self::K7 || self.is_intel() { 4 } else { 6 }
    }

    fn fixed_counters(self) -> u32 {
        if self.is_intel() { 2 } else { 0 }
    }

    fn step(self, name: &str) -> String {
        format!("{name}-{self:?}")
    }
}

/// Adds a guest for each of these PMUs, all with the same words.
fn on_each(steps: Steps, pmus: &[Pmu], name: &str, words: &str) -> Steps {
    on_each_with(steps, pmus, name, |_| words.to_owned())
}

/// Adds a guest for each of these PMUs, with words that depend on the PMU.
fn on_each_with(steps: Steps, pmus: &[Pmu], name: &str, words: impl Fn(Pmu) -> String) -> Steps {
    pmus.iter().fold(steps, |steps, pmu| steps.bare_metal(&pmu.step(name), pmu.options(), &words(*pmu)))
}

/// Takes a counter from guests with Intel's PMU on the Intel host: they get two fixed counters, as on the AMD host.
fn leaving_two_fixed_counters(steps: Steps) -> Steps {
    match host::current() {
        Host::Amd => steps,
        Host::Intel => steps
            .step("take", "perf stat -a -e ref-cycles:D sleep 100000 >/dev/null 2>&1 </dev/null &\nsleep 1"),
    }
}

/// Results of the short guests.
static QUICK: OnEachHost = OnEachHost::new(|| {
    [registers::guests, counting::guests, delivery::guests, hostile::guests]
        .into_iter()
        .fold(leaving_two_fixed_counters(Steps::new("pmu::quick")), |steps, add| add(steps))
        .run()
});

/// Results of the guests that run long or never end.
static LONG: LazyLock<Results> = LazyLock::new(|| {
    [delivery::long_guests, hostile::endless_guests]
        .into_iter()
        .fold(Steps::new("pmu::long").long(), |steps, add| add(steps))
        .run()
});

/// Returns what a guest printed. Checks that the guest reached its end, and that Tally printed no messages.
fn output(done: &StepOutput) -> String {
    assert_eq!((done.status, done.err.as_str()), (1, ""), "{}", done.text());
    done.text()
}

/// Returns what the short guest of this name printed.
fn printed(pmu: Pmu, name: &str) -> String {
    output(QUICK.of(&pmu.step(name)))
}
