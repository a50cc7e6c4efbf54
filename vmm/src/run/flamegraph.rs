//! `tally run --flamegraph`: runs the command under `perf record` in the guest, and draws perf's samples on the host.
//!
//! The guest's report is untrusted: it is folded line by line as it arrives, in bounded memory ([`fold()`]).

mod destination;
mod fold;
mod picture;
pub mod stacks;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use log::warn;

use crate::sandbox::{self, Access, Reach, Thread};
use fold::fold;
pub use picture::Picture;
use stacks::Stacks;

/// Shell script that runs the command `$@` under perf and sends every sample's stack to the report's port. The status
/// and all errors are the command's: a missing command is reported as the agent does, one that cannot be run by the
/// shell, and the shell is silent about a command that was killed. The shell survives a signal to its process group
/// that ends the command, and sends what perf has sampled until then. An interrupted perf ends the command with a
/// SIGTERM of its own: its status is replaced by the interrupt's.
const WRAPPER: &str = "which \"$1\" >/dev/null || {
	[ ! -e \"$1\" ] || exec \"$@\"
	printf '%s: command not found\\n' \"$1\" >&2
	exit 127
}
trap 'interrupted=130' INT
trap : QUIT USR1 USR2
exec 9>&2 2>/dev/null
(exec perf record -q -g -F 999 -o /run/samples -- \"$@\" 2>&9 9>&-)
status=$?
[ $status -ne 143 ] || status=${interrupted:-143}
perf script -i /run/samples -F comm,ip,sym,dso >/dev/vport0p5
exit $status";

/// Returns the command that the guest runs instead of this one.
pub fn wrap(command: &[OsString]) -> Vec<OsString> {
    ["sh", "-c", WRAPPER, "tally"].into_iter().map(OsString::from).chain(command.iter().cloned()).collect()
}

/// A flame graph that is being made. Unless it is finished, no file is left.
pub struct FlameGraph {
    picture: Picture,
    /// Thread that folds the report.
    folding: Option<JoinHandle<io::Result<Stacks>>>,
}

impl FlameGraph {
    /// Prepares a flame graph in this file.
    pub fn new(path: &Path) -> Result<Self> {
        Ok(Self { picture: Picture::new(path)?, folding: None })
    }

    /// Returns the file into which the guest's report goes, and starts the thread that folds it.
    pub fn report(&mut self) -> io::Result<File> {
        let (reader, writer) = io::pipe()?;
        let fold = move || fold(BufReader::new(reader));
        self.folding = Some(sandbox::spawn("flamegraph", Thread::FlameGraph, Vec::new(), fold)?);
        Ok(OwnedFd::from(writer).into())
    }

    /// Returns what [`Self::finish`] needs.
    pub fn reach(&self) -> Result<Option<Reach>> {
        let reach = self.picture.folder().map(|folder| Reach::to(folder, Access::Create)).transpose();
        reach.with_context(|| self.picture.option())
    }

    /// Draws the flame graph. The report has to have ended.
    pub fn finish(self, command: &[OsString]) -> Result<()> {
        let folded = self.folding.map(|folding| folding.join().expect("a panic ends the process"));
        let stacks = folded.transpose().context("cannot read the guest's report")?.unwrap_or_default();
        match (stacks.count(), stacks.left_out) {
            (0, 0) => bail!("--flamegraph: the command ended before perf took a sample"),
            (0, _) => {
                bail!("--flamegraph: the guest's report has only samples that are too large to be drawn")
            }
            _ => {}
        }
        if let Some(remark) = stacks.remark() {
            warn!("{remark}");
        }
        let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
        self.picture.draw(false, &words.join(" "), stacks)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::fold::tests::REPORT;
    use super::*;

    fn drawn(report: &str) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.svg");
        let mut graph = FlameGraph::new(&path).unwrap();
        graph.report().unwrap().write_all(report.as_bytes()).unwrap();
        let result = graph.finish(&["loop".into(), "<x>".into()]);
        let files = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, usize::from(result.is_ok()), "nothing half-done is left");
        result.map(|()| std::fs::read_to_string(path).unwrap())
    }

    #[test]
    fn the_picture_has_every_frame_and_the_commands_name() {
        let svg = drawn(REPORT).unwrap();
        assert!(svg.contains("<svg") && svg.trim_end().ends_with("</svg>"));
        for text in
            ["loop &lt;x&gt;", ">4 samples<", "spin (3 samples, 75.00%)", "asm_sysvec (1 samples, 25.00%)"]
        {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn without_a_sample_there_is_no_picture() {
        let error = drawn("\n\n").unwrap_err();
        assert!(error.to_string().contains("before perf took a sample"), "{error}");
    }

    #[test]
    fn a_picture_of_nothing_but_too_large_samples_is_refused() {
        let error = drawn(&"x".repeat(1 << 20)).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }

    proptest! {
        #[test]
        fn any_report_is_drawn_or_refused(report in "[a \t\n;()0-9<&\u{0}\u{ff}-]{0,200}") {
            let _ = drawn(&report);
        }
    }
}
