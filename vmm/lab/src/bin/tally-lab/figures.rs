//! `tally-lab figures`: the lab's own cost in real time, and exact costs of work on the simulated host.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use guest_images::{Progress, Suite};
use tally_lab::figures;
use tally_lab::figures::boot::Completed;
use tally_lab::figures::commands::{Cost, Hello};
use tally_lab::figures::fleet::{BUSY, CPUS, GUEST_MIB, GUESTS, Look, Top};
use tally_lab::figures::net::Transfer;
use tally_lab::figures::pmu::{Programs, UNCONFINED};
use tally_lab::figures::shares::{MONITORS, Measured as MeasuredWork, Monitor, WORKS};
use tally_lab::figures::watch::{attention, outside};
use tally_lab::peer::{self, MachineType};
use tally_lab::{Processor, Result, Scenario, published};

use crate::beside;

/// What is measured.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Measured {
    /// The lab itself, and booting a guest.
    Boot,
    /// A guest's use of its counters.
    Pmu,
    /// Commands.
    Use,
    /// Work in shared folders.
    Shares,
    /// Many guests on one host.
    Fleet,
    /// A guest's network.
    Net,
    /// Monitoring of a guest from the host.
    Watch,
    /// Sampling of a guest from outside.
    Outside,
    /// A guest's use of its counters on an Intel host.
    Intel,
    /// A RISC-V guest's use of its counters.
    Riscv,
    /// Event-based branches, beside signals.
    Ebb,
    /// What changes of the host's kernel would save.
    Upstream,
}

/// Measures, and prints the tables or writes them into a Markdown file.
pub fn measure(what: Measured, file: Option<&Path>, progress: &mut Progress) -> Result<()> {
    let (name, tables): (&str, fn(&mut Progress) -> Result<String>) = match what {
        Measured::Boot => ("boot", boot),
        Measured::Pmu => ("pmu", pmu),
        Measured::Use => ("use", commands),
        Measured::Shares => ("shares", shares),
        Measured::Fleet => ("fleet", fleet),
        Measured::Net => ("net", network),
        Measured::Watch => ("watch", monitoring),
        Measured::Outside => ("outside", sampling),
        Measured::Intel => ("intel", intel),
        Measured::Riscv => ("riscv", figures::riscv::measure),
        Measured::Ebb => ("ebb", branches),
        Measured::Upstream => ("upstream", changes),
    };
    let command = format!("tally-lab figures {name}");
    published::measure(file, &command, || {
        let tables = tables(progress)?;
        progress.done();
        Ok(tables)
    })
}

/// Measures the lab itself and booting a guest.
fn boot(progress: &mut Progress) -> Result<String> {
    tally_lab::build(Processor::Amd, progress)?;
    let (warm, ()) = timed(|| tally_lab::build(Processor::Amd, progress))?;
    let first = tally_lab::first_build_seconds()?;

    progress.step("booting the simulated host");
    let (boot, output) =
        timed(|| figures::run(&Scenario::with_all_counters("cut -d' ' -f1 /proc/uptime"), progress))?;
    progress.step("booting the simulated host and a guest in it");
    let command = ["sh", "-c", "perf stat true; perf record -q -o /tmp/data true"];
    let both = Scenario::with_all_counters(peer::linux(MachineType::Default, &command))
        .guest(Suite::default(), progress)?;
    let (scenario, _) = timed(|| figures::run(&both, progress))?;
    progress.step("booting Tally's guest and the peer's");
    let costs = figures::boot::measure(&beside::program("tally", progress)?, progress)?;
    let mut table = "| | measured |\n|---|---:|\n".to_owned();
    let mut row = |figure: &str, measured: &str| {
        writeln!(table, "| {figure} | {measured} |").expect("writing to a string cannot fail");
    };
    match first {
        Some(seconds) => row("building the lab for the first time", &format!("{seconds} s")),
        None => row("building the lab for the first time", "not known, as its parts were built separately"),
    }
    row("building the lab when it has been built", &format!("{:.1} ms", warm.as_secs_f64() * 1000.0));
    row("the simulated host, from where it was saved to the end of a script", &seconds(boot));
    row("its virtual time until the script, its boot included", &format!("{} s", output.trim()));
    row("host and guest: boot, `perf stat`, `perf record`, power-off", &seconds(scenario));
    for boot in &costs.boots {
        row(
            &format!(
                "{}: exits to user space, and virtual time, from the first `KVM_RUN` to init",
                boot.monitor
            ),
            &format!("{}, {:.2} s", boot.exits, boot.seconds),
        );
    }
    for (what, completed) in ["a boot to init", "`perf stat true`"].into_iter().zip(costs.completed) {
        let Completed { cpuid, halts, msrs, ports } = completed;
        row(
            &format!("{what}: instructions that KVM completes by itself: CPUID, HLT, MSRs, ports"),
            &format!("{cpuid}, {halts}, {msrs}, {ports}"),
        );
    }
    let [without, with] = costs.starts;
    row(
        "tally: instructions on the host for a guest that ends at once: `--sandbox off`, `on`",
        &format!("{without}, {with}"),
    );
    row("tally: resident memory beyond the guest's own", &format!("{} KiB", costs.resident_kib));
    Ok(table)
}

