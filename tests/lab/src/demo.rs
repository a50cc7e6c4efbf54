//! The README's first command: an unmodified guest that runs a command, wherever it is tried.

use std::env;
use std::ffi::OsString;
use std::process::Command;

use guest_images::{Arch, Progress, Suite, default_guest, host};
use tally_lab::{Error, Result};

use crate::tally;

/// What the guest runs: `perf` counts a program and samples another. The kernel's random numbers are work with symbols.
const COMMAND: [&str; 3] = [
    "sh",
    "-c",
    "uname -a
     perf stat -e instructions,cycles,branches,branch-misses -- md5sum /bin/busybox
     perf record -q -F 4000 -e cycles -o /tmp/data -- dd if=/dev/urandom of=/dev/null bs=64k count=64 2>/dev/null
     perf report -i /tmp/data --stdio -F overhead,sym 2>/dev/null | head -n 20",
];

const MEMORY_MIB: u32 = 2048;

/// Builds what is missing, and boots.
pub fn run(progress: &mut Progress) -> Result<u8> {
    build_tally(progress)?;
    let Some(obstacle) = host::obstacle() else {
        default_guest(progress)?;
        progress.done();
        let program = tally::program()?;
        let status = Command::new(&program).args(["run", "--"]).args(COMMAND).status();
        let status = status.map_err(|source| Error::File { action: "run", path: program, source })?;
        return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
    };
    progress.done();
    eprintln!(
        "tally-lab: {obstacle}, so the guest runs on a simulated host (building that takes minutes, once)"
    );
    let run =
        tally::Run::new(COMMAND.map(OsString::from).into(), Suite::default().into(), MEMORY_MIB, progress)?;
    tally_lab::build(Arch::default(), progress)?;
    run.run(progress)
}

/// Builds `tally` if this was started by cargo; a program that was installed has it beside it.
fn build_tally(progress: &mut Progress) -> Result<()> {
    let (Some(cargo), Some(folder)) = (env::var_os("CARGO"), env::var_os("CARGO_MANIFEST_DIR")) else {
        return Ok(());
    };
    progress.long_step("building tally");
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--quiet", "--package", "tally"]).current_dir(folder);
    let status = build.status().map_err(|source| Error::System { action: "run cargo", source })?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Command("cargo build --release --package tally".to_owned()))
    }
}
