//! The example `ebb-sample`: a program that samples itself by event-based branches, and prints its own flame graph.
//!
//! In the default guest it is a name of the agent's, which is there anyway: a program of its own would take a megabyte
//! of the guest's memory.

mod cost;
mod flame;

use std::env;
use std::process::ExitCode;

const HELP: &str = "\
Usage: ebb-sample [--cost]

Samples a small computation of its own every 100,000 instructions, and prints where it was as a flame graph: each line
is a function, under the one that has called it, with its part of the samples.

      --cost    measure what a branch costs, beside a signal of perf_event_open
";

/// Runs the program.
pub fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] => flame::print(),
        ["--cost"] => cost::print(),
        ["-h" | "--help"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = done {
        eprintln!("ebb-sample: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