/// Measures the cost of a guest's use of its counters.
fn pmu(progress: &mut Progress) -> Result<String> {
    progress.step("using counters in guests of Tally's PMUs and of KVM's");
    costs_on(Processor::Amd, &["amd", UNCONFINED, "amd-legacy", "intel", "intel-v2", "kvm"], progress)
}

/// Measures the same on an Intel host.
fn intel(progress: &mut Progress) -> Result<String> {
    progress.step("using counters in guests of an Intel host");
    costs_on(Processor::Intel, &["intel", "intel-v2", "amd", "kvm"], progress)
}

fn costs_on(processor: Processor, pmus: &[&'static str], progress: &mut Progress) -> Result<String> {
    let tally = beside::program("tally", progress)?;
    let programs = Programs { workload: beside::program("pmu-workload", progress)?, tally };
    let figures = figures::pmu::measure(processor, pmus, &programs, progress)?;
    Ok(figures::pmu::costs(&figures, |_, _, _| true))
}

/// Measures what changes of the host's kernel would save.
fn changes(progress: &mut Progress) -> Result<String> {
    figures::upstream::measure(&beside::program("kernel-changes", progress)?, progress)
}

/// Measures event-based branches, on hosts of both vendors.
fn branches(progress: &mut Progress) -> Result<String> {
    let mut table = "| `--host` | an overflow of a program | instructions until the handler's first | of handler and return |\n\
                     |---|---|---:|---:|\n"
        .to_owned();
    let tally = beside::program("tally", progress)?;
    for (host, processor) in [("amd", Processor::Amd), ("intel", Processor::Intel)] {
        progress.step(format!("taking signals and branches in guests of the host `{host}`"));
        for figures::ebb::Cost { what, before, program } in
            figures::ebb::measure(processor, &tally, progress)?
        {
            writeln!(table, "| `{host}` | {what} | {before} | {program} |")
                .expect("writing to a string cannot fail");
        }
    }
    Ok(table)
}

/// Measures many guests on one host.
fn fleet(progress: &mut Progress) -> Result<String> {
    progress.step(format!("running {GUESTS} guests on a host with {CPUS} CPUs"));
    let figures = figures::fleet::measure(&beside::program("tally", progress)?, progress)?;
    let mut table = format!(
        "| {} guests of {GUEST_MIB} MiB that sleep, on a host with {CPUS} CPUs | |\n|---|---:|\n\
         | memory that the host has less, for each | {:.1} MiB |\n\
         | the processes of a VM, with their part of what they share | {:.1} MiB |\n",
        figures.names.len(),
        mib(figures.kib_each),
        mib(figures.proportional_kib),
    );
    for Look { command, instructions, seconds } in &figures.looks {
        let millions = instructions.div_ceil(1_000_000);
        writeln!(table, "| `{command}`: instructions, virtual time | {millions} M, {seconds:.3} s |")
            .expect("writing to a string cannot fail");
    }
    let Top { first, later, seconds, of_vm, .. } = figures.top;
    let tenths = |instructions: u64| {
        let tenths = instructions.div_ceil(100_000);
        format!("{}.{} M", tenths / 10, tenths % 10)
    };
    writeln!(
        table,
        "| `tally top`, {BUSY} of them work: instructions, virtual time until its first block of a second | {}, {seconds:.3} s |\n\
         | the same: instructions for each later block | {} |\n\
         | what a VM that sleeps executes for it until then, and for each later block | {}, {} |",
        tenths(first),
        tenths(later),
        tenths(of_vm[0]),
        tenths(of_vm[1]),
    )
    .expect("writing to a string cannot fail");
    Ok(table)
}

fn mib(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}

/// Measures a guest's network.
fn network(progress: &mut Progress) -> Result<String> {
    progress.step("requests and transfers to guests of Tally and the peer");
    let (tally, workload) = (beside::program("tally", progress)?, beside::program("net-workload", progress)?);
    let mut table = "| | requests a second | exits for each | from the guest | exits for each MiB | to the guest | exits for each MiB |\n\
                     |---|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for measured in figures::net::measure(&tally, &workload, progress)? {
        let figures::net::Measured { name, requests_per_second, exits_per_request, transfers } = measured;
        let transfers = transfers.map(|Transfer { megabytes_per_second, exits_per_mib }| {
            format!("{megabytes_per_second:.0} MB/s | {exits_per_mib:.1}")
        });
        let transfers = transfers.join(" | ");
        writeln!(table, "| {name} | {requests_per_second:.0} | {exits_per_request:.1} | {transfers} |")
            .expect("writing to a string cannot fail");
    }
    Ok(table)
}

