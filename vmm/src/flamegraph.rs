//! `tally run --flamegraph`: the command runs under `perf record` in the guest, and what perf saw becomes a picture here.
//!
//! The guest's text is not to be trusted: it is folded here, line by line, whatever it says.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use inferno::flamegraph::color::MultiPalette;
use inferno::flamegraph::{self, Options, Palette};
use tempfile::NamedTempFile;

/// Runs the command as `$@` under perf and sends every sample's stack to the report's port. The status is the command's, and
/// so are all errors: a command that is not there is told as the agent tells it, what cannot be run the shell complains of,
/// and it says nothing of a command that was killed. A signal that breaks the command off, and that its whole group gets,
/// leaves the shell to send what perf saw until then.
const WRAPPER: &str = "which \"$1\" >/dev/null || {
	[ ! -e \"$1\" ] || exec \"$@\"
	printf '%s: command not found\\n' \"$1\" >&2
	exit 127
}
trap : INT QUIT USR1 USR2
exec 9>&2 2>/dev/null
(exec perf record -q -g -F 999 -o /run/samples -- \"$@\" 2>&9 9>&-)
status=$?
perf script -i /run/samples -F comm,ip,sym,dso >/dev/vport0p5
exit $status";
/// How much of a report is kept: far more than a picture can show.
pub const LONGEST_REPORT: u64 = 256 << 20;
/// What perf calls itself until the command's program begins: its first samples, a burst while it looks for the right
/// period, are of no command.
const BEFORE_THE_COMMAND: &str = "perf-exec";
/// Frames below this one are left out; perf itself stops at 127.
const DEEPEST: usize = 256;
const LONGEST_NAME: usize = 512;
/// How many letters fit above a picture.
const LONGEST_TITLE: usize = 110;

/// The command that a guest is given instead of this one.
pub fn wrap(command: &[OsString]) -> Vec<OsString> {
    ["sh", "-c", WRAPPER, "tally"].into_iter().map(OsString::from).chain(command.iter().cloned()).collect()
}

/// A picture in the making. Unless it is finished, nothing is left of it.
pub struct FlameGraph {
    path: PathBuf,
    picture: NamedTempFile,
    report: File,
}

impl FlameGraph {
    /// A picture that will be that file.
    pub fn new(path: &Path) -> Result<Self> {
        let about = || format!("--flamegraph {}", path.display());
        if path.is_dir() {
            bail!("{}: is a directory", about());
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        folder.metadata().with_context(about)?;
        // Beside its place, so that it gets there at once, and it is known now whether it can.
        let picture = tempfile::Builder::new()
            .prefix(".tally-")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(folder)
            .with_context(about)?;
        let report = tempfile::tempfile().context("cannot make a temporary file")?;
        Ok(Self { path: path.to_owned(), picture, report })
    }

    /// Where the guest's report goes.
    pub fn report(&self) -> io::Result<File> {
        self.report.try_clone()
    }

    /// Draws what the report says.
    pub fn finish(mut self, command: &[OsString]) -> Result<()> {
        self.report.rewind().context("cannot read the guest's report")?;
        let stacks = fold(BufReader::new(&self.report)).context("cannot read the guest's report")?;
        if stacks.is_empty() {
            bail!("--flamegraph: the command ended before perf took a sample");
        }
        let mut options = Options::default();
        options.title = title(command);
        options.subtitle = Some(format!("{} samples", stacks.values().sum::<u64>()));
        // It gives the kernel's frames a colour of their own; the same function has the same one in every picture.
        options.colors = Palette::Multi(MultiPalette::Java);
        options.hash = true;
        let lines: Vec<String> = stacks.iter().map(|(stack, count)| format!("{stack} {count}")).collect();
        let mut picture = BufWriter::new(self.picture.as_file_mut());
        flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut picture)
            .and_then(|()| picture.flush())
            .with_context(|| format!("--flamegraph {}", self.path.display()))?;
        drop(picture);
        self.picture.persist(&self.path).with_context(|| format!("--flamegraph {}", self.path.display()))?;
        Ok(())
    }
}

/// The command, as far as there is room for it.
fn title(command: &[OsString]) -> String {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let mut title = words.join(" ").replace(char::is_control, " ");
    if let Some((end, _)) = title.char_indices().nth(LONGEST_TITLE) {
        title.truncate(end);
        title.push('\u{2026}');
    }
    title
}

/// How often each stack was seen, its frames from the outermost to the innermost with semicolons between.
fn fold(report: impl BufRead) -> io::Result<BTreeMap<String, u64>> {
    let mut stacks = BTreeMap::new();
    let (mut command, mut frames) = (None, Vec::new());
    let mut end = |command: &mut Option<String>, frames: &mut Vec<String>| {
        if let Some(command) = command.take().filter(|command| command != BEFORE_THE_COMMAND) {
            frames.push(command);
            frames.reverse();
            *stacks.entry(frames.join(";")).or_insert(0) += 1;
        }
        frames.clear();
    };
    for line in report.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if line.trim().is_empty() {
            end(&mut command, &mut frames);
        } else if !line.starts_with([' ', '\t']) {
            end(&mut command, &mut frames);
            command = Some(name(line.trim()));
        } else if command.is_none() {
            // A command's name may itself begin with a blank.
            command = Some(name(line.trim()));
        } else if frames.len() < DEEPEST {
            frames.push(frame(line.trim()));
        }
    }
    end(&mut command, &mut frames);
    Ok(stacks)
}

