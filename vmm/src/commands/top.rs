//! `tally top`: which functions run in running VMs, live: by share, by program and by VM.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::cli::Top;
use crate::commands::client::{self, ClientError, Vm};
use crate::commands::functions::{Functions, Symbols};
use crate::commands::live::{self, Looked};
use crate::commands::record::{FREQUENCY, check_rate, remarks, say_whose};
use crate::host::{printer, signals};
use crate::protocol::printable::short;
use crate::protocol::recording::{RecordOptions, SampleRate};

/// Time between two requests for samples of a VM: it keeps some thousand.
const FETCHED: Duration = Duration::from_millis(250);
/// Number of functions in a block that is printed.
const PRINTED: usize = 20;
/// Number of functions that are drawn: more than a screen has lines.
const DRAWN: usize = 200;
/// Maximum number of functions that are kept of a VM at a look: it can make up any number.
const MAX_FUNCTIONS: usize = 1 << 14;

/// What was sampled: the program's name, whether it was in the kernel, and the function. Processes of the same name are
/// one: there may be many short ones.
type Place = (String, bool, String);

/// `tally top`: shows the functions of one VM, or of all.
pub fn top(options: &Top) -> Result<ExitCode> {
    check_rate(options.frequency)?;
    let say = |error| printer::say(&error);
    let vms = match &options.vm {
        Some(who) => vec![client::find_one(who)?],
        None => client::find().answering(say)?,
    };
    for vm in &vms {
        say_whose(vm, "shown");
    }
    let rate = SampleRate::Frequency(options.frequency.unwrap_or(FREQUENCY));
    let asked = RecordOptions { event: options.event.text.clone(), rate, chains: false };
    let vms = vms.into_iter().map(|vm| (vm.about.pid, vm));
    let mut watched = client::some_of(client::at_once(vms, |vm| begin(vm, &asked)), say)?;
    let rows = if live::is_drawn(options.count) { DRAWN } else { PRINTED };
    // What was sampled while others began belongs to no interval.
    let Looked { gone, .. } = look(&mut watched, "", Instant::now(), rows);
    client::some_of(watched.iter().map(|_| Ok(())).chain(gone.into_iter().map(Err)), say)?;
    let mut since = Instant::now();
    live::show(options.interval, options.count, &mut || {
        let begun = std::mem::replace(&mut since, Instant::now());
        look(&mut watched, &options.event.text, begun, rows)
    })
}

/// Begins to sample a VM.
fn begin(mut vm: Vm, asked: &RecordOptions) -> Result<Watched, ClientError> {
    let begun = vm.record(asked.clone())?;
    let name = short(&vm.about.name);
    for remark in remarks(begun.has_functions, &begun, false) {
        printer::say(&format_args!("{name}: {remark}"));
    }
    let functions = Functions::new(Symbols::default(), vm.other_owner().is_none());
    let seen: Arc<Mutex<Result<Seen, ClientError>>> = Arc::new(Mutex::new(Ok(Seen::default())));
    let process = vm.about.pid;
    let fetching = {
        let seen = Arc::clone(&seen);
        move || fetch(vm, functions, &seen)
    };
    // It ends with this process.
    let spawned = thread::Builder::new().spawn(fetching);
    spawned.map_err(|error| ClientError::Silent(process, error))?;
    Ok(Watched { name, seen })
}

/// A VM whose samples a thread fetches.
struct Watched {
    name: String,
    /// What was sampled since the last look, or why there is nothing more.
    seen: Arc<Mutex<Result<Seen, ClientError>>>,
}

