//! Runs a program with fewer privileges.
//!
//! - `restricted unprivileged PROGRAM ARGUMENTS...` runs it as an ordinary user.
//! - `restricted as-mallory PROGRAM ARGUMENTS...` runs it as another ordinary user.
//! - `restricted setcap PROGRAM ARGUMENTS...` does what `setcap cap_perfmon+ep PROGRAM` does, and then the same.
//! - `restricted seccomp PROGRAM ARGUMENTS...` runs it under a seccomp filter that forbids `perf_event_open`, as
//!   containers do.
//! - `restricted no-landlock PROGRAM ARGUMENTS...` and `restricted no-seccomp PROGRAM ARGUMENTS...` run it as on a
//!   kernel that was built without these.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

const NOBODY: u32 = 65534;
const MALLORY: u32 = 1001;

fn main() {
    let mut words = env::args_os().skip(1);
    let how = words.next().expect("how it is restricted");
    let program = words.next().expect("a program");
    let mut command = Command::new(&program);
    command.args(words);
    match how.to_str() {
        Some("unprivileged") => unprivileged(&mut command),
        Some("as-mallory") => {
            command.uid(MALLORY).gid(NOBODY);
        }
        Some("setcap") => {
            give_perfmon(&program).expect("the file system has capabilities");
            unprivileged(&mut command);
        }
        Some("seccomp") => forbid(libc::SYS_perf_event_open, libc::EPERM),
        Some("no-landlock") => forbid(libc::SYS_landlock_create_ruleset, libc::ENOSYS),
        Some("no-seccomp") => forbid(libc::SYS_seccomp, libc::ENOSYS),
        _ => panic!("restricted how?"),
    }
    panic!("the program does not start: {}", command.exec());
}

fn unprivileged(command: &mut Command) {
    command.uid(NOBODY).gid(NOBODY);
}

/// Gives the file `CAP_PERFMON`, permitted and effective. The value is `struct vfs_cap_data` of `linux/capability.h`:
/// version 2 with the effective flag, then the permitted and the inheritable set, first their lower halves, then their
/// upper ones.
fn give_perfmon(program: &OsStr) -> io::Result<()> {
    const PERFMON: u32 = 38;
    let words: [u32; 5] = [0x0200_0001, 0, 0, 1 << (PERFMON - 32), 0];
    let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let path = CString::new(program.as_bytes())?;
    let name = c"security.capability";
    // SAFETY: both strings end with a null byte, and `value` has the length that is passed.
    let result =
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets a system call fail with this error from now on.
fn forbid(call: i64, error: i32) {
    let filter = SeccompFilter::new(
        BTreeMap::from([(call, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(error.cast_unsigned()),
        TargetArch::x86_64,
    )
    .expect("a filter of one call");
    let filter = BpfProgram::try_from(filter).expect("a filter of one call fits");
    seccompiler::apply_filter(&filter).expect("seccomp works");
}
