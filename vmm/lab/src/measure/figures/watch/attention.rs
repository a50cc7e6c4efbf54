//! The cost of monitoring that does not depend on samples, and the time until the loss of a counter is reported. The
//! guest is a bare-metal loop.
//!
//! On a real host, the monitoring programs run on CPUs of their own. In the lab they share the only CPU with the guest;
//! a second CPU would not help, as the lab has one clock, which the instructions of all CPUs advance. So the cost is
//! measured as run time of the vCPU's thread, inside the guest and in the host on its behalf. A vCPU with a CPU of its
//! own loses no other time.

use std::fmt::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use guest_images::Progress;
use guest_images::payloads::BARE_METAL;

use crate::error::Result;
use crate::scenario::Scenario;

/// The programs under test.
pub struct Programs {
    pub tally: PathBuf,
    /// `counter-thief`, which runs on the host.
    pub thief: PathBuf,
}

/// Parameters of the measurement.
#[derive(Debug, Clone, Copy)]
pub struct Extent<'a> {
    /// Numbers of counters that the guest holds, one run for each.
    pub counters: &'a [u64],
    /// Length of each run in seconds.
    pub seconds: u64,
}

/// Monitoring whose cost is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Tally's poll timer, which checks for starvation as long as the guest holds a counter.
    Poll,
    /// `tally stat`, which reads the counters every second.
    Stat,
    /// `--metrics`, read every second.
    Metrics,
}

/// Cost of monitoring for a guest.
#[derive(Debug)]
pub struct Price {
    pub of: Attention,
    /// Number of counters that the guest holds.
    pub counters: u64,
    /// Nanoseconds, which are instructions, per second of the guest's time. A cost near zero may be measured as
    /// negative, because the host's timer interrupts come at slightly different points in each run.
    pub per_second: i64,
}

/// All measurements.
#[derive(Debug)]
pub struct Figures {
    pub prices: Vec<Price>,
    /// Time from each theft of counters to the report of each stolen counter.
    pub reports: Vec<Duration>,
}

/// Number of the lab host's counters.
const ALL: u64 = 6;
/// Pauses before the thefts. They differ, so the thefts come at different phases of the poll timer's 50 ms.
const PAUSES_MS: [u64; 8] = [51, 58, 65, 72, 79, 86, 93, 100];
/// Number of rounds of the guest's loop, of two instructions each, in a second.
const ROUNDS: u64 = 500_000_000;

/// Runs the measurements on one simulated host.
pub fn measure(extent: Extent, programs: &Programs, progress: &mut Progress) -> Result<Figures> {
    let scenario = Scenario::with_all_counters(script(extent))
        .named("figures watch")
        .file(&programs.tally, "tally")
        .file(&programs.thief, "counter-thief")
        .program(BARE_METAL, "payload");
    let text = super::super::output::run(&scenario, progress)?;
    let unreadable = || super::super::output::unreadable(&text);
    let prices = prices(&text, extent).ok_or_else(unreadable)?;
    let reports = reports(&text).ok_or_else(unreadable)?;
    Ok(Figures { prices, reports })
}

