//! A program that samples itself by event-based branches, and prints its own flame graph.

#[cfg(target_arch = "x86_64")]
mod cost;
#[cfg(target_arch = "x86_64")]
mod flame;

const HELP: &str = "\
Usage: ebb-sample [--cost]

Samples a small computation of its own every 100,000 instructions, and prints where it was as a flame graph: each line
is a function, under the one that has called it, with its part of the samples.

      --cost    measure what a branch costs, beside a signal of perf_event_open
";

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
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
            return std::process::ExitCode::from(2);
        }
    };
    if let Err(error) = done {
        eprintln!("ebb-sample: {error}");
        return std::process::ExitCode::FAILURE;
    }
    std::process::ExitCode::SUCCESS
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("{HELP}ebb-sample: event-based branches are there on x86-64 only");
}
