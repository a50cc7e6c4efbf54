//! Runs a program that may less: `restricted unprivileged PROGRAM ARGUMENTS...` as a user like any other, `restricted seccomp
//! PROGRAM ARGUMENTS...` in a sandbox of the kind that containers have, which forbids `perf_event_open`.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

const NOBODY: u32 = 65534;

fn main() {
    let mut words = env::args_os().skip(1);
    let how = words.next().expect("how it is restricted");
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words);
    match how.to_str() {
        Some("unprivileged") => {
            command.uid(NOBODY).gid(NOBODY);
        }
        Some("seccomp") => forbid_perf(),
        _ => panic!("restricted how?"),
    }
    panic!("the program does not start: {}", command.exec());
}

fn forbid_perf() {
    let forbidden = u32::try_from(libc::EPERM).expect("errors are positive");
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_perf_event_open, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(forbidden),
        TargetArch::x86_64,
    )
    .expect("a filter of one call");
    let filter = BpfProgram::try_from(filter).expect("a filter of one call fits");
    seccompiler::apply_filter(&filter).expect("seccomp works");
}