/// A frame's name, of a line `ADDRESS SYMBOL (FILE)`: its symbol, or else its file. The kernel's are marked as usual.
fn frame(line: &str) -> String {
    let (_, rest) = line.split_once(' ').unwrap_or(("", line));
    let (symbol, file) = rest.rsplit_once(" (").unwrap_or((rest, ""));
    let file = file.trim_end_matches(')');
    // The kernel and its modules have no file but a name in brackets, and so have some pieces of a program.
    let is_kernel =
        is_bracketed(file) && !matches!(file, "[vdso]" | "[vsyscall]" | "[heap]" | "[stack]" | "[unknown]");
    match symbol.trim() {
        // What is in brackets already has no file either.
        "" | "[unknown]" if is_bracketed(file) => name(file),
        "" | "[unknown]" => name(&format!("[{}]", file.rsplit('/').next().unwrap_or(file))),
        symbol if is_kernel => name(symbol) + "_[k]",
        symbol => name(symbol),
    }
}

fn is_bracketed(file: &str) -> bool {
    file.starts_with('[')
}

/// A name without what has a meaning in folded stacks.
fn name(text: &str) -> String {
    text.chars().map(|c| if c == ';' || c.is_control() { '_' } else { c }).take(LONGEST_NAME).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REPORT: &str = "\
loop
\tffffffff81000010 asm_sysvec ([kernel.kallsyms])
\t          401000 spin (/root/loop)
\t          401010 main (/root/loop)

loop
\t          401000 spin (/root/loop)
\t          401010 main (/root/loop)

loop
\t          401000 spin (/root/loop)
\t          401010 main (/root/loop)

a b
\t    7f0000000000 [unknown] (/lib/libc.so.6)
\t    7f0000000001 [unknown] ([unknown])

perf-exec
\tffffffff81000020 begin_new_exec ([kernel.kallsyms])
";

    #[test]
    fn equal_stacks_of_the_command_are_counted_together_from_the_outermost_frame_on() {
        let stacks: Vec<_> = fold(REPORT.as_bytes()).unwrap().into_iter().collect();
        let expected =
            [("a b;[unknown];[libc.so.6]", 1), ("loop;main;spin", 2), ("loop;main;spin;asm_sysvec_[k]", 1)];
        assert_eq!(stacks, expected.map(|(stack, count)| (stack.to_owned(), count)));
    }

    fn drawn(report: &str) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.svg");
        let graph = FlameGraph::new(&path).unwrap();
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
    fn a_long_command_is_cut_to_fit_above_the_picture() {
        assert_eq!(title(&["a;".into(), "b\nc".into()]), "a; b c");
        assert_eq!(title(&["\u{e4}".repeat(500).into()]), "\u{e4}".repeat(LONGEST_TITLE) + "\u{2026}");
    }

    #[test]
    fn without_a_sample_there_is_no_picture() {
        let error = drawn("\n\n").unwrap_err();
        assert!(error.to_string().contains("before perf took a sample"), "{error}");
    }

    #[test]
    fn a_place_that_cannot_be_written_to_is_refused_at_once() {
        assert!(FlameGraph::new(Path::new("/no/such/folder/x.svg")).is_err());
        assert!(FlameGraph::new(Path::new("/tmp")).is_err());
    }

    proptest! {
        #[test]
        fn any_report_is_drawn_or_refused(report in "[a \t\n;()0-9<&\u{0}\u{ff}-]{0,200}") {
            let _ = drawn(&report);
        }
    }
}
