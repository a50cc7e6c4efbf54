//! `tally-lab bench`: the command line of the benchmark.

use clap::{Args, ValueEnum};
use guest_images::Progress;
use tally_lab::bench::{
    self, ALL, Column, Figures, Limit, Measure, Model, Plan, Programs, QUICK, Row, Speed, Workload,
};
use tally_lab::{Error, Result};

use crate::tally;

/// The options of `tally-lab bench`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tally-lab bench --quick
  tally-lab bench --on l1,amd,kvm --workload loop --measure record:100000:6")]
pub struct Bench {
    /// A selection that takes minutes
    #[arg(long)]
    quick: bool,
    /// l1 (the host itself), amd, amd-legacy, intel, intel-v2, kvm (QEMU)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "l1,amd,kvm")]
    on: Vec<Column>,
    /// loop, syscalls, switches, memory, compile
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    workload: Vec<Workload>,
    /// stat:EVENTS, record:PERIOD:EVENTS, rate:HERTZ:EVENTS, read, ...
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    measure: Vec<Measure>,
    /// The kernels' limit for the time that samples take: default, none, both
    #[arg(long, value_enum, default_value_t = Limits::Both, hide_possible_values = true)]
    limit: Limits,
    /// A real exit's cost beside its instructions
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.exit_ns)]
    exit_ns: u64,
    /// The same if it goes to user space
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.user_exit_ns)]
    user_exit_ns: u64,
    /// A system call's
    #[arg(long, value_name = "N", default_value_t = Model::PUBLISHED.syscall_ns)]
    syscall_ns: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Limits {
    Default,
    None,
    Both,
}

impl Bench {
    /// Measures and prints tables.
    pub fn run(self, progress: &mut Progress) -> Result<u8> {
        let plan = self.plan(Speed::Simulated)?;
        let tally = tally::program()?;
        let programs = Programs { workload: tally.with_file_name("bench-workload"), tally };
        progress.step("measuring on the simulated host");
        let figures = bench::in_the_lab(&plan, &programs, progress)?;
        progress.done();
        self.print(&plan, &figures);
        Ok(0)
    }

    fn print(&self, plan: &Plan, figures: &Figures) {
        let &Self { exit_ns, user_exit_ns, syscall_ns, .. } = self;
        let model = Model { exit_ns, user_exit_ns, syscall_ns };
        println!("{}", bench::table(plan, figures, Some(model)));
    }

    fn plan(&self, speed: Speed) -> Result<Plan> {
        let limits = match self.limit {
            Limits::Default => vec![Limit::Default],
            Limits::None => vec![Limit::None],
            Limits::Both => Limit::ALL.to_vec(),
        };
        let rows = self.rows(speed);
        if rows.is_empty() {
            return Err(Error::Command("what was asked for: nothing is left of it".to_owned()));
        }
        Ok(Plan { rows, columns: self.on.clone(), limits, repeat: 1, counts: speed == Speed::Simulated })
    }

    /// The measurements that were named, of the workloads that were; or else the usual ones.
    fn rows(&self, speed: Speed) -> Vec<Row> {
        let wanted = |workload: &Workload| self.workload.is_empty() || self.workload.contains(workload);
        if !self.measure.is_empty() {
            let workloads = if self.workload.is_empty() { &[Workload::Loop] } else { &*self.workload };
            let row = |workload: &Workload| {
                let workload = *workload;
                self.measure.iter().map(move |measure| Row::new(workload, *measure, speed))
            };
            return workloads.iter().flat_map(row).collect();
        }
        let usual = if self.quick { QUICK } else { ALL };
        let chosen = usual.iter().filter(|(workload, _)| wanted(workload));
        chosen
            .flat_map(|(workload, measures)| {
                let measure = |text: &&str| text.parse().expect("a test reads them all");
                measures.iter().map(move |text| Row::new(*workload, measure(text), speed))
            })
            .collect()
    }
}
