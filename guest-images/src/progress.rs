//! Tells a person what a long build is doing: one line per step, rewritten in place on a terminal, plain lines elsewhere.
//! Nothing is printed when nothing has to be built.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// A detail is rewritten at most this often, so that a fast build does not spend its time on the terminal.
const REDRAW: Duration = Duration::from_millis(100);

enum Output {
    Terminal,
    Lines,
    Silent,
}

/// Where the steps of a build are shown.
pub struct Progress {
    output: Output,
    prefix: &'static str,
    step: Option<(String, Instant)>,
    drawn: Option<Instant>,
}

impl Progress {
    /// Shows steps on standard error, each line beginning with `prefix`.
    pub fn stderr(prefix: &'static str) -> Self {
        let output = if stderr().is_terminal() { Output::Terminal } else { Output::Lines };
        Self { output, prefix, step: None, drawn: None }
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self { output: Output::Silent, prefix: "", step: None, drawn: None }
    }

    /// Ends the step before, if there is one, and begins the next.
    pub fn step(&mut self, text: impl Into<String>) {
        self.done();
        let text = text.into();
        match self.output {
            Output::Terminal => say(&format!("\r\x1b[K{}: {text} ...", self.prefix)),
            Output::Lines => say(&format!("{}: {text}\n", self.prefix)),
            Output::Silent => {}
        }
        self.step = Some((text, Instant::now()));
        self.drawn = None;
    }

    /// How far the current step is; only a terminal shows it.
    pub fn detail(&mut self, detail: &str) {
        let Some((text, _)) = &self.step else { return };
        if matches!(self.output, Output::Terminal) && self.drawn.is_none_or(|at| at.elapsed() >= REDRAW) {
            say(&format!("\r\x1b[K{}: {text} ... {detail}", self.prefix));
            self.drawn = Some(Instant::now());
        }
    }

    /// Ends the current step.
    pub fn done(&mut self) {
        if let Some((text, begun)) = self.step.take()
            && matches!(self.output, Output::Terminal)
        {
            say(&format!("\r\x1b[K{}: {text} ({:.1} s)\n", self.prefix, begun.elapsed().as_secs_f64()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.done();
    }
}

/// A closed standard error must not end a build.
fn say(text: &str) {
    let mut stream = stderr().lock();
    let _ = stream.write_all(text.as_bytes());
    let _ = stream.flush();
}
