//! The list of promises, and the program that checks one of them.

use std::process::ExitCode;
use std::time::Duration;

use crate::promise::{Failure, Verdict};
use crate::{counting, masking, others, otherwise, tasks};

/// What ran before may have had many short periods, which raises Tally's rate floor for 100 ms: with it, two overflows
/// may be one branch.
const FLOOD_ENDS: Duration = Duration::from_millis(150);
/// Time after which SIGALRM ends the program.
const LIMIT_SECONDS: u32 = 300;

type Promise = (&'static str, fn() -> Verdict);

const PROMISES: &[Promise] = &[
    ("registers", masking::registers),
    ("attributes", others::attributes),
    ("cycles", counting::cycles),
    ("stands-still", counting::stands_still),
    ("instructions", counting::instructions),
    ("places", counting::places),
    ("period-changes", counting::period_changes),
    ("several-counters", counting::several_counters),
    ("back-to-back", masking::back_to_back),
    ("masked", masking::masked),
    ("masked-across-switches", masking::masked_across_switches),
    ("no-handler", masking::no_handler),
    ("red-zone", counting::red_zone),
    ("switches", tasks::switches),
    ("processes", tasks::processes),
    ("threads", tasks::threads),
    ("child-that-asked", tasks::child_that_asked),
    ("child-that-did-not", tasks::child_that_did_not),
    ("fork", tasks::fork),
    ("exec", tasks::exec),
    ("close", others::close),
    ("evicts-cpu-event", others::evicts_cpu_event),
    ("evicts-task-event", others::evicts_task_event),
    ("pinned-cpu-event", others::pinned_cpu_event),
    ("pinned-task-event", others::pinned_task_event),
    ("invalid-handlers", masking::invalid_handlers),
    ("inherited", otherwise::inherited),
    ("for-a-cpu", otherwise::for_a_cpu),
    ("sampled", otherwise::sampled),
    ("with-the-kernel", otherwise::with_the_kernel),
];

/// Runs the program.
pub fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        for (name, _) in PROMISES {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    };
    let Some((_, check)) = PROMISES.iter().find(|(known, _)| *known == name) else {
        eprintln!("there is no promise `{name}`");
        return ExitCode::from(2);
    };
    // SAFETY: has no preconditions.
    unsafe { libc::alarm(LIMIT_SECONDS) };
    std::thread::sleep(FLOOD_ENDS);
    match check() {
        Ok(measured) => println!("{measured}"),
        Err(Failure(why)) => {
            println!("{why}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