/// Returns the script. It prints `ran NANOSECONDS LOOKS` for each run of a guest: first without counters, then for each
/// number of counters without monitoring, with `tally stat`, and with `--metrics`. LOOKS is the number of times that
/// the monitoring program read the counters. Then the script prints the output of the thief, and the log.
fn script(Extent { counters, seconds }: Extent) -> String {
    let mut script = String::from(
        "ip link set lo up
mkfifo said
begin() {
    ./tally run --pmu amd --kernel payload \"$@\" >said & vm=$!
    exec 3<said
    until test -S /run/tally/$vm.sock; do sleep 0.01; done
}
ran() {
    watcher=$1; shift
    begin \"$@\"
    $watcher >looks &
    while read -r line <&3; do
        case $line in count*) break ;; esac
    done
    vcpu=$(grep -l vcpu0 /proc/$vm/task/*/comm)
    time=$(cut -d' ' -f1 ${vcpu%comm}schedstat)
    kill $vm; wait
    echo ran $time $(wc -l <looks)
}
nobody() {
    :
}
stat() {
    ./tally stat $vm 2>/dev/null | grep 'since start'
}
scraper() {
    while wget -qO- http://127.0.0.1:9100/metrics 2>/dev/null; do sleep 1; done | grep '# EOF'
}
",
    );
    let mut line = |text: fmt::Arguments| {
        writeln!(script, "{text}").expect("writing to a string cannot fail");
    };
    let rounds = seconds * ROUNDS;
    line(format_args!("ran nobody --append '{}'", words(0, rounds)));
    for &counters in counters {
        let words = words(counters, rounds);
        line(format_args!("ran nobody --append '{words}'"));
        line(format_args!("ran stat --append '{words}'"));
        line(format_args!("ran scraper --metrics 9100 --append '{words}'"));
    }
    line(format_args!("begin --pmu-log log --append '{}'", words(ALL, u64::from(u32::MAX))));
    for pause in PAUSES_MS {
        line(format_args!("sleep 0.{pause:03}; ./counter-thief {ALL} --for 0.11 || exit"));
    }
    line(format_args!("kill $vm; wait; ./tally log --show log"));
    script
}

/// Returns the guest's command line, with which it runs the loop in user mode with this many counters, and then halts.
fn words(counters: u64, rounds: u64) -> String {
    const SELECT: u64 = 0xc001_0200;
    const OFF: u64 = 0x01_00c0;
    const ON: u64 = 0x41_00c0;
    let others = (1..counters).map(|counter| format!("wrmsr={:#x},0:{ON:#x} ", SELECT + 2 * counter));
    let first = if counters == 0 { OFF } else { ON };
    format!("{}count-user=0:{first:#x},{rounds},0 halt", others.collect::<String>())
}

/// Computes the costs. Each guest is compared with the one that differs only in the monitoring.
fn prices(text: &str, Extent { counters, seconds }: Extent) -> Option<Vec<Price>> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("ran "));
    let mut ran = |min_looks: u64| {
        let (time, looks) = lines.next()?.split_once(' ')?;
        let (time, looks) = (time.parse::<i64>().ok()?, looks.parse::<u64>().ok()?);
        (looks >= min_looks).then_some(time)
    };
    let without = ran(0)?;
    let mut prices = Vec::new();
    for &counters in counters {
        let alone = ran(0)?;
        let mut price = |of, time: i64, other| {
            prices.push(Price { of, counters, per_second: (time - other) / seconds.cast_signed() });
        };
        price(Attention::Poll, alone, without);
        // The last read may come after the end of the run.
        price(Attention::Stat, ran(seconds - 1)?, alone);
        price(Attention::Metrics, ran(seconds - 1)?, alone);
    }
    Some(prices)
}

/// Computes the time from each theft to each report after it. Returns `None` unless there is a report for each stolen
/// counter of each theft.
fn reports(text: &str) -> Option<Vec<Duration>> {
    let nanoseconds = |seconds: &str| {
        let (seconds, fraction) = seconds.split_once('.')?;
        Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + fraction.parse::<u64>().ok()?)
    };
    let thefts = text.lines().filter(|line| line.starts_with("holds "));
    let thefts: Vec<u64> = thefts.map(|line| line.rsplit(' ').next()?.parse().ok()).collect::<Option<_>>()?;
    let (_, began) = text.split_once(", CLOCK_MONOTONIC ")?;
    let began = nanoseconds(began.split(';').next()?)?;
    let lines = text.lines().filter(|line| line.ends_with(" is starved"));
    let reports = lines.map(|line| {
        let reported = began + nanoseconds(line.split_whitespace().next()?)?;
        let theft = thefts.iter().rfind(|theft| **theft < reported)?;
        Some(Duration::from_nanos(reported - theft))
    });
    let reports: Vec<_> = reports.collect::<Option<_>>()?;
    (reports.len() == thefts.len() * usize::try_from(ALL).ok()?).then_some(reports)
}

impl Attention {
    fn name(self) -> &'static str {
        match self {
            Self::Poll => "Tally's checks for starvation",
            Self::Stat => "`tally stat`, every second",
            Self::Metrics => "`--metrics`, every second",
        }
    }
}

/// Maximum cost of monitoring in nanoseconds per second: 0.1 %.
pub const MAX_PER_SECOND: i64 = 1_000_000;
/// Maximum time from a theft to its report.
pub const SOON: Duration = Duration::from_millis(100);

pub fn table(Figures { prices, reports }: &Figures) -> String {
    let mut table = String::from("| | counters held | measured | wanted |\n|---|---:|---:|---:|\n");
    let mut row = |what: &str, counters: u64, measured: &str, wanted: &str| {
        writeln!(table, "| {what} | {counters} | {measured} | {wanted} |")
            .expect("writing to a string cannot fail");
    };
    for Price { of, counters, per_second } in prices {
        let measured = format!("{per_second} ns, {}", Percent(*per_second));
        row(of.name(), *counters, &measured, &format!("{}", Percent(MAX_PER_SECOND)));
    }
    if let Some(most) = reports.iter().max() {
        let milliseconds = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let what = format!("from a theft to its report, the longest of {}", reports.len());
        row(&what, ALL, &milliseconds(*most), &milliseconds(SOON));
    }
    table
}

/// Nanoseconds per second, displayed as a percentage.
struct Percent(i64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let thousandths = self.0.unsigned_abs() / 10_000;
        write!(f, "{sign}{}.{:03} %", thousandths / 1000, thousandths % 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
ran 2000000000 0
ran 2000400000 0
ran 2000600000 2
ran 2000500000 1
";

    #[test]
    fn the_cost_of_monitoring_is_per_second() {
        let prices = prices(TEXT, Extent { counters: &[1], seconds: 2 }).unwrap();
        let prices: Vec<_> = prices.iter().map(|price| (price.of, price.per_second)).collect();
        let wanted = [(Attention::Poll, 200_000), (Attention::Stat, 100_000), (Attention::Metrics, 50_000)];
        assert_eq!(prices, wanted);
    }

    #[test]
    fn monitoring_that_read_no_counters_has_no_cost() {
        let text = TEXT.replace("600000 2", "600000 0");
        assert!(prices(&text, Extent { counters: &[1], seconds: 2 }).is_none());
    }

    #[test]
    fn a_report_is_timed_from_the_theft_before_it() {
        let starved = |time: &str| {
            let lines = (0..ALL).map(|counter| format!("{time} vCPU 0: counter {counter} (x) is starved\n"));
            lines.collect::<String>()
        };
        let holds = "holds 6 of 6 counters on CPU 0 since 1500000000\n";
        let header = "began 1970-01-01, CLOCK_MONOTONIC 1.000000000; times are seconds since then\n";
        let text = format!("{holds}{header}{}", starved("0.540000000"));
        assert_eq!(reports(&text), Some(vec![Duration::from_millis(40); 6]));
        assert_eq!(reports(&format!("{holds}{text}")), None, "one theft was not reported");
    }
}
