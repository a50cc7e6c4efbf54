//! What a guest's use of its counters costs the host: Tally's PMUs beside KVM's own, with the same `tally`, kernel, initrd
//! and program (`programs/pmu_workload.rs`) on the same simulated host.
//!
//! The program marks windows in which it does a thing a few times, or twice as often. What the host did in them is counted
//! from outside, in a boot each: exits and system calls, time, and instructions, because what looks also costs. The median of
//! many windows is one without a clock's interrupt, and the difference of two medians is exact.

mod mark;
mod table;
mod windows;

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::{Progress, Suite};

pub use mark::{END, Mark, Work, tell_host};
pub use table::{costs, overflow_calls};
pub use windows::{PerUnit, Quantity};

use crate::{Error, Result, Scenario};
use windows::Windows;

/// How often everything is done in a window between two marks: what one costs is the difference.
pub const UNITS: [u8; 2] = [2, 4];
/// How many windows of each kind there are.
pub const ROUNDS: u8 = 9;
/// How many instructions are between two overflows.
pub const SPACING: u32 = 20_000;

/// The programs under test.
pub struct Programs {
    /// `tally`.
    pub tally: PathBuf,
    /// `pmu-workload`, which runs in the guest.
    pub workload: PathBuf,
}

/// What one PMU costs.
pub struct Figures {
    /// Its name in `tally run --pmu NAME`.
    pub pmu: &'static str,
    exits: Windows,
    time: Windows,
    instructions: Windows,
}

impl Figures {
    /// What one unit of this work costs with so many events; nothing if that cannot be measured: a guest that has all
    /// of the host's counters leaves none to count it with.
    pub fn cost(&self, work: Work, events: u8, quantity: &Quantity) -> Option<PerUnit> {
        let windows = match quantity {
            Quantity::Exits | Quantity::Runs | Quantity::OtherCalls | Quantity::Call(_) => &self.exits,
            Quantity::Nanoseconds => &self.time,
            Quantity::HostUserInstructions | Quantity::GuestInstructions => &self.instructions,
        };
        windows.cost(work, events, quantity)
    }

    /// All instructions that a unit costs, the host's and the guest's, without those that the program was executing anyway.
    pub fn instructions(&self, work: Work, events: u8) -> Option<PerUnit> {
        Some(self.cost(work, events, &Quantity::Nanoseconds)? - work.own())
    }

    /// The system calls that one unit costs, except `KVM_RUN`.
    pub fn calls(&self, work: Work, events: u8) -> Vec<(String, PerUnit)> {
        self.exits.calls(work, events)
    }
}

/// Measures PMUs by their names, on one simulated host.
pub fn measure(pmus: &[&'static str], programs: &Programs, progress: &mut Progress) -> Result<Vec<Figures>> {
    let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
    let outcome = Scenario::new(script(pmus))
        .file(&programs.tally, "tally")
        .guest_with(Suite::default(), &[("pmu-workload", &workload)], progress)?
        .limit(Duration::from_mins(20))
        .run(progress)?;
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    let text = outcome.text();
    let section = |pmu: &str, kind: &str| {
        let (_, rest) = text.split_once(&format!("begin {pmu}.{kind}\n"))?;
        Some(rest.split_once("\nend\n")?.0)
    };
    let figures = |&pmu| {
        Some(Figures {
            pmu,
            exits: Windows::from_trace(section(pmu, "exits")?),
            time: Windows::from_samples(section(pmu, "time")?),
            instructions: Windows::from_samples(section(pmu, "instructions")?),
        })
    };
    let incomplete = || Error::Command("the measuring script, which did not print everything".to_owned());
    pmus.iter().map(figures).collect::<Option<_>>().ok_or_else(incomplete)
}

fn script(pmus: &[&str]) -> String {
    let mut script = String::from(
        "T=/sys/kernel/tracing
run() {
    exec ./tally run --append cryptomgr.notests --pmu $1 -- ./pmu-workload
}
trace() {
    echo 0 >$T/tracing_on
    for event in kvm/kvm_hypercall kvm/kvm_exit raw_syscalls/sys_enter; do
        echo $1 >$T/events/$event/enable
    done
}
sample() {
    run $1 &
    until thread=$(grep -l vcpu0 /proc/$!/task/*/comm); do
        sleep 0.01
    done
    thread=${thread%/comm}
    perf record -q -o data -e \"$3\" -t ${thread##*/} && wait $! || exit
    perf script -i data --ns -F time,event,period,trace >$1.$2 2>errors || { cat errors >&2; exit 1; }
}
echo 16384 >$T/buffer_size_kb
echo traceon >$T/events/kvm/kvm_hypercall/trigger
",
    );
    for pmu in pmus {
        writeln!(
            script,
            "echo >$T/trace
trace 1
(run {pmu}) || exit
trace 0
cat $T/trace >{pmu}.exits
sample {pmu} time kvm:kvm_hypercall
sample {pmu} instructions '{{kvm:kvm_hypercall,instructions:Hu,instructions:G}}:S'"
        )
        .expect("writing to a string cannot fail");
    }
    // At the end, because how long output takes depends on who reads it. With dd, because cat splices, and what is
    // spliced may still be under way when the machine ends.
    script += "for file in *.exits *.time *.instructions; do
    echo begin $file
    dd if=$file bs=64k 2>errors || exit
    echo end
done
";
    script
}
