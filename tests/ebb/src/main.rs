//! Checks what `docs/ebb.md` promises of event-based branches, exact to the instruction. Each sub-command checks one
//! promise and prints one line: what it measured, with status 0, or what was wrong, with status 1.
//!
//! Linux checks POWER's facility by small programs, `tools/testing/selftests/powerpc/pmu/ebb`; these are their
//! promises, as far as they have a meaning here.
//!
//! Usage: `ebb-promises` prints the names of all promises; `ebb-promises NAME` checks one.

#[cfg(target_arch = "x86_64")]
mod code;
#[cfg(target_arch = "x86_64")]
mod counting;
#[cfg(target_arch = "x86_64")]
mod event;
#[cfg(target_arch = "x86_64")]
mod masking;
#[cfg(target_arch = "x86_64")]
mod others;
#[cfg(target_arch = "x86_64")]
mod otherwise;
#[cfg(target_arch = "x86_64")]
mod promise;
#[cfg(target_arch = "x86_64")]
mod promises;
#[cfg(target_arch = "x86_64")]
mod tasks;

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    promises::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("event-based branches are there on x86-64 only");
}
