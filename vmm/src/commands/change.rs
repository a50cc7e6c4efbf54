//! `tally policy`: changes a running VM.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use vpmu::Switch;
use vpmu::policy::Setting;

use crate::cli::policy;
use crate::cli::{ChangePolicy, CounterName};
use crate::commands::client;
use crate::host::printer;
use crate::protocol::message::{CounterSwitch, Request};

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
