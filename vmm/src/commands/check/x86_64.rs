//! `tally check`: checks that this host's counters count correctly in guests. Programs whose counts are known run in a
//! bare-metal guest and in Linux, and the report shows the counts beside the right ones.

mod guests;
mod report;

use std::process::ExitCode;

use anyhow::{Result, bail};
use guest_images::Progress;
use tally_machine::pmu::{Choice, Offer, Pmu, offer, processor};
use vpmu::policy::Policy;

use crate::arch::host;
use crate::host::entry_ticks::Entries;
use crate::host::{fact, kvm};
use guests::{Guests, bare_metal, linux};
use report::Report;

/// `tally check`: runs both guests and prints the report.
pub fn check(choice: Choice, counters: Option<u32>) -> Result<ExitCode> {
    kvm::open(choice)?;
    let Offer { mut pmu, mut remarks } = offer(choice, counters, processor(), &Policy::default())?;
    let Pmu::Emulated(shown, _) = pmu else {
        match remarks.first() {
            Some(remark) => bail!("there is nothing to check: {remark}"),
            None => bail!("--pmu {} is no PMU of Tally's: there is nothing to check", choice.name()),
        }
    };
    // Built here, where the progress is shown: what the guests' runs print becomes a part of the report.
    guest_images::default_guest(&mut Progress::stderr("tally"))?;
    let mut report = Report::new();
    report.fact("host", &host::processor())?;
    report.fact("host", &fact::kernel())?;
    report.fact("guest", &shown.to_string())?;
    remarks.extend(Entries::leave_out(&mut pmu).says());
    for remark in &remarks {
        report.fact("note", remark)?;
    }
    let guests = Guests::new(choice, counters, remarks)?;
    report.title("a program without an operating system")?;
    bare_metal(&guests, shown, &mut report)?;
    report.title("Linux")?;
    linux(&guests, shown, &mut report)?;
    Ok(report.conclude()?)
}
