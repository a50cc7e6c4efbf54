//! Tells a person what takes long: one line a step, rewritten in place on a terminal. In a pipe only what takes minutes is
//! told, when it begins, so that it does not look like a hang. Nothing is printed when nothing has to be done.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// A detail is rewritten at most this often, so that a fast build does not spend its time on the terminal.
const REDRAW: Duration = Duration::from_millis(100);
/// Goes to the beginning of the line and erases it.
const ERASE: &str = "\r\x1b[K";

enum Output {
    /// Lines that are rewritten.
    Terminal,
    /// A line for each step.
    Lines,
    /// A line for each step that takes minutes.
    Pipe,
    Silent,
}

/// Where the steps of a build are shown.
pub struct Progress {
    output: Output,
    stream: Box<dyn Write + Send>,
    prefix: &'static str,
    step: Option<(String, Instant)>,
    drawn: Option<Instant>,
    /// Whether there is a line on the terminal that is to go away.
    waiting: bool,
}

impl Progress {
    /// Shows steps on standard error, each line beginning with `prefix`.
    pub fn stderr(prefix: &'static str) -> Self {
        let output = if stderr().is_terminal() { Output::Terminal } else { Output::Pipe };
        Self::new(output, Box::new(stderr()), prefix)
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self::new(Output::Silent, Box::new(std::io::sink()), "")
    }

    fn new(output: Output, stream: Box<dyn Write + Send>, prefix: &'static str) -> Self {
        Self { output, stream, prefix, step: None, drawn: None, waiting: false }
    }

    /// Shows every step in a pipe, too, if that is wanted.
    #[must_use]
    pub fn verbose(mut self, wanted: bool) -> Self {
        if wanted && matches!(self.output, Output::Pipe) {
            self.output = Output::Lines;
        }
        self
    }

    /// Ends the step before, if there is one, and begins the next, of seconds.
    pub fn step(&mut self, text: impl Into<String>) {
        self.begin(text.into());
    }

    /// The same of one that may take minutes.
    pub fn long_step(&mut self, text: impl Into<String>) {
        let text = text.into();
        if matches!(self.output, Output::Pipe) {
            self.say(&format!("{}: {text}, which may take minutes\n", self.prefix));
        }
        self.begin(text);
    }

    fn begin(&mut self, text: String) {
        self.done();
        match self.output {
            Output::Terminal => self.say(&format!("{ERASE}{}: {text} ...", self.prefix)),
            Output::Lines => self.say(&format!("{}: {text}\n", self.prefix)),
            Output::Pipe | Output::Silent => {}
        }
        self.step = Some((text, Instant::now()));
        self.drawn = None;
    }

    /// How far the current step is; only a terminal shows it.
    pub fn detail(&mut self, detail: &str) {
        let Some((text, _)) = &self.step else { return };
        if matches!(self.output, Output::Terminal) && self.drawn.is_none_or(|at| at.elapsed() >= REDRAW) {
            self.say(&format!("{ERASE}{}: {text} ... {detail}", self.prefix));
            self.drawn = Some(Instant::now());
        }
    }

    /// What is waited for outside of any step, on a line of a terminal that goes away again; in a step it is its detail.
    pub fn wait(&mut self, text: &str) {
        if self.step.is_some() {
            self.detail(text);
        } else if matches!(self.output, Output::Terminal) {
            self.say(&format!("{ERASE}{}: {text}", self.prefix));
            self.waiting = true;
        }
    }

    /// Takes away the line of what was waited for, so that something else can be there.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.waiting) {
            self.say(ERASE);
        }
    }

    /// Ends the current step.
    pub fn done(&mut self) {
        self.clear();
        if let Some((text, begun)) = self.step.take()
            && matches!(self.output, Output::Terminal)
        {
            self.say(&format!("{ERASE}{}: {text} ({:.1} s)\n", self.prefix, begun.elapsed().as_secs_f64()));
        }
    }

    /// A closed standard error must not end a build.
    fn say(&mut self, text: &str) {
        let _ = self.stream.write_all(text.as_bytes());
        let _ = self.stream.flush();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What a build shows that has a step of each kind.
    fn shown(output: Output, verbose: bool) -> String {
        let paper = Paper::default();
        let mut progress = Progress::new(output, Box::new(paper.clone()), "p").verbose(verbose);
        progress.step("fetching");
        progress.detail("3 of 4");
        progress.long_step("compiling");
        progress.done();
        progress.wait("booting, 1 s");
        progress.clear();
        progress.clear();
        drop(progress);
        let bytes = paper.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_pipe_is_told_only_of_what_takes_minutes() {
        assert_eq!(shown(Output::Pipe, false), "p: compiling, which may take minutes\n");
        assert_eq!(shown(Output::Pipe, true), "p: fetching\np: compiling\n");
        assert_eq!(shown(Output::Silent, true), "");
    }

    #[test]
    fn a_terminal_is_told_of_every_step_and_what_is_waited_for_goes_away() {
        let lines = shown(Output::Terminal, false);
        let lines: Vec<&str> = lines.split(ERASE).collect();
        let [first, fetching, detail, fetched, compiling, compiled, waiting, last] = lines[..] else {
            panic!("{lines:?}")
        };
        assert_eq!((first, fetching, detail), ("", "p: fetching ...", "p: fetching ... 3 of 4"));
        assert!(fetched.starts_with("p: fetching (0.") && fetched.ends_with(" s)\n"), "{fetched}");
        assert_eq!(compiling, "p: compiling ...");
        assert!(compiled.ends_with(" s)\n"), "{compiled}");
        assert_eq!((waiting, last), ("p: booting, 1 s", ""));
    }
}
