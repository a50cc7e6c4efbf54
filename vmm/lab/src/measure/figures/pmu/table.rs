//! The results as Markdown tables.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::Figures;
use super::mark::Work;
use super::per_unit::PerUnit;
use super::windows::Quantity;

const WORKS: [(Work, u8, &str); 5] = [
    (Work::Read, 1, "a read(2) of a counter"),
    (Work::Switch, 1, "a task switch, one counter each"),
    (Work::Switch, 6, "a task switch, six counters each"),
    (Work::Overflow, 1, "a sample, one event"),
    (Work::Overflow, 6, "a sample, six events"),
];

/// Returns the table of costs, with a column for each PMU. A cell is empty if `is_valid` returns false for it, or if
/// the cost was not measured.
pub fn costs(figures: &[Figures], is_valid: impl Fn(&Figures, Work, u8) -> bool) -> String {
    let mut table = header("", figures);
    for (work, events, name) in WORKS {
        let mut add = |what: &str, cost: &dyn Fn(&Figures) -> Option<PerUnit>| {
            let cost = |pmu| cost(pmu).filter(|_| is_valid(pmu, work, events));
            let cells: Vec<_> = figures.iter().map(cost).collect();
            if cells.iter().any(Option::is_some) {
                let cell = |cost: Option<PerUnit>| cost.map(|cost| cost.to_string()).unwrap_or_default();
                row(&mut table, &format!("{name}: {what}"), cells.into_iter().map(cell));
            }
        };
        let plain = |quantity: Quantity| move |pmu: &Figures| pmu.cost(work, events, &quantity);
        add("exits", &plain(Quantity::Exits));
        add("of these to user space", &plain(Quantity::Runs));
        add("system calls beside `KVM_RUN`", &plain(Quantity::OtherCalls));
        add("instructions, host and guest", &|pmu| pmu.instructions(work, events));
        if events == 1 {
            add("of these in the guest", &|pmu| {
                Some(pmu.cost(work, events, &Quantity::GuestInstructions)? - work.own_instructions())
            });
            add("in Tally", &plain(Quantity::HostUserInstructions));
        }
    }
    table
}

/// Returns the table of the system calls of the vCPU's thread for an overflow, with a column for each PMU.
pub fn overflow_calls(figures: &[Figures]) -> String {
    let mut table = header("a sample, one event", figures);
    let mut calls: BTreeMap<String, Vec<PerUnit>> = BTreeMap::new();
    for (column, pmu) in figures.iter().enumerate() {
        let runs = pmu.cost(Work::Overflow, 1, &Quantity::Runs).map(|runs| ("KVM_RUN".to_owned(), runs));
        for (name, cost) in pmu.calls(Work::Overflow, 1).into_iter().chain(runs) {
            calls.entry(name).or_insert_with(|| vec![PerUnit::default(); figures.len()])[column] = cost;
        }
    }
    for (name, costs) in calls {
        row(&mut table, &format!("`{name}`"), costs.iter().map(PerUnit::to_string));
    }
    table
}

fn header(what: &str, figures: &[Figures]) -> String {
    let mut table = String::new();
    row(&mut table, what, figures.iter().map(|pmu| format!("`{}`", pmu.pmu)));
    row(&mut table, "---", figures.iter().map(|_| "---:".to_owned()));
    table
}

fn row(table: &mut String, name: &str, cells: impl Iterator<Item = String>) {
    write!(table, "| {name} |").expect("writing to a string cannot fail");
    for cell in cells {
        write!(table, " {cell} |").expect("writing to a string cannot fail");
    }
    table.push('\n');
}
