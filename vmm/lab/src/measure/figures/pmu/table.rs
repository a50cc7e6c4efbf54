//! The results as a Markdown table.

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
    let mut table = header(figures);
    for (work, events, name) in WORKS {
        let mut add = |what: &str, costs: &dyn Fn(&Figures) -> Option<Vec<PerUnit>>| {
            let costs = |pmu| costs(pmu).filter(|_| is_valid(pmu, work, events));
            let cells: Vec<_> = figures.iter().map(costs).collect();
            if cells.iter().any(Option::is_some) {
                row(&mut table, &format!("{name}: {what}"), cells.into_iter().map(Option::unwrap_or_default));
            }
        };
        add("exits, of these to user space, system calls", &|pmu| {
            let quantities = [Quantity::Exits, Quantity::Runs, Quantity::OtherCalls];
            quantities.iter().map(|quantity| pmu.cost(work, events, quantity)).collect()
        });
        add("instructions, host and guest", &|pmu| Some(vec![pmu.instructions(work, events)?]));
        if events == 1 {
            add("of these in the guest, in Tally", &|pmu| {
                let guest = pmu.cost(work, events, &Quantity::GuestInstructions)?;
                let tally = pmu.cost(work, events, &Quantity::HostUserInstructions)?;
                Some(vec![guest - work.own_instructions(), tally])
            });
        }
    }
    table
}

fn header(figures: &[Figures]) -> String {
    let columns: Vec<&str> = figures.iter().map(|pmu| pmu.pmu).collect();
    format!("|  | `{}` |\n| --- |{}\n", columns.join("` | `"), " ---: |".repeat(columns.len()))
}

fn row(table: &mut String, name: &str, cells: impl Iterator<Item = Vec<PerUnit>>) {
    let cell = |costs: Vec<PerUnit>| costs.iter().map(PerUnit::to_string).collect::<Vec<_>>().join(", ");
    let cells: Vec<String> = cells.map(cell).collect();
    writeln!(table, "| {name} | {} |", cells.join(" | ")).expect("writing to a string cannot fail");
}
