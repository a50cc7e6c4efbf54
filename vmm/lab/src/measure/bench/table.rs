//! The results as Markdown tables.

use std::fmt::Write;

use super::figures::{Figures, Model, Samples};
use super::plan::{Column, Row};
use super::script::{Limit, Plan};

/// Returns the results, with a table for each limit.
pub fn table(plan: &Plan, figures: &Figures, model: Option<Model>) -> String {
    let mut text = String::new();
    for limit in plan.used_limits() {
        let percent = if limit == Limit::Default { "25, the default" } else { "0: no limit" };
        header(&mut text, &format!("`perf_cpu_time_max_percent` is {percent}"), &plan.columns);
        for &row in plan.runs(limit).iter().filter(|row| plan.rows.contains(row)) {
            lines(&mut text, plan, figures, (limit, row), model);
        }
        text.push('\n');
    }
    footnotes(&mut text, plan, model);
    text
}

/// Returns what users of the counters notice, with a line for each row: how much slower a program is, and whether
/// samples are missing. The documentation has it, and explains it.
pub fn summary(plan: &Plan, figures: &Figures, model: Option<Model>) -> String {
    let mut text = String::new();
    for limit in plan.used_limits() {
        let limited = if limit == Limit::Default { "" } else { ", without the kernels' limit" };
        let what = format!("slowdown, modelled; samples of those implied{limited}");
        header(&mut text, &what, &plan.columns);
        for &row in plan.runs(limit).iter().filter(|row| plan.rows.contains(row)) {
            let cells = plan.columns.iter().map(|column| {
                let key = (limit, *column, row);
                let slowdown = figures.slowdown(key).map(|slowdown| percent(slowdown.median));
                let model = model.filter(|_| *column != Column::Host);
                let modelled = model.and_then(|model| figures.modelled_slowdown(key, model)).map(percent);
                let slowdowns = slowdown.into_iter().chain(modelled).collect::<Vec<_>>().join(", ");
                let samples = figures.samples(key);
                let samples = samples.map(|Samples { taken, implied, .. }| {
                    format!("; {} of {}", whole(taken), whole(implied))
                });
                slowdowns + &samples.unwrap_or_default()
            });
            write_line(&mut text, &format!("{}, `{}`", row.workload, row.measure), cells);
        }
        text.push('\n');
    }
    text
}

/// Adds the explanations of the table's terms.
fn footnotes(text: &mut String, plan: &Plan, model: Option<Model>) {
    text.push_str(
        "Slowdown: how much longer the workload itself takes than without perf. Sampling point: an overflow of all events\n\
         that are counted at a time. `l1` is the host itself, without a guest.\n",
    );
    match model {
        Some(Model { exit_ns, user_exit_ns, syscall_ns }) => writeln!(
            text,
            "In the lab an instruction takes one nanosecond. The modelled slowdown adds the time that real processors take\n\
             beside instructions: {exit_ns} ns for each exit from the guest, {user_exit_ns} ns more if it goes to user space, and \
             {syscall_ns} ns\nfor each system call of the vCPU's thread (published:\n{}).",
            Model::SOURCES
        ),
        None => writeln!(text, "Medians of {} runs, ± half the range of the runs.", plan.repeat),
    }
    .expect("writing to a string cannot fail");
}

fn lines(
    text: &mut String,
    plan: &Plan,
    figures: &Figures,
    (limit, row): (Limit, Row),
    model: Option<Model>,
) {
    let name = format!("{}, `{}`", row.workload, row.measure);
    let mut line = |what: &str, cell: &dyn Fn(Column) -> Option<String>| {
        let cells: Vec<_> = plan.columns.iter().map(|column| cell(*column)).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
            write_line(text, &format!("{name}: {what}"), cells);
        }
    };
    let key = |column| (limit, column, row);
    line("slowdown", &|column| {
        let slowdown = figures.slowdown(key(column))?;
        let spread =
            if plan.repeat > 1 { format!(" ± {}", percent(slowdown.range / 2.0)) } else { String::new() };
        Some(percent(slowdown.median) + &spread)
    });
    if let Some(model) = model {
        line("modelled slowdown", &|column| figures.modelled_slowdown(key(column), model).map(percent));
    }
    line("samples taken, of those implied", &|column| {
        let samples = figures.samples(key(column))?;
        Some(format!("{}, {}", whole(samples.taken), whole(samples.implied)))
    });
    line("interrupts of the PMU", &|column| figures.interrupts(key(column)).map(whole));
    let of = plan.columns.iter().find_map(|column| Some(figures.cost(key(*column))?.of)).unwrap_or_default();
    let unit = if model.is_some() { "instructions" } else { "nanoseconds" };
    line(&format!("{unit} for {of}"), &|column| Some(whole(figures.cost(key(column))?.nanoseconds)));
    line(&format!("exits for {of}, of these to user space, and system calls"), &|column| {
        let counts = figures.cost(key(column))?.counts?;
        Some(counts.map(|count| format!("{count:.1}")).join(", "))
    });
    line("start and end of the command", &|column| {
        Some(format!("{:.1} ms", figures.start_and_end(key(column))? / 1e6))
    });
}

fn header(text: &mut String, what: &str, columns: &[Column]) {
    write_line(text, what, columns.iter().map(|column| format!("`{column}`")));
    write_line(text, "---", columns.iter().map(|_| "---:".to_owned()));
}

fn write_line(text: &mut String, name: &str, cells: impl Iterator<Item = String>) {
    write!(text, "| {name} |").expect("writing to a string cannot fail");
    for cell in cells {
        write!(text, " {cell} |").expect("writing to a string cannot fail");
    }
    text.push('\n');
}

fn percent(part: f64) -> String {
    // The addition turns -0.0 into 0.0.
    format!("{:.1} %", (part * 1000.0).round() / 10.0 + 0.0)
}

/// Returns a number rounded to an integer, with commas.
fn whole(number: f64) -> String {
    let digits = format!("{:.0}", number.abs());
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if number <= -0.5 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_have_one_decimal() {
        assert_eq!([-0.000_04, 0.0, 0.1, -0.012].map(percent), ["0.0 %", "0.0 %", "10.0 %", "-1.2 %"]);
    }

    #[test]
    fn large_numbers_have_commas() {
        assert_eq!([0.4, 999.0, 1000.0, 1_234_567.0].map(whole), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([-0.4, -1234.0].map(whole), ["0", "-1,234"]);
    }
}
