//! What perf reports, folded: how often each stack was seen.
//!
//! Whatever a guest reports, and however much, no more than some tens of MiB are kept of it.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read};
use std::mem;

/// What perf calls itself until the command's program begins: its first samples, a burst while it looks for the right
/// period, are of no command.
const BEFORE_THE_COMMAND: &str = "perf-exec";
/// How many frames a sample may have; perf itself stops at 127.
const DEEPEST: usize = 256;
/// How long a line of perf's may be. Some symbols of C++ have thousands of letters.
const LONGEST_LINE: u64 = 64 << 10;
/// How much of a name is shown.
const LONGEST_NAME: usize = 512;
/// How much all stacks may take, each once: there are some ten thousand then.
const MOST_KEPT: usize = 32 << 20;
/// What a frame takes in a picture that is being drawn, besides its name.
const FRAME: usize = 48;

/// How often each stack was seen.
#[derive(Debug, Default)]
pub struct Stacks {
    /// By its frames, from the outermost to the innermost with semicolons between.
    pub counts: BTreeMap<String, u64>,
    /// How many samples are not among them: those that are too large, or of stacks for which there was no more room.
    pub left_out: u64,
    kept: usize,
}

impl Stacks {
    fn add(&mut self, sample: Sample) {
        let Sample { command: Some(command), mut frames, is_too_large } = sample else { return };
        if command == BEFORE_THE_COMMAND {
            return;
        }
        frames.push(command);
        frames.reverse();
        let stack = frames.join(";");
        let size = stack.len() + frames.len() * FRAME;
        if is_too_large {
            self.left_out += 1;
        } else if let Some(count) = self.counts.get_mut(&stack) {
            *count += 1;
        } else if self.kept + size > MOST_KEPT {
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
    /// From the innermost on.
    frames: Vec<String>,
    is_too_large: bool,
}

/// Folds a report.
pub fn fold(mut report: impl BufRead) -> io::Result<Stacks> {
    let (mut stacks, mut sample, mut line) = (Stacks::default(), Sample::default(), Vec::new());
    while report.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? > 0 {
        let is_whole = line.ends_with(b"\n") || (line.len() as u64) < LONGEST_LINE;
        let text = String::from_utf8_lossy(&line);
        if text.trim().is_empty() {
            stacks.add(mem::take(&mut sample));
        } else if !text.starts_with([' ', '\t']) {
            stacks.add(mem::take(&mut sample));
            sample.command = Some(name(text.trim()));
        } else if sample.command.is_none() {
            // A command's name may itself begin with a blank.
            sample.command = Some(name(text.trim()));
        } else if sample.frames.len() < DEEPEST {
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
pub mod tests {
    use super::*;

    /// What a guest reports of five samples.
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
        let deep = "\t1 f (a)\n".repeat(DEEPEST + 1);
        let report =
            format!("a\n\t1 {line} (a)\n\t2 g (a)\n\nb\n{deep}\n{line}\n\t1 f (a)\n\nc\n\t1 f (a)\n");
        let stacks = fold(report.as_bytes()).unwrap();
        assert_eq!((stacks.counts, stacks.left_out), (BTreeMap::from([("c;f".to_owned(), 1)]), 3));
    }

    #[test]
    fn a_report_of_ever_new_stacks_is_kept_up_to_a_limit_and_the_rest_is_counted() {
        let frames = "\t1 f (a)\n".repeat(DEEPEST);
        let report: Vec<String> = (0..5000).map(|number| format!("{number}\n{frames}\n")).collect();
        let report = report.concat();
        let stacks = fold(report.as_bytes()).unwrap();
        assert!(stacks.kept <= MOST_KEPT);
        assert!(stacks.counts.len() > 1000, "{}", stacks.counts.len());
        assert!(stacks.left_out > 1000, "{}", stacks.left_out);
        assert_eq!(stacks.counts.len() as u64 + stacks.left_out, 5000);
        // What is known already still counts.
        let again = fold(format!("{report}0\n{frames}").as_bytes()).unwrap();
        assert_eq!((again.counts.values().max(), again.left_out), (Some(&2), stacks.left_out));
    }
}
