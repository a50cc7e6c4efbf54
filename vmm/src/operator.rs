//! `tally policy` and `tally log`: change a running VM, or show the event log that one has left.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use vpmu::Switch;
use vpmu::policy::Setting;

use crate::cli::{ChangePolicy, CounterName, Log};
use crate::control::client;
use crate::control::message::{CounterSwitch, Request};
use crate::event_log::{self, Part};
use crate::{policy, printer};

/// `tally policy`: prints or changes the policy of a running VM, and disables or enables counters.
pub fn change_policy(options: &ChangePolicy) -> Result<ExitCode> {
    let ChangePolicy { vm, print, file, settings, enable, disable } = options;
    if let Some(path) = print {
        write!(printer::out(), "{}", policy::text_of_file(path)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let change = policy::change(file.as_deref(), settings)?;
    let mut vm = client::find_one(vm.as_deref().unwrap_or_default())?;
    let off = disable.iter().map(|name| switched(*name, Switch::Off));
    let on = enable.iter().map(|name| switched(*name, Switch::On));
    let switched: Vec<CounterSwitch> = off.chain(on).collect();
    let is_changed = file.is_some() || !settings.is_empty();
    if !switched.is_empty() {
        vm.request(&Request::Switch(switched))?;
        if !is_changed {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let spare = change.settings.iter().rev().find_map(|setting| match setting {
        Setting::SpareCounters(counters) => Some(*counters),
        _ => None,
    });
    let policy = vm.change(change)?;
    if spare.is_some_and(|spare| spare != policy.spare_counters) {
        printer::say(&format_args!(
            "the guest keeps its counters: {} is for the start of a VM",
            policy::SPARE_COUNTERS
        ));
    }
    if !is_changed {
        write!(printer::out(), "{}", policy::toml(&policy))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn switched(CounterName { vcpu, counter }: CounterName, to: Switch) -> CounterSwitch {
    CounterSwitch { vcpu, counter, to }
}

/// `tally log`: prints a log, writes a note into a running VM's log, or flushes that.
pub fn log(options: &Log) -> Result<ExitCode> {
    match (&options.show, &options.vm) {
        (Some(file), _) => event_log::show(file, if options.summary { Part::Summary } else { Part::All })?,
        (None, Some(vm)) => client::find_one(vm)?.request(&Request::Log(options.text.clone()))?,
        (None, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}
