//! Checks the documented behaviour of Linux's perf events, exact to the instruction. Each sub-command checks one
//! feature and prints one line: what it measured, with status 0, or what was wrong, with status 1.
//!
//! The code that is counted is written in assembly, so every count is known in advance (see `code.rs`). The checks
//! expect a PMU of [`code::COUNTERS`] counters on which each instruction takes one cycle and overflows have no skid,
//! and no other user of perf events.
//!
//! Usage: `perf-features` prints the names of all features; `perf-features NAME` checks one; `perf-features turns` is a
//! measurement, which is to be compared with that on another machine (see `turns.rs`).

mod code;
mod counting;
mod event;
mod failure;
mod handler;
mod notification;
mod ring;
mod sampling;
mod scheduling;
mod switching;
mod targets;
mod turns;
mod watching_itself;
mod worker;

use std::process::ExitCode;

use failure::Verdict;

/// Timeout of one check, after which SIGALRM ends the program.
const LIMIT_SECONDS: u32 = 60;

type Feature = (&'static str, fn() -> Verdict);

const FEATURES: &[Feature] = &[
    ("counting", counting::counting),
    ("kinds", counting::kinds),
    ("kinds-in-a-group", counting::kinds_in_a_group),
    ("modes", counting::modes),
    ("hypervisor-and-idle", counting::hypervisor_and_idle),
    ("exclude-host", counting::exclude_host),
    ("exclude-guest", counting::exclude_guest),
    ("rdpmc-is-off", counting::rdpmc_is_off),
    ("times", scheduling::times),
    ("multiplexing", scheduling::multiplexing),
    ("pinned", scheduling::pinned),
    ("pinned-without-room", scheduling::pinned_without_room),
    ("exclusive", scheduling::exclusive),
    ("group", scheduling::group),
    ("group-too-large", scheduling::group_too_large),
    ("group-without-room", scheduling::group_without_room),
    ("sampling", sampling::sampling),
    ("sampling-side-by-side", sampling::side_by_side),
    ("sampling-on-all-counters", sampling::on_all_counters),
    ("sampling-a-group", sampling::a_group),
    ("changed-period", sampling::changed_period),
    ("ring-buffer", sampling::ring_buffer),
    ("ring-buffer-full", sampling::ring_buffer_full),
    ("other-records", sampling::other_records),
    ("wakeup-events", notification::wakeup_events),
    ("poll", notification::poll_waits),
    ("signals", notification::signals),
    ("refresh", notification::refresh),
    ("ioctl", switching::ioctl),
    ("ioctl-on-a-group", switching::ioctl_on_a_group),
    ("prctl", switching::prctl),
    ("per-task", targets::per_task),
    ("per-cpu", targets::per_cpu),
    ("inherited", targets::inherited),
    ("not-inherited", targets::not_inherited),
    ("own-signal-on-own-thread", watching_itself::own_signal_on_own_thread),
    ("alone-on-the-pmu", watching_itself::alone_on_the_pmu),
    ("first-pinned-wins", watching_itself::first_pinned_wins),
    ("own-counter-stays-behind", watching_itself::own_counter_stays_behind),
];

/// What is measured, and no feature.
const MEASUREMENTS: &[Feature] =
    &[("turns", turns::turns), ("turns-of-common-events", turns::with_common_events)];

fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        for (name, _) in FEATURES {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    };
    let Some((_, feature)) = FEATURES.iter().chain(MEASUREMENTS).find(|(known, _)| *known == name) else {
        println!("there is no feature `{name}`");
        return ExitCode::from(2);
    };
    // SAFETY: the call takes a number and cannot fail.
    unsafe { libc::alarm(LIMIT_SECONDS) };
    match feature() {
        Ok(seen) => {
            println!("{seen}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}
