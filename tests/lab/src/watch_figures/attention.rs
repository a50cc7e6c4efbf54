//! What a guest pays for those who look on, and how soon they hear of a counter that is lost. The guest is a loop without an
//! operating system, which does nothing else.
//!
//! Who looks has a processor of its own on a real host, and shares the lab's only one with the guest. (A second one would not
//! help: the lab has one clock, which goes on by the instructions of all.) So the guest's time is taken for that which its
//! vCPU's thread ran, in the guest and for it: there is no other in which a vCPU that has its processor for itself goes on.

use std::fmt::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use guest_images::Progress;
use guest_images::payloads::BARE_METAL;

use crate::{Error, Result, Scenario};

/// The programs under test.
pub struct Programs {
    /// `tally`.
    pub tally: PathBuf,
    /// `counter-thief`, which runs on the host.
    pub thief: PathBuf,
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Extent<'a> {
    /// How many counters the guest holds, each time.
    pub counters: &'a [u64],
    /// For how many seconds it is looked at.
    pub seconds: u64,
}

/// What the guest pays for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Tally's own looking for starvation, which goes on as long as a counter is held.
    Poll,
    /// `tally stat`, which looks every second.
    Stat,
    /// `--metrics`, asked every second.
    Metrics,
}

/// What attention costs a guest.
#[derive(Debug)]
pub struct Price {
    /// Whose.
    pub of: Attention,
    /// How many counters the guest holds.
    pub counters: u64,
    /// Nanoseconds, which are instructions, of each second of the guest's. What costs next to nothing may be below zero: when
    /// the host's clock interrupts the guest differs a little from run to run.
    pub per_second: i64,
}

/// What was measured.
#[derive(Debug)]
pub struct Figures {
    /// What attention costs.
    pub prices: Vec<Price>,
    /// How long after each theft each of the stolen counters was reported.
    pub reports: Vec<Duration>,
}

/// All counters of the lab's host.
const ALL: u64 = 6;
/// From one theft to the next there is always some more time, so that they come at different phases of the poll timer's 50 ms.
const PAUSES_MS: [u64; 8] = [51, 58, 65, 72, 79, 86, 93, 100];
/// How many rounds of the guest's loop, of two instructions each, take a second.
const ROUNDS: u64 = 500_000_000;

/// Measures on one simulated host.
pub fn measure(extent: Extent, programs: &Programs, progress: &mut Progress) -> Result<Figures> {
    let outcome = Scenario::new(script(extent))
        .named("figures watch")
        .file(&programs.tally, "tally")
        .file(&programs.thief, "counter-thief")
        .program(BARE_METAL, "payload")
        .run(progress)?;
    let text = outcome.text();
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    let unreadable = || Error::Command(format!("the measuring script printed\n{text}"));
    let prices = prices(&text, extent).ok_or_else(unreadable)?;
    let reports = reports(&text).ok_or_else(unreadable)?;
    Ok(Figures { prices, reports })
}

/// Prints `ran NANOSECONDS LOOKS` for a guest that holds no counters, and for each number of counters for one that nobody looks
/// at, one of which there is `tally stat`, and one whose metrics are read. Then what the thief and the log say. Each that looks
/// has a line for each of its looks.
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

/// Has a guest go round in user mode and count that with so many counters, and then do nothing.
fn words(counters: u64, rounds: u64) -> String {
    const SELECT: u64 = 0xc001_0200;
    const OFF: u64 = 0x01_00c0;
    const ON: u64 = 0x41_00c0;
    let others = (1..counters).map(|counter| format!("wrmsr={:#x},0:{ON:#x} ", SELECT + 2 * counter));
    let first = if counters == 0 { OFF } else { ON };
    format!("{}count-user=0:{first:#x},{rounds},0 halt", others.collect::<String>())
}

/// Every guest is compared with the one that is the same but for what is paid for.
fn prices(text: &str, Extent { counters, seconds }: Extent) -> Option<Vec<Price>> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("ran "));
    let mut ran = |least_looks: u64| {
        let (time, looks) = lines.next()?.split_once(' ')?;
        let (time, looks) = (time.parse::<i64>().ok()?, looks.parse::<u64>().ok()?);
        (looks >= least_looks).then_some(time)
    };
    let without = ran(0)?;
    let mut prices = Vec::new();
    for &counters in counters {
        let alone = ran(0)?;
        let mut price = |of, time: i64, other| {
            prices.push(Price { of, counters, per_second: (time - other) / seconds.cast_signed() });
        };
        price(Attention::Poll, alone, without);
        // The last look may come too late.
        price(Attention::Stat, ran(seconds - 1)?, alone);
        price(Attention::Metrics, ran(seconds - 1)?, alone);
    }
    Some(prices)
}

