//! `tally lab` and `tally bench`: execute the program `tally-lab`, as git does with its subcommands. So `tally` does
//! not depend on the lab.

use std::env;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const PROGRAM: &str = "tally-lab";

/// True if this architecture has a lab, and programs that `tally check` runs.
pub const LAB_AVAILABLE: bool = cfg!(target_arch = "x86_64");
/// Advice after the reason why Linux does not run here.
pub const LAB_HINT: &str = if LAB_AVAILABLE { ": `tally lab run` runs it on a simulated host" } else { "" };

/// Executes `tally-lab` with this subcommand in place of this process. It is looked for beside this program, then in
/// `PATH`.
pub fn run(command: &[&str], arguments: &[OsString]) -> Result<ExitCode> {
    let program = beside_us().unwrap_or_else(|| PROGRAM.into());
    let error = Command::new(&program).args(command).args(arguments).exec();
    if error.kind() == ErrorKind::NotFound {
        bail!(
            "`{PROGRAM}` is neither beside tally nor in PATH: build it with `cargo build --release -p {PROGRAM}`"
        );
    }
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

fn beside_us() -> Option<PathBuf> {
    let program = env::current_exe().ok()?.with_file_name(PROGRAM);
    program.is_file().then_some(program)
}
