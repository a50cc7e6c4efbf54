//! `tally check`: checks that this host's counters count correctly in guests. Programs whose counts are known run in a
//! bare-metal guest and in Linux, and the report shows the counts beside the right ones.

mod guests;
mod report;

use std::fs;
use std::process::ExitCode;

use anyhow::{Result, bail};
use guest_images::Progress;
use kvm_ioctls::Kvm;
use tally_machine::pmu::{Choice, Offer, Pmu, offer, processor};
use vpmu::policy::Policy;

use crate::arch::host;
use crate::commands::check::Format;
use crate::host::entry_ticks::Entries;
use crate::host::{fact, kvm};
use guests::{Guests, bare_metal, linux};
use report::Report;

/// `tally check`: runs both guests and prints the report.
pub fn check(choice: Choice, counters: Option<u32>, format: Format) -> Result<ExitCode> {
    let clock = guests_clock(&kvm::open(choice)?);
    let Offer { mut pmu, mut remarks } = offer(choice, counters, processor(), &Policy::default())?;
    let Pmu::Emulated(shown, _) = pmu else {
        match remarks.first() {
            Some(remark) => bail!("there is nothing to check: {remark}"),
            None => bail!("--pmu {} is no PMU of Tally's: there is nothing to check", choice.name()),
        }
    };
    // Built here, where the progress is shown: what the guests' runs print becomes a part of the report.
    guest_images::default_guest(&mut Progress::stderr("tally"))?;
    let mut report = Report::new(format);
    report.fact("host", &host::processor())?;
    report.fact("host", &fact::kernel())?;
    report.fact("guest", &shown.to_string())?;
    remarks.extend(Entries::leave_out(&mut pmu).says());
    for remark in &remarks {
        report.fact("note", remark)?;
    }
    let limit_before = sampling_limit();
    let guests = Guests::new(choice, counters, remarks, clock.unwrap_or_default())?;
    report.section("a program without an operating system")?;
    bare_metal(&guests, shown, &mut report)?;
    report.section("Linux")?;
    linux(&guests, shown, &mut report)?;
    report.section("the host's kernel")?;
    for (when, limit) in [("before", limit_before), ("afterwards", sampling_limit())] {
        if let Some(limit) = limit {
            report.number(&format!("samples a second that it allowed {when}"), limit)?;
        }
    }
    Ok(report.conclude()?)
}

/// Returns the frequency of guests' time-stamp counters, in kHz.
fn guests_clock(kvm: &Kvm) -> Option<u32> {
    kvm.create_vm().ok()?.create_vcpu(0).ok()?.get_tsc_khz().ok()
}

/// Returns how many samples a second the host's kernel allows an event. It lowers this itself when samples take long.
fn sampling_limit() -> Option<u64> {
    fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate").ok()?.trim().parse().ok()
}