/// Each theft is to have been told of each counter.
fn reports(text: &str) -> Option<Vec<Duration>> {
    let nanoseconds = |seconds: &str| {
        let (seconds, fraction) = seconds.split_once('.')?;
        Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + fraction.parse::<u64>().ok()?)
    };
    let thefts = text.lines().filter(|line| line.starts_with("holds "));
    let thefts: Vec<u64> = thefts.map(|line| line.rsplit(' ').next()?.parse().ok()).collect::<Option<_>>()?;
    let (_, began) = text.split_once(", CLOCK_MONOTONIC ")?;
    let began = nanoseconds(began.split(';').next()?)?;
    let told = text.lines().filter(|line| line.ends_with(" is starved"));
    let reports = told.map(|line| {
        let told = began + nanoseconds(line.split_whitespace().next()?)?;
        let theft = thefts.iter().rfind(|theft| **theft < told)?;
        Some(Duration::from_nanos(told - theft))
    });
    let reports: Vec<_> = reports.collect::<Option<_>>()?;
    (reports.len() == thefts.len() * usize::try_from(ALL).ok()?).then_some(reports)
}

impl Attention {
    fn name(self) -> &'static str {
        match self {
            Self::Poll => "Tally's looking for starvation",
            Self::Stat => "`tally stat`, every second",
            Self::Metrics => "`--metrics`, every second",
        }
    }
}

/// What attention may cost a guest of each of its seconds, in nanoseconds: 0.1 %.
pub const MOST_PER_SECOND: i64 = 1_000_000;
/// How long after a theft an operator may hear of it.
pub const SOON: Duration = Duration::from_millis(100);

/// The figures as a table.
pub fn table(Figures { prices, reports }: &Figures) -> String {
    let mut table = String::from("| | counters held | measured | wanted |\n|---|---:|---:|---:|\n");
    let mut row = |what: &str, counters: u64, measured: &str, wanted: &str| {
        writeln!(table, "| {what} | {counters} | {measured} | {wanted} |")
            .expect("writing to a string cannot fail");
    };
    for Price { of, counters, per_second } in prices {
        let measured = format!("{per_second} ns, {}", Percent(*per_second));
        row(of.name(), *counters, &measured, &format!("{}", Percent(MOST_PER_SECOND)));
    }
    if let Some(most) = reports.iter().max() {
        let milliseconds = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let what = format!("from a theft to its report, the most of {}", reports.len());
        row(&what, ALL, &milliseconds(*most), &milliseconds(SOON));
    }
    table
}

/// Nanoseconds of a second.
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
    fn attention_is_paid_for_by_the_second() {
        let prices = prices(TEXT, Extent { counters: &[1], seconds: 2 }).unwrap();
        let prices: Vec<_> = prices.iter().map(|price| (price.of, price.per_second)).collect();
        let wanted = [(Attention::Poll, 200_000), (Attention::Stat, 100_000), (Attention::Metrics, 50_000)];
        assert_eq!(prices, wanted);
    }

    #[test]
    fn who_has_not_looked_has_no_price() {
        let text = TEXT.replace("600000 2", "600000 0");
        assert!(prices(&text, Extent { counters: &[1], seconds: 2 }).is_none());
    }

    #[test]
    fn a_report_is_timed_from_the_theft_before_it() {
        let told = |time: &str| {
            let lines = (0..ALL).map(|counter| format!("{time} vCPU 0: counter {counter} (x) is starved\n"));
            lines.collect::<String>()
        };
        let holds = "holds 6 of 6 counters on CPU 0 since 1500000000\n";
        let header = "began 1970-01-01, CLOCK_MONOTONIC 1.000000000; times are seconds since then\n";
        let text = format!("{holds}{header}{}", told("0.540000000"));
        assert_eq!(reports(&text), Some(vec![Duration::from_millis(40); 6]));
        assert_eq!(reports(&format!("{holds}{text}")), None, "one was told of nobody");
    }
}