/// What was sampled in a VM, in counts of the event.
#[derive(Debug, Default)]
struct Seen {
    places: HashMap<Place, u64>,
    samples: u64,
    lost: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fetches a VM's samples until it does not answer any more.
fn fetch(mut vm: Vm, mut functions: Functions, into: &Mutex<Result<Seen, ClientError>>) {
    // They are the main thread's, which restores the terminal. Unblocked here, they would end the process.
    let _ = signals::block_events();
    loop {
        let mut answer = match vm.samples() {
            Ok(answer) => answer,
            Err(error) => return *lock(into) = Err(error),
        };
        let unknown = functions.unknown(&answer.taken);
        match vm.functions(&unknown) {
            Ok(found) => functions.add_of_kernel(&unknown, found),
            Err(error) => return *lock(into) = Err(error),
        }
        answer.taken.sort_by_key(|sample| sample.time);
        let places = answer.taken.iter().map(|sample| {
            ((Functions::command(sample), !sample.is_user, functions.function(sample)), sample.period)
        });
        let places: Vec<(Place, u64)> = places.collect();
        if let Ok(seen) = &mut *lock(into) {
            seen.lost = seen.lost.saturating_add(answer.lost);
            for (place, counts) in places {
                seen.samples += 1;
                if seen.places.len() < MAX_FUNCTIONS || seen.places.contains_key(&place) {
                    let all = seen.places.entry(place).or_default();
                    *all = all.saturating_add(counts);
                }
            }
        }
        if !answer.more {
            thread::sleep(FETCHED);
        }
    }
}

/// Shows what was sampled since the last look, and leaves out VMs that do not answer any more.
fn look(watched: &mut Vec<Watched>, event: &str, since: Instant, rows: usize) -> Looked {
    let (mut seen, mut gone) = (Vec::new(), Vec::new());
    watched.retain(|vm| match std::mem::replace(&mut *lock(&vm.seen), Ok(Seen::default())) {
        Ok(of_one) => {
            seen.push((vm.name.clone(), of_one));
            true
        }
        Err(error) => {
            gone.push(error);
            false
        }
    });
    Looked { lines: lines(&seen, event, since.elapsed(), rows), gone, more: !watched.is_empty() }
}

/// Renders what was seen, the functions with the most counts first.
fn lines(seen: &[(String, Seen)], event: &str, interval: Duration, rows: usize) -> Vec<String> {
    if seen.is_empty() {
        return Vec::new();
    }
    let sum = |of: fn(&Seen) -> u64| seen.iter().map(|(_, seen)| of(seen)).fold(0, u64::saturating_add);
    let (samples, lost) = (sum(|seen| seen.samples), sum(|seen| seen.lost));
    let total = sum(|seen| seen.places.values().copied().fold(0, u64::saturating_add));
    let mut places: Vec<(u64, &str, &Place)> = Vec::new();
    for (vm, seen) in seen {
        places.extend(seen.places.iter().map(|(place, counts)| (*counts, &**vm, place)));
    }
    places.sort_by(|one, other| other.0.cmp(&one.0).then_with(|| (one.1, one.2).cmp(&(other.1, other.2))));
    let vms = if seen.len() == 1 { "1 VM".to_owned() } else { format!("{} VMs", seen.len()) };
    let lost = if lost > 0 { format!(", {lost} lost") } else { String::new() };
    let seconds = interval.as_secs_f64();
    let mut lines = vec![format!("{vms}: {samples} samples of {event} in {seconds:.1} s{lost}")];
    lines.push(format!("{:>7}  {:12} {:15} function", "share", "VM", "command"));
    lines.extend(places.into_iter().take(rows).map(|(counts, vm, (command, is_kernel, function))| {
        #[allow(clippy::cast_precision_loss, reason = "it is shown with two digits")]
        let share = 100.0 * counts as f64 / total.max(1) as f64;
        let level = if *is_kernel { "[k]" } else { "[.]" };
        short(&format!("{share:6.2}%  {:12} {:15} {level} {function}", cut(vm, 12), cut(command, 15)))
    }));
    lines
}

/// Returns as much of a text as a column has room for: the beginning and the end of a longer one.
fn cut(text: &str, columns: usize) -> String {
    let len = text.chars().count();
    if len <= columns {
        return text.to_owned();
    }
    let end = text.chars().skip(len - columns / 2);
    text.chars().take(columns - columns / 2 - 1).chain(['~']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(places: &[(&str, bool, &str, u64)]) -> Seen {
        let place = |(command, is_kernel, function, counts): &(&str, bool, &str, u64)| {
            (((*command).to_owned(), *is_kernel, (*function).to_owned()), *counts)
        };
        Seen { places: places.iter().map(place).collect(), samples: places.len() as u64, lost: 0 }
    }

    #[test]
    fn functions_of_all_vms_are_in_the_order_of_their_shares() {
        let web = seen(&[("nginx", true, "copy_page", 250), ("nginx", false, "main", 500)]);
        let build = Seen { lost: 3, ..seen(&[("cr3-1fe0c0001fe0c000", false, "[cc1plus]", 250)]) };
        let both = [("web".to_owned(), web), ("build".to_owned(), build)];
        let expected = [
            "2 VMs: 3 samples of cycles in 2.0 s, 3 lost",
            "  share  VM           command         function",
            " 50.00%  web          nginx           [.] main",
            " 25.00%  build        cr3-1fe~fe0c000 [.] [cc1plus]",
            " 25.00%  web          nginx           [k] copy_page",
        ];
        assert_eq!(lines(&both, "cycles", Duration::from_secs(2), 20), expected);
        assert_eq!(lines(&both, "cycles", Duration::from_secs(2), 1).len(), 3);
        assert!(expected.iter().all(|line| line.len() <= 80));
    }

    #[test]
    fn a_vm_that_does_nothing_has_no_functions() {
        let idle = [("idle".to_owned(), Seen::default())];
        let shown = lines(&idle, "cycles", Duration::from_millis(500), 20);
        assert_eq!(shown[0], "1 VM: 0 samples of cycles in 0.5 s");
        assert_eq!(shown.len(), 2);
    }
}
