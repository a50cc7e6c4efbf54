//! The guest's PMU as a program without an operating system sees it, on the lab's simulated host: what the registers
//! say, what is counted, how overflows arrive, and what becomes of guests that mean harm.
//!
//! Guests share two boots of the host, a group of quick ones and one of those that are long or never end; each module adds its
//! own, and its tests look at what they said. What the words mean that they do is listed at
//! [`guest_images::payloads::BARE_METAL`].

mod counting;
mod delivery;
mod hostile;
mod registers;

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::Test;

/// The tests of this module and those below it.
pub fn tests() -> Vec<Test> {
    let below = [counting::tests, delivery::tests, hostile::tests, registers::tests];
    below.into_iter().flat_map(|tests| tests()).collect()
}

/// What the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pmu {
    /// AMD's with PerfMonV2: six counters and global registers.
    V2,
    /// Six counters, each with an event select of its own.
    Core,
    /// The four of the K7.
    K7,
    /// KVM's own, to compare with. It is like `Core`.
    Kvm,
    /// Intel's of version 5, with two fixed counters behind four general ones.
    Intel,
    /// The same counters with the registers of version 2.
    IntelV2,
}

const AMD: [Pmu; 3] = [Pmu::V2, Pmu::Core, Pmu::K7];
const INTEL: [Pmu; 2] = [Pmu::Intel, Pmu::IntelV2];
/// Tally's own.
const OURS: [Pmu; 5] = [Pmu::V2, Pmu::Core, Pmu::K7, Pmu::Intel, Pmu::IntelV2];
const ALL: [Pmu; 6] = [Pmu::V2, Pmu::Core, Pmu::K7, Pmu::Kvm, Pmu::Intel, Pmu::IntelV2];

impl Pmu {
    /// The options of `tally run`.
    fn options(self) -> &'static str {
        match self {
            Self::V2 => "--pmu amd --cpus 2",
            Self::Core => "--pmu amd-legacy --cpus 2",
            Self::K7 => "--pmu amd-legacy --counters 4 --cpus 2",
            Self::Kvm => "--pmu kvm --cpus 2",
            Self::Intel => "--pmu intel --cpus 2",
            Self::IntelV2 => "--pmu intel-v2 --cpus 2",
        }
    }

    fn is_intel(self) -> bool {
        INTEL.contains(&self)
    }

    /// How many general counters it has.
    fn counters(self) -> u32 {
        if self == Self::K7 || self.is_intel() { 4 } else { 6 }
    }

    fn fixed_counters(self) -> u32 {
        if self.is_intel() { 2 } else { 0 }
    }

    /// The step that is called so, for this PMU.
    fn step(self, name: &str) -> String {
        format!("{name}-{self:?}")
    }
}

/// Steps of that name, one for each of these PMUs, with the same words.
fn on_each(steps: Steps, pmus: &[Pmu], name: &str, words: &str) -> Steps {
    on_each_its_own(steps, pmus, name, |_| words.to_owned())
}

/// The same, with words that depend on the PMU.
fn on_each_its_own(steps: Steps, pmus: &[Pmu], name: &str, words: impl Fn(Pmu) -> String) -> Steps {
    pmus.iter().fold(steps, |steps, pmu| steps.bare_metal(&pmu.step(name), pmu.options(), &words(*pmu)))
}

/// What the guests did that end soon.
static QUICK: LazyLock<Results> = LazyLock::new(|| {
    [registers::guests, counting::guests, delivery::guests, hostile::guests]
        .into_iter()
        .fold(Steps::new("pmu::quick"), |steps, add| add(steps))
        .run()
});

/// What the others did.
static LONG: LazyLock<Results> = LazyLock::new(|| {
    [delivery::long_guests, hostile::endless_guests]
        .into_iter()
        .fold(Steps::new("pmu::long").long(), |steps, add| add(steps))
        .run()
});

/// What a guest printed that did all of its words, while Tally had nothing to say.
fn output(done: &StepOutput) -> String {
    assert_eq!((done.status, done.err.as_str()), (1, ""), "{}", done.text());
    done.text()
}

/// What the quick guest of that name printed.
fn said(pmu: Pmu, name: &str) -> String {
    output(QUICK.of(&pmu.step(name)))
}
