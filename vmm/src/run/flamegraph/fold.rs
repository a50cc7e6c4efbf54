//! Folds perf's report: counts how often each stack was sampled.
//!
//! Whatever a guest reports, and however much, at most some tens of MiB are kept.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read};
use std::mem;

/// perf's own name until it has executed the command. Its first samples, a burst while it finds the right period, do
/// not belong to the command.
const PERF_ITSELF: &str = "perf-exec";
/// Maximum number of a sample's frames; perf itself stops at 127.
const MAX_FRAMES: usize = 256;
/// Maximum length of a line. Some symbols of C++ have thousands of letters.
const MAX_LINE: u64 = 64 << 10;
/// Maximum length of a name; the rest is cut.
const MAX_NAME: usize = 512;
/// Maximum size of all distinct stacks, which is enough for some ten thousand.
const MAX_STACKS: usize = 32 << 20;
/// Memory that a frame takes while the picture is drawn, besides its name.
const FRAME_SIZE: usize = 48;

/// Stacks, and how often each was sampled.
#[derive(Debug, Default)]
pub struct Stacks {
    /// Samples by stack: its frames from the outermost to the innermost, separated by semicolons.
    pub counts: BTreeMap<String, u64>,
    /// Number of samples that are not counted: those that are too large, or whose stack found no room.
    pub left_out: u64,
    kept: usize,
}

impl Stacks {
    fn add(&mut self, sample: Sample) {
        let Sample { command: Some(command), mut frames, is_too_large } = sample else { return };
        if command == PERF_ITSELF {
            return;
        }
        frames.push(command);
        frames.reverse();
        let stack = frames.join(";");
        let size = stack.len() + frames.len() * FRAME_SIZE;
        if is_too_large {
            self.left_out += 1;
        } else if let Some(count) = self.counts.get_mut(&stack) {
            *count += 1;
        } else if self.kept + size > MAX_STACKS {
            self.left_out += 1;
        } else {
            self.kept += size;
            self.counts.insert(stack, 1);
        }
    }
}

/// A sample that is being read.
#[derive(Default)]
struct Sample {
    command: Option<String>,
    /// Frames from the innermost to the outermost.
    frames: Vec<String>,
    is_too_large: bool,
}

pub fn fold(mut report: impl BufRead) -> io::Result<Stacks> {
    let (mut stacks, mut sample, mut line) = (Stacks::default(), Sample::default(), Vec::new());
    while report.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? > 0 {
        let is_whole = line.ends_with(b"\n") || (line.len() as u64) < MAX_LINE;
        let text = String::from_utf8_lossy(&line);
        if text.trim().is_empty() {
            stacks.add(mem::take(&mut sample));
        } else if !text.starts_with([' ', '\t']) {
            stacks.add(mem::take(&mut sample));
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
    stacks.add(sample);
    Ok(stacks)
}

/// Returns a frame's name, from a line `ADDRESS SYMBOL (FILE)`: its symbol, or else its file. The kernel's frames end
/// in `_[k]`, as the palette expects.
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
        symbol if is_kernel => name(symbol) + "_[k]",
        symbol => name(symbol),
    }
}

fn is_bracketed(file: &str) -> bool {
    file.starts_with('[')
}

/// Returns a name without the characters that have a meaning in folded stacks.
fn name(text: &str) -> String {
    text.chars().map(|c| if c == ';' || c.is_control() { '_' } else { c }).take(MAX_NAME).collect()
}

#[cfg(test)]
pub mod tests {
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

    #[test]
    fn a_report_of_ever_new_stacks_is_kept_up_to_a_limit_and_the_rest_is_counted() {
        let frames = "\t1 f (a)\n".repeat(MAX_FRAMES);
        let report: Vec<String> = (0..5000).map(|number| format!("{number}\n{frames}\n")).collect();
        let report = report.concat();
        let stacks = fold(report.as_bytes()).unwrap();
        assert!(stacks.kept <= MAX_STACKS);
        assert!(stacks.counts.len() > 1000, "{}", stacks.counts.len());
        assert!(stacks.left_out > 1000, "{}", stacks.left_out);
        assert_eq!(stacks.counts.len() as u64 + stacks.left_out, 5000);
        // A stack that is known already still counts.
        let again = fold(format!("{report}0\n{frames}").as_bytes()).unwrap();
        assert_eq!((again.counts.values().max(), again.left_out), (Some(&2), stacks.left_out));
    }
}
