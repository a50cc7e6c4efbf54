//! A program that samples itself by event-based branches: see [`tally_ebb::sample`].

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    tally_ebb::sample::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("ebb-sample: event-based branches are there on x86-64 only");
}
