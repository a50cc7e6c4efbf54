//! Folds perf's report into [`Stacks`]. Whatever a guest reports, a line of it is read at a time.

use std::io::{self, BufRead, Read};
use std::mem;

use super::stacks::{Stacks, name, of_kernel};

/// perf's own name until it has executed the command. Its first samples, a burst while it finds the right period, do
/// not belong to the command.
const PERF_ITSELF: &str = "perf-exec";
/// Maximum number of a sample's frames; perf itself stops at 127.
const MAX_FRAMES: usize = 256;
/// Maximum length of a line. Some symbols of C++ have thousands of letters.
const MAX_LINE: u64 = 64 << 10;
/// A sample that is being read.
#[derive(Default)]
struct Sample {
    command: Option<String>,
    /// Frames from the innermost to the outermost.
    frames: Vec<String>,
    is_too_large: bool,
}

impl Sample {
    /// Counts the sample.
    fn add_to(self, stacks: &mut Stacks) {
        let Self { command: Some(command), mut frames, is_too_large } = self else { return };
        if command == PERF_ITSELF {
            return;
        }
        frames.push(command);
        frames.reverse();
        if is_too_large {
            stacks.left_out += 1;
        } else {
            stacks.add(&frames);
        }
    }
}

pub fn fold(mut report: impl BufRead) -> io::Result<Stacks> {
    let (mut stacks, mut sample, mut line) = (Stacks::default(), Sample::default(), Vec::new());
    while report.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? > 0 {
        let is_whole = line.ends_with(b"\n") || (line.len() as u64) < MAX_LINE;
        let text = String::from_utf8_lossy(&line);
        if text.trim().is_empty() {
            mem::take(&mut sample).add_to(&mut stacks);
        } else if !text.starts_with([' ', '\t']) {
            mem::take(&mut sample).add_to(&mut stacks);
            sample.command = Some(name(text.trim()));
        } else if sample.command.is_none() {
            // A command's name may begin with a blank.
            sample.command = Some(name(text.trim()));
        } else if sample.frames.len() < MAX_FRAMES {
            sample.frames.push(frame(text.trim()));
        } else {
            sample.is_too_large = true;
        }
        if !is_whole {
            sample.is_too_large = true;
            report.skip_until(b'\n')?;
        }
        line.clear();
    }
    sample.add_to(&mut stacks);
    Ok(stacks)
}

/// Returns a frame's name, from a line `ADDRESS SYMBOL (FILE)`: its symbol, or else its file.
fn frame(line: &str) -> String {
    let (_, rest) = line.split_once(' ').unwrap_or(("", line));
    let (symbol, file) = rest.rsplit_once(" (").unwrap_or((rest, ""));
    let file = file.trim_end_matches(')');
    // The kernel and its modules have a name in brackets instead of a file, and so have some mappings of a program.
    let is_kernel =
        is_bracketed(file) && !matches!(file, "[vdso]" | "[vsyscall]" | "[heap]" | "[stack]" | "[unknown]");
    match symbol.trim() {
        // A name in brackets is no file: it stays as it is.
        "" | "[unknown]" if is_bracketed(file) => name(file),
        "" | "[unknown]" => name(&format!("[{}]", file.rsplit('/').next().unwrap_or(file))),
        symbol if is_kernel => of_kernel(symbol),
        symbol => name(symbol),
    }
}

fn is_bracketed(file: &str) -> bool {
    file.starts_with('[')
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Report of five samples.
    pub const REPORT: &str = "\
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

    fn folded(report: &str) -> Vec<(String, u64)> {
        fold(report.as_bytes()).unwrap().counts.into_iter().collect()
    }

    #[test]
    fn equal_stacks_of_the_command_are_counted_together_from_the_outermost_frame_on() {
        let expected =
            [("a b;[unknown];[libc.so.6]", 1), ("loop;main;spin", 2), ("loop;main;spin;asm_sysvec_[k]", 1)];
        assert_eq!(folded(REPORT), expected.map(|(stack, count)| (stack.to_owned(), count)));
    }

    #[test]
    fn a_sample_with_an_endless_line_or_too_many_frames_is_left_out_and_counted() {
        let line = "x".repeat(1 << 20);
        let deep = "\t1 f (a)\n".repeat(MAX_FRAMES + 1);
        let report =
            format!("a\n\t1 {line} (a)\n\t2 g (a)\n\nb\n{deep}\n{line}\n\t1 f (a)\n\nc\n\t1 f (a)\n");
        let stacks = fold(report.as_bytes()).unwrap();
        assert_eq!((stacks.counts, stacks.left_out), (BTreeMap::from([("c;f".to_owned(), 1)]), 3));
    }
}
