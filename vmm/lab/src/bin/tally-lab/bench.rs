//! `tally-lab bench` and `tally-lab profile`: the command lines of the benchmark, and of a look into one of its rows.

use std::env;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use guest_images::{Arch, Progress};
use tally_lab::bench::{
    self, ALL, Column, Length, Limit, Measure, Model, Plan, Programs, QUICK, Row, Workload, here,
};
use tally_lab::{Error, Processor, Result, profile, published};

use crate::beside;

/// The options of `tally-lab bench`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tally-lab bench --quick
  tally-lab bench --on l1,amd,kvm --workload loop --measure record:100000:6")]
pub struct Bench {
    /// A selection that takes minutes, shorter workloads
    #[arg(long)]
    quick: bool,
    /// The simulated host: amd or intel
    #[arg(long, value_name = "HOST", value_parser = x86_64_host, default_value = "amd", conflicts_with = "here")]
    host: Processor,
    /// l1 (the host), auto, amd, ..., intel-v2, kvm (QEMU), mediated
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "l1,auto,kvm")]
    on: Vec<Column>,
    /// loop, syscalls, switches, memory, compile
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    workload: Vec<Workload>,
    /// stat:N, record:PERIOD:N, rate:HERTZ:N (N events), ...
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    measure: Vec<Measure>,
    /// The kernels' limit for the time that samples take: default, none, both
    #[arg(long, value_enum, default_value_t = Limits::Both, hide_possible_values = true)]
    limit: Limits,
    /// Runs of each measurement [default: 1, --here: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: Option<u32>,
    /// Run on this machine, which needs a PMU, KVM and perf
    #[arg(long)]
    here: bool,
    /// Model: an exit beside its instructions
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.exit_ns)]
    exit_ns: u64,
    /// Model: more if it goes to user space
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.user_exit_ns)]
    user_exit_ns: u64,
    /// Model: a system call
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.syscall_ns)]
    syscall_ns: u64,
    /// Write a summary into this Markdown file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Limits {
    Default,
    None,
    Both,
}

impl Bench {
    /// Measures and prints tables.
    pub fn run(mut self, progress: &mut Progress) -> Result<u8> {
        self.on = without_repetition(self.on);
        if self.here
            && let Some(obstacle) = here::obstacle(&self.on)
        {
            return Err(Error::NotHere(obstacle));
        }
        if self.here && self.on.contains(&Column::Kvm) && !here::has_qemu() {
            progress.step("leaving out `kvm`: there is no qemu-system-x86_64");
            self.on.retain(|column| *column != Column::Kvm);
        }
        let plan = self.plan()?;
        let model =
            Model { exit_ns: self.exit_ns, user_exit_ns: self.user_exit_ns, syscall_ns: self.syscall_ns };
        published::measure(self.write.as_deref(), &command("tally"), || {
            let programs = programs(progress)?;
            let figures = if self.here {
                here::measure(&plan, &programs, progress)?
            } else {
                progress.step("measuring on the simulated host");
                bench::in_the_lab(&plan, &programs, progress)?
            };
            progress.done();
            let shown = if self.write.is_some() { bench::summary } else { bench::table };
            Ok(shown(&plan, &figures, (!self.here).then_some(model)))
        })?;
        Ok(0)
    }

    fn plan(&self) -> Result<Plan> {
        let limits = match self.limit {
            Limits::Default => vec![Limit::Default],
            Limits::None => vec![Limit::None],
            Limits::Both => Limit::ALL.to_vec(),
        };
        let (length, repeat) = match (self.here, self.quick) {
            (true, _) => (Length::Real, 5),
            (false, true) => (Length::Short, 1),
            (false, false) => (Length::Usual, 1),
        };
        let plan = Plan {
            host: self.host,
            rows: self.rows(length),
            columns: self.on.clone(),
            limits,
            repeat: self.repeat.unwrap_or(repeat),
            counts: !self.here,
        };
        if plan.rows.is_empty() || plan.columns.is_empty() { Err(Error::NothingToMeasure) } else { Ok(plan) }
    }

    /// Returns the rows for the measurements and workloads of the command line, or the default ones of these workloads.
    fn rows(&self, length: Length) -> Vec<Row> {
        let wanted = |workload: &Workload| self.workload.is_empty() || self.workload.contains(workload);
        if !self.measure.is_empty() {
            let workloads = if self.workload.is_empty() { &[Workload::Loop] } else { &*self.workload };
            let pairs =
                workloads.iter().flat_map(|&workload| self.measure.iter().map(move |&m| (workload, m)));
            let possible = pairs.filter(|(workload, measure)| Row::is_possible(*workload, *measure));
            return without_repetition(
                possible.map(|(workload, measure)| Row::new(workload, measure, length)),
            );
        }
        let usual = if self.quick { QUICK } else { ALL };
        let chosen = usual.iter().filter(|(workload, _)| wanted(workload));
        chosen
            .flat_map(|(workload, measures)| {
                let measure = |text: &&str| text.parse().expect("a unit test parses all of them");
                measures.iter().map(move |text| Row::new(*workload, measure(text), length))
            })
            .collect()
    }
}

/// The options of `tally-lab profile`.
#[derive(Args)]
#[command(after_help = "\
All instructions of a while are counted, on the simulated AMD host with a guest.

Example:
  tally-lab profile --functions rate:4000:1")]
pub struct Profile {
    /// loop, syscalls, switches, memory, compile
    #[arg(long, value_name = "NAME", default_value = "loop")]
    workload: Workload,
    /// Show the functions that take most
    #[arg(long)]
    functions: bool,
    /// The host: amd, riscv64 (its workload is a loop, too)
    #[arg(long, value_name = "HOST", default_value = "amd", value_parser = ["amd", "riscv64"])]
    host: String,
    /// record:PERIOD:N, rate:HERTZ:N (N events)
    #[arg(value_name = "MEASURE", required = true)]
    measures: Vec<Measure>,
    /// Write the tables into this Markdown file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

impl Profile {
    /// Profiles and prints tables.
    pub fn run(self, progress: &mut Progress) -> Result<u8> {
        let rows: Vec<Row> =
            self.measures.iter().map(|&measure| Row::new(self.workload, measure, Length::Usual)).collect();
        let arch = if self.host == "riscv64" { Arch::Riscv64 } else { Arch::X86_64 };
        published::measure(self.write.as_deref(), &command("tally-lab"), || {
            let tables = profile::measure(&rows, self.functions, arch, &programs(progress)?, progress)?;
            progress.done();
            Ok(tables)
        })?;
        Ok(0)
    }
}

fn programs(progress: &mut Progress) -> Result<Programs> {
    let tally = beside::program("tally", progress)?;
    Ok(Programs { workload: beside::program("bench-workload", progress)?, tally })
}

/// Returns the command line that gives the same tables, without the file that they are written into.
fn command(program: &str) -> String {
    let (mut command, mut arguments) = (program.to_owned(), env::args().skip(1));
    while let Some(argument) = arguments.next() {
        if argument == "--write" {
            arguments.next();
        } else if !argument.starts_with("--write=") {
            command = command + " " + &argument;
        }
    }
    command
}

fn x86_64_host(name: &str) -> std::result::Result<Processor, &'static str> {
    let host = name.parse().ok().filter(|host: &Processor| host.arch() == Arch::X86_64);
    host.ok_or("the hosts of the benchmark are amd and intel")
}

fn without_repetition<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    all.into_iter().fold(Vec::new(), |mut kept, one| {
        if !kept.contains(&one) {
            kept.push(one);
        }
        kept
    })
}
