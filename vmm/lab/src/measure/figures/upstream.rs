//! What changes of the host's kernel would save a VMM with a virtual PMU: each beside what is done without it, by a
//! small VMM on a simulated host whose KVM has the changes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use guest_images::cache::Cache;
use guest_images::{Progress, kernel_needs, patched_kvm};

use super::output;
use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::simulator::board::Processor;
use crate::simulator::image::default_host;
use crate::simulator::tools;

/// The changes, for the kernel of the default AMD host.
const PATCH: &str = include_str!("../../../host/kvm.patch");
/// A processor whose guests have NMIs of their own.
const VIRTUAL_NMI: &str = "virtual-nmi=1";

/// What the program `kernel-changes` measures on a host, in instructions.
type Costs = BTreeMap<String, i64>;

/// Measures with this program. Returns a table.
pub fn measure(program: &Path, progress: &mut Progress) -> Result<String> {
    tools::ensure(&kernel_needs(), progress)?;
    let suite = default_host(Processor::Amd.arch()).suite;
    let kvm = patched_kvm(&Cache::open()?, suite, PATCH, progress)?;
    let [without, with] = [None, Some(VIRTUAL_NMI)].map(|silicon| {
        progress.step("measuring with changes of KVM");
        let mut scenario = Scenario::with_all_counters(
            "rmmod kvm_amd kvm && insmod kvm.ko && insmod kvm-amd.ko && ./kernel-changes",
        )
        .named("figures upstream")
        .file(program, "kernel-changes");
        for module in &kvm.modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            scenario = scenario.file(module, &name);
        }
        if let Some(silicon) = silicon {
            scenario = scenario.silicon(silicon.parse().map_err(Error::Command)?);
        }
        costs(&output::run(&scenario, progress)?)
    });
    table(&without?, &with?)
}

fn costs(text: &str) -> Result<Costs> {
    let cost = |line: &str| {
        let (name, cost) = line.split_once(' ')?;
        Some((name.to_owned(), cost.parse().ok()?))
    };
    text.lines().map(cost).collect::<Option<_>>().ok_or_else(|| output::unreadable(text))
}

fn table(costs: &Costs, with_virtual_nmis: &Costs) -> Result<String> {
    let mut table =
        "| instructions of the host | today | with the change | saved |\n|---|---:|---:|---:|\n".to_owned();
    let difference =
        |costs: &Costs, name: &str, of: &str| -> Result<i64> { Ok(cost(costs, name)? - cost(costs, of)?) };
    let rows = [
        ("an overflow, from the guest to the VMM and back", cost(costs, "signal")?, cost(costs, "exit")?),
        (
            "the next period is set",
            difference(costs, "signal,period", "signal")?,
            difference(costs, "exit,next-period", "exit")?,
        ),
        ("the event's page is kept", difference(costs, "signal", "signal,unmapped")?, 0),
        (
            "an NMI is injected, and its handler returns",
            difference(costs, "signal,nmi", "signal")?,
            difference(with_virtual_nmis, "signal,nmi", "signal")?,
        ),
        ("a guest's kernel reads a counter", cost(costs, "read")?, cost(costs, "read,in-memory")?),
    ];
    for (what, today, changed) in rows {
        writeln!(table, "| {what} | {today} | {changed} | {} |", today - changed)
            .expect("writing to a string cannot fail");
    }
    Ok(table)
}

fn cost(costs: &Costs, name: &str) -> Result<i64> {
    let missing = || Error::Command(format!("kernel-changes has not measured {name}"));
    costs.get(name).copied().ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_a_change_saves() {
        let text = "signal,unmapped 70\nsignal 74\nsignal,period 90\nsignal,nmi 100\nexit 45\nexit,period 61\n\
                    exit,next-period 47\nread 32\nread,in-memory 12\n";
        let costs_of = |text: &str| costs(text).expect("each line is one");
        let (without, with) = (costs_of(text), costs_of(&text.replace("nmi 100", "nmi 86")));
        let table = table(&without, &with).expect("all was measured");
        for row in [
            "| an overflow, from the guest to the VMM and back | 74 | 45 | 29 |",
            "| the next period is set | 16 | 2 | 14 |",
            "| the event's page is kept | 4 | 0 | 4 |",
            "| an NMI is injected, and its handler returns | 26 | 12 | 14 |",
            "| a guest's kernel reads a counter | 32 | 12 | 20 |",
        ] {
            assert!(table.contains(row), "{table}");
        }
    }
}
