//! Silicon mode: simulated processors whose PMUs misbehave as real ones do. `cpu/README.md` says what each knob
//! imitates, and where that was seen.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use super::board::Processor::{self, Amd, Intel, Riscv64};

/// A guest's NMIs are its processor's. That is no mistake, and CPUID says so.
const VIRTUAL_NMI: &str = "virtual-nmi";

/// What can be turned, and on which lab CPUs: properties that are each 0 on a processor without mistakes.
const KNOBS: [(&str, &[Processor]); 12] = [
    ("silicon-seed", &[Amd, Intel, Riscv64]),
    ("skid-least", &[Amd, Intel, Riscv64]),
    ("skid-most", &[Amd, Intel, Riscv64]),
    ("skid-tail", &[Amd, Intel, Riscv64]),
    ("pmi-again", &[Amd, Intel]),
    ("pmi-at-exit", &[Amd, Intel]),
    ("pmi-lost", &[Riscv64]),
    ("entry-tick", &[Amd]),
    ("interrupt-branch", &[Intel]),
    ("cond-changed", &[Intel]),
    ("status-junk", &[Amd]),
    (VIRTUAL_NMI, &[Amd]),
];

/// Processors, and what they do. The PMU of `zen4` has global registers (PerfMonV2), whose status has reserved bits;
/// that of `skylake` is of version 4, and that of `icelake` of version 5.
const PROFILES: [(&str, &str); 5] = [
    ("zen2", "skid-least=1000,skid-most=5043,skid-tail=24779,pmi-again=20,pmi-at-exit=20,entry-tick=1"),
    ("zen4", "zen2,status-junk=0x0f00000000000f00,virtual-nmi=1"),
    ("skylake", "icelake,cond-changed=20"),
    ("icelake", "skid-least=18,skid-most=31,skid-tail=81,pmi-again=1000,pmi-at-exit=20,interrupt-branch=1"),
    ("riscv", "skid-most=50"),
];

/// The values of the knobs of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Silicon([u64; KNOBS.len()]);

impl Silicon {
    /// Turns knobs as a text says.
    fn turn(&mut self, text: &str) -> Result<(), String> {
        text.split(',').try_for_each(|word| match word.split_once('=') {
            Some((knob, value)) => self.set(knob, value),
            None => self.turn(profile(word)?),
        })
    }

    /// Returns a knob that is turned, and that a host with this processor does not have.
    pub fn missing_on(&self, processor: Processor) -> Option<&'static str> {
        let turned = KNOBS.iter().zip(self.0).filter(|(_, value)| *value != 0).map(|(knob, _)| knob);
        turned.into_iter().find_map(|(knob, on)| (!on.contains(&processor)).then_some(*knob))
    }

    /// Returns whether CPUID differs from that of a processor on which nothing is turned.
    pub fn is_in_cpuid(&self) -> bool {
        KNOBS.iter().zip(self.0).any(|((knob, _), value)| *knob == VIRTUAL_NMI && value != 0)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let at = KNOBS.iter().position(|(knob, _)| *knob == name);
        let at = at.ok_or_else(|| format!("the knobs are {}", KNOBS.map(|(knob, _)| knob).join(", ")))?;
        let hex = value.strip_prefix("0x");
        let parsed = hex.map_or_else(|| value.parse(), |hex| u64::from_str_radix(hex, 16));
        self.0[at] = parsed.map_err(|_| format!("{value} is no number"))?;
        Ok(())
    }
}

fn profile(name: &str) -> Result<&'static str, String> {
    let found = PROFILES.iter().find(|(profile, _)| *profile == name);
    let names = || format!("the profiles are {}", PROFILES.map(|(profile, _)| profile).join(", "));
    found.map(|(_, knobs)| *knobs).ok_or_else(names)
}

/// Reads `PROFILE`, `KNOB=VALUE`, or several of them with commas in between; later ones change what earlier ones say.
impl FromStr for Silicon {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut silicon = Self::default();
        silicon.turn(text)?;
        Ok(silicon)
    }
}

/// Writes the lab CPU's properties that are not 0, each with a comma before it.
impl Display for Silicon {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let turned = KNOBS.iter().zip(self.0).filter(|(_, value)| *value != 0);
        turned.into_iter().try_for_each(|((knob, _), value)| write!(f, ",{knob}={value:#x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_a_set_of_knobs_that_can_be_turned_further() {
        let parse = |text: &str| text.parse::<Silicon>();
        assert_eq!(parse("zen2,skid-most=7,silicon-seed=0x10").unwrap().to_string(), {
            ",silicon-seed=0x10,skid-least=0x3e8,skid-most=0x7,skid-tail=0x60cb,pmi-again=0x14,pmi-at-exit=0x14,\
             entry-tick=0x1"
        });
        assert_eq!(parse("entry-tick=1").unwrap().to_string(), ",entry-tick=0x1");
        assert!(
            parse("zen4")
                .unwrap()
                .to_string()
                .ends_with(",entry-tick=0x1,status-junk=0xf00000000000f00,virtual-nmi=0x1")
        );
        assert_eq!(Silicon::default().to_string(), "");
        assert_eq!(["zen2", "zen4"].map(|text| parse(text).unwrap().is_in_cpuid()), [false, true]);
        for (text, processor, missing) in [
            ("zen4", Amd, None),
            ("zen2", Intel, Some("entry-tick")),
            ("skylake", Intel, None),
            ("icelake", Amd, Some("interrupt-branch")),
            ("riscv,pmi-lost=7", Riscv64, None),
        ] {
            assert_eq!(parse(text).unwrap().missing_on(processor), missing, "{text}");
        }
        for (text, error) in [
            ("zen9", "the profiles are zen2, zen4, skylake, icelake, riscv"),
            ("skid=1", "the knobs are silicon-seed, skid-least"),
            ("skid-most=x", "x is no number"),
        ] {
            assert!(parse(text).unwrap_err().starts_with(error), "{text}");
        }
    }
}
