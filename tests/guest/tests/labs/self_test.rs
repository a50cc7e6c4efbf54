//! The lab proves itself before anything of ours runs on it.
//!
//! Dozens of counts come out of each boot, so this is a test program of its own that reports every one by its name. It
//! takes parts of names as arguments, as others do.

use std::env;
use std::process::ExitCode;
use std::thread;

use guest_images::Progress;
use tally_lab::self_test::{self, Check};

fn main() -> ExitCode {
    let wanted: Vec<String> = env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let groups = thread::scope(|scope| {
        [
            self_test::on_the_host,
            self_test::in_a_guest,
            self_test::guest_and_host_apart,
            self_test::leaving_a_guest,
            self_test::on_the_riscv_host,
            self_test::in_a_riscv_guest,
        ]
        .map(|group| scope.spawn(move || group(&mut Progress::stderr("tally-lab"))))
        .map(|group| group.join().expect("it reports what fails"))
    });
    let mut checks: Vec<Check> = Vec::new();
    for group in groups {
        match group {
            Ok(group) => checks.extend(group),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    checks.retain(|check| wanted.is_empty() || wanted.iter().any(|part| check.name.contains(part)));
    println!("running {} tests", checks.len());
    let mut failed = 0;
    for check in &checks {
        println!("test {} ... {}", check.name, if check.holds() { "ok" } else { "FAILED" });
        if !check.holds() {
            println!("  {check}");
            failed += 1;
        }
    }
    println!("test result: {} passed; {failed} failed", checks.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
