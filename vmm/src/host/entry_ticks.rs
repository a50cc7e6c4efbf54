//! What this host's counters count too much: entries into guests, which some processors count as instructions and
//! branches of the guest. A guest of its own finds that out, once for each boot of the host; the cache has it then.

use std::fs;

use anyhow::{Context, Result};
use guest_images::Progress;
use guest_images::cache::{Cache, Key};
use log::{info, warn};
use tally_machine::pmu::Pmu;
use tally_machine::target::COUNTERS;
use vpmu_perf::EntryTicks;

/// What becomes of the entries.
pub enum Entries {
    /// The host does not count them.
    NotCounted,
    /// They are left out of all counts.
    LeftOut,
    /// They are left out of counts of user mode and the kernel together.
    LeftOutOfSums,
    /// It is not known whether the host counts them, for this reason.
    Unknown(String),
}

const COUNTED: &str =
    "this host's processor counts each entry into a guest as an instruction or a branch of the guest";

impl Entries {
    /// Has entries into the guest left out of what this PMU counts.
    pub fn leave_out(pmu: &mut Pmu) -> Self {
        let ticks = match find(*pmu) {
            None => return Self::NotCounted,
            Some(Err(unknown)) => return Self::Unknown(unknown),
            Some(Ok(ticks)) => ticks,
        };
        pmu.leave_out(ticks);
        if ticks == EntryTicks::default() {
            Self::NotCounted
        } else if EntryTicks::can_tell_modes() {
            Self::LeftOut
        } else {
            Self::LeftOutOfSums
        }
    }

    /// Returns what the user is told, if it is anything.
    pub fn says(&self) -> Option<String> {
        match self {
            Self::NotCounted => None,
            Self::LeftOut => Some(format!(
                "{COUNTED}: they are left out of all counts of a Linux guest, and of what another guest counts in user \
                 mode and its kernel together"
            )),
            Self::LeftOutOfSums => Some(format!(
                "{COUNTED}: they are left out of counts of user mode and the kernel together; KVM's tracepoints tell the \
                 two apart, but only root may look at them, so counts of one of them are too high by a few for each tick \
                 of the host"
            )),
            Self::Unknown(why) => Some(format!(
                "cannot find out whether this host's processor counts each entry into a guest as an instruction or a \
                 branch of the guest ({why}); if so, counts are too high by a few for each tick of the host"
            )),
        }
    }

    /// Tells the user, by a warning if some counts are too high.
    pub fn tell(&self) {
        match (self, self.says()) {
            (_, None) => {}
            (Self::LeftOut, Some(says)) => info!(target: COUNTERS, "{says}"),
            (_, Some(says)) => warn!(target: COUNTERS, "{says}"),
        }
    }
}

/// Returns what entries add to the counts of this PMU, or why that is not known. `None` if no PMU of the host's backs
/// it.
fn find(pmu: Pmu) -> Option<Result<EntryTicks, String>> {
    if !matches!(pmu, Pmu::Emulated(..)) {
        return None;
    }
    let place = place().ok();
    if let Some(ticks) = place.as_ref().and_then(|(cache, key)| kept(cache, key)) {
        return Some(Ok(ticks));
    }
    let found = pmu.find_entry_ticks()?;
    if let (Some((cache, key)), Ok(ticks)) = (place, &found) {
        // Without a cache, it is found out again.
        let _ = keep(&cache, &key, *ticks);
    }
    Some(found)
}

/// Returns where it is kept until the host is booted again.
fn place() -> Result<(Cache, Key)> {
    const RECIPE: &str = "1";
    let boot = fs::read("/proc/sys/kernel/random/boot_id").context("this host's boot has no number")?;
    Ok((Cache::open()?, Key::new("entry-ticks").keep(2).with(RECIPE).with(boot)))
}

const FILE: &str = "numbers";

fn kept(cache: &Cache, key: &Key) -> Option<EntryTicks> {
    let text = fs::read_to_string(cache.find(key)?.join(FILE)).ok()?;
    let numbers: Vec<u32> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    Some(EntryTicks::from_numbers(numbers.try_into().ok()?))
}

fn keep(cache: &Cache, key: &Key, ticks: EntryTicks) -> Result<()> {
    let text = ticks.numbers().map(|number| number.to_string()).join(" ");
    cache.entry(key, &mut Progress::silent(), |_, entry| {
        fs::write(entry.join(FILE), &text).with_context(|| format!("cannot write {FILE}"))
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_out_is_kept_for_this_boot() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let key = |boot: &str| Key::new("entry-ticks").with(boot);
        let ticks = EntryTicks::from_numbers([1, 1, 1, 0, 0, 0]);
        assert_eq!(kept(&cache, &key("one")), None);
        keep(&cache, &key("one"), ticks).unwrap();
        assert_eq!((kept(&cache, &key("one")), kept(&cache, &key("two"))), (Some(ticks), None));
    }
}