/// Measures commands.
fn commands(progress: &mut Progress) -> Result<String> {
    progress.step("running commands with Tally and the peer");
    let figures = figures::commands::measure(&beside::program("tally", progress)?, progress)?;
    let mut text =
        "| `echo hello`, from Enter to | its output | the prompt | instructions, millions | pages |\n\
                    |---|---:|---:|---:|---:|\n"
            .to_owned();
    let mut line = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let cost = |cost: &Cost| format!("{:.3} s, {} exits", cost.seconds, cost.exits);
    for Hello { monitor, first, end, total } in &figures.hellos {
        let instructions = total.instructions.div_ceil(1_000_000);
        line(format!("| {monitor} | {} | {} | {instructions} | {} |", cost(first), cost(end), total.pages));
    }
    let figures::commands::SnapshotCost { seconds, kib } = figures.saving;
    line(format!(
        "\nThe guest of `tally,restored` was written by `tally snapshot` in {seconds:.3} s, and takes {} MiB.",
        kib >> 10
    ));
    line(format!("The program has {} KiB.", figures.program_bytes >> 10));
    Ok(text)
}

/// Measures work in shared folders: a table with a column for each monitor.
fn shares(progress: &mut Progress) -> Result<String> {
    progress.step("working in shared folders of Tally and the peers");
    let (tally, workload) =
        (beside::program("tally", progress)?, beside::program("share-workload", progress)?);
    let measured = figures::shares::measure(&tally, &workload, &MONITORS, progress)?;
    let names: Vec<String> = MONITORS.iter().map(|monitor| monitor.name()).collect();
    let mut table =
        format!("| in a shared folder | {} |\n|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for work in WORKS {
        let cell = |monitor: &Monitor| {
            let cost = measured.iter().find(|one| (one.monitor, one.work) == (*monitor, work));
            cost.map_or("-".to_owned(), |MeasuredWork { cost: Cost { exits, seconds }, .. }| {
                let speed = work.megabytes_per_second(*seconds).map(|speed| format!(", {speed:.0} MB/s"));
                format!("{seconds:.3} s, {exits} exits{}", speed.unwrap_or_default())
            })
        };
        let cells: Vec<String> = MONITORS.iter().map(cell).collect();
        writeln!(table, "| {} | {} |", work.name, cells.join(" | "))
            .expect("writing to a string cannot fail");
    }
    Ok(table)
}

/// Measures what monitoring costs a guest.
fn monitoring(progress: &mut Progress) -> Result<String> {
    progress.step("sampling in guests with and without monitoring");
    let tally = beside::program("tally", progress)?;
    let figures = figures::watch::measure(&["amd", "intel"], &tally, progress)?;
    progress.step("monitoring running guests, and taking counters from them");
    let programs = attention::Programs { thief: beside::program("counter-thief", progress)?, tally };
    let extent = attention::Extent { counters: &[1, 6], seconds: 5 };
    let attention = attention::measure(extent, &programs, progress)?;
    Ok(format!("{}\n{}", figures::watch::table(&figures), attention::table(&attention)))
}

/// Measures what it costs a guest to be sampled from outside.
fn sampling(progress: &mut Progress) -> Result<String> {
    progress.step("sampling guests from outside");
    let tally = beside::program("tally", progress)?;
    Ok(outside::table(&outside::measure(&tally, progress)?))
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(Duration, T)> {
    let begun = Instant::now();
    let result = work()?;
    Ok((begun.elapsed(), result))
}
