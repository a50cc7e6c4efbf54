//! `tally-lab demo`, the README's first command: perf in an unmodified guest, on this machine or on the simulated host.

use std::ffi::OsString;
use std::process::Command;

use guest_images::{Progress, Suite, default_guest, host};
use tally_lab::{Error, Processor, Result};

use crate::{beside, tally};

/// The guest's command: `perf` counts one program and samples another. The second one reads random numbers, which is
/// work in kernel functions whose symbols perf can show.
const COMMAND: [&str; 3] = [
    "sh",
    "-c",
    "uname -a
     perf stat -e instructions,cycles,branches,branch-misses -- md5sum /bin/busybox
     perf record -q -F 4000 -e cycles -o /tmp/data -- dd if=/dev/urandom of=/dev/null bs=64k count=64 2>/dev/null
     perf report -i /tmp/data --stdio -F overhead,sym 2>/dev/null | head -n 20",
];

const MEMORY_MIB: u32 = 2048;

/// Builds what is missing, and boots the guest. Returns the status of its command.
pub fn run(progress: &mut Progress) -> Result<u8> {
    // What is downloaded comes while cargo compiles.
    let tally = beside::begin_tally()?;
    let finish = |progress: &mut Progress| tally.map_or(Ok(()), |tally| tally.finish(progress));
    let Some(obstacle) = host::obstacle() else {
        default_guest(progress)?;
        finish(progress)?;
        progress.done();
        let program = beside::program("tally", progress)?;
        let status = Command::new(&program).args(["run", "--"]).args(COMMAND).status();
        let status = status.map_err(|source| Error::File { action: "run", path: program, source })?;
        return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
    };
    progress.done();
    eprintln!(
        "tally-lab: {obstacle}, so the guest runs on a simulated host (building that takes minutes, once)"
    );
    tally_lab::build(Processor::Amd, progress)?;
    finish(progress)?;
    tally::Run::new(COMMAND.map(OsString::from).into(), Suite::default().into(), MEMORY_MIB, progress)?
        .run(progress)
}
