//! Progress messages on standard error. On a terminal, there is one line per step, which is updated in place. Otherwise
//! only steps that may take minutes are printed, when they begin and every half a minute, so that they do not look like
//! a hang. If nothing has to be done, nothing is printed.

use std::io::{IsTerminal, Write, stderr};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Minimum time between two updates of a step's detail.
const REDRAW: Duration = Duration::from_millis(100);
/// Time between two lines of a log about the same step.
const REPORT: Duration = Duration::from_secs(30);
/// How long a step has to have run until its speed is taken for that of its rest.
const TELLING: Duration = Duration::from_secs(10);
/// Moves the cursor to the beginning of the line and erases the line.
const ERASE: &str = "\r\x1b[K";

enum Output {
    /// Lines that are updated in place.
    Terminal,
    /// A line for each step.
    Lines,
    /// A line for each step that may take minutes.
    Pipe,
    Silent,
}

/// Where messages go.
type Stream = Arc<Mutex<Box<dyn Write + Send>>>;

/// A thread that prints a line about a step every now and then, until this is dropped.
struct Reporter {
    /// How far the step is.
    detail: Arc<Mutex<String>>,
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    fn start(stream: Stream, step: String, every: Duration) -> Self {
        let (end, ended) = mpsc::channel();
        let detail = Arc::new(Mutex::new(String::new()));
        let shown = Arc::clone(&detail);
        let begun = Instant::now();
        let thread = thread::spawn(move || {
            while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let (seconds, detail) = (begun.elapsed().as_secs(), lock(&shown).clone());
                let comma = if detail.is_empty() { "" } else { ", " };
                say(&stream, &format!("{step}: {detail}{comma}{seconds} s so far\n"));
            }
        });
        Self { detail, end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Shows the steps of a build.
pub struct Progress {
    output: Output,
    stream: Stream,
    prefix: &'static str,
    step: Option<(String, Instant)>,
    /// Time at which the step's detail was last updated.
    updated: Option<Instant>,
    /// Says in a log that the step goes on.
    reporter: Option<Reporter>,
    /// Time between two lines of the reporter.
    interval: Duration,
    /// The terminal shows a line of [`Self::wait`], which has to be erased.
    has_wait_line: bool,
}

impl Progress {
    /// Shows steps on standard error. Each line starts with `prefix`.
    pub fn stderr(prefix: &'static str) -> Self {
        let output = if stderr().is_terminal() { Output::Terminal } else { Output::Pipe };
        Self::new(output, Box::new(stderr()), prefix)
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self::new(Output::Silent, Box::new(std::io::sink()), "")
    }

    fn new(output: Output, stream: Box<dyn Write + Send>, prefix: &'static str) -> Self {
        let stream = Arc::new(Mutex::new(stream));
        Self {
            output,
            stream,
            prefix,
            step: None,
            updated: None,
            reporter: None,
            interval: REPORT,
            has_wait_line: false,
        }
    }

    /// Shows every step even if standard error is not a terminal, if `is_verbose`.
    #[must_use]
    pub fn verbose(mut self, is_verbose: bool) -> Self {
        if is_verbose && matches!(self.output, Output::Pipe) {
            self.output = Output::Lines;
        }
        self
    }

    /// Ends the current step, if there is one, and begins a step that takes seconds.
    pub fn step(&mut self, text: impl Into<String>) {
        self.begin(&text.into());
    }

    /// Ends the current step, if there is one, and begins a step that may take minutes.
    pub fn long_step(&mut self, text: impl Into<String>) {
        let text = printable(&text.into());
        if matches!(self.output, Output::Pipe) {
            self.say(&format!("{}: {text}, which may take minutes\n", self.prefix));
        }
        self.begin(&text);
        self.report();
    }

    /// Reports the current step to a log from now on.
    fn report(&mut self) {
        if let Some((text, _)) = &self.step
            && self.reporter.is_none()
            && matches!(self.output, Output::Pipe | Output::Lines)
        {
            let step = format!("{}: {text}", self.prefix);
            self.reporter = Some(Reporter::start(Arc::clone(&self.stream), step, self.interval));
        }
    }

    fn begin(&mut self, text: &str) {
        self.done();
        let text = printable(text);
        match self.output {
            Output::Terminal => self.say(&format!("{ERASE}{}: {text} ...", self.prefix)),
            Output::Lines => self.say(&format!("{}: {text}\n", self.prefix)),
            Output::Pipe | Output::Silent => {}
        }
        self.step = Some((text, Instant::now()));
        self.updated = None;
    }

    /// Ends the current step, if there is one, and shows a line about something that the user should know.
    pub fn remark(&mut self, text: &str) {
        self.done();
        if !matches!(self.output, Output::Silent) {
            self.say(&format!("{}: {}\n", self.prefix, printable(text)));
        }
    }

    /// Shows how far the current step is: on a terminal at once, in a log with the next line about the step.
    pub fn detail(&mut self, detail: &str) {
        let Some((text, _)) = &self.step else { return };
        if let Some(reporter) = &self.reporter {
            *lock(&reporter.detail) = printable(detail);
        }
        if matches!(self.output, Output::Terminal) && self.updated.is_none_or(|at| at.elapsed() >= REDRAW) {
            self.say(&format!("{ERASE}{}: {text} ... {}", self.prefix, printable(detail)));
            self.updated = Some(Instant::now());
        }
    }

    /// Shows how much of a download is here, as [`Self::detail`] does.
    pub fn bytes(&mut self, here: u64, total: u64) {
        self.report();
        // Tenths of a megabyte.
        let [megabytes, of] =
            [here, total].map(|bytes| format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10));
        self.part(here, total, &format!("{megabytes} of {of} MB"));
    }

    /// Shows how many parts of the current step are done.
    pub fn parts(&mut self, done: u64, total: u64) {
        self.part(done, total, &format!("{done} of {total}"));
    }

    /// Shows a bar, how much of the step is done in words, and how long the rest takes if it goes on like this.
    fn part(&mut self, done: u64, total: u64, words: &str) {
        const WIDTH: u64 = 24;
        let filled = done.saturating_mul(WIDTH).checked_div(total).unwrap_or(WIDTH).min(WIDTH);
        let bar: String = (0..WIDTH).map(|place| if place < filled { '#' } else { '.' }).collect();
        let elapsed = self.step.as_ref().map_or(Duration::ZERO, |(_, begun)| begun.elapsed());
        let left = left(elapsed, done, total)
            .map_or(String::new(), |left| format!(", some {} s left", left.as_secs()));
        self.detail(&format!("[{bar}] {words}{left}"));
    }

    /// Shows what the program waits for, on a line of a terminal that [`Self::clear`] erases. Within a step, shows it
    /// as the step's detail.
    pub fn wait(&mut self, text: &str) {
        if self.step.is_some() {
            self.detail(text);
        } else if matches!(self.output, Output::Terminal) {
            self.say(&format!("{ERASE}{}: {}", self.prefix, printable(text)));
            self.has_wait_line = true;
        }
    }

    /// Erases the line of [`Self::wait`].
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.has_wait_line) {
            self.say(ERASE);
        }
    }

    /// Ends the current step.
    pub fn done(&mut self) {
        self.clear();
        self.reporter = None;
        if let Some((text, begun)) = self.step.take()
            && matches!(self.output, Output::Terminal)
        {
            self.say(&format!("{ERASE}{}: {text} ({:.1} s)\n", self.prefix, begun.elapsed().as_secs_f64()));
        }
    }

    fn say(&mut self, text: &str) {
        say(&self.stream, text);
    }
}

/// Prints text. Ignores errors, because a build must continue even if standard error is closed.
fn say(stream: &Stream, text: &str) {
    let mut stream = lock(stream);
    let _ = stream.write_all(text.as_bytes());
    let _ = stream.flush();
}

/// Locks what no thread leaves half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how long the rest of a step takes at the speed that it has had, once that says something.
fn left(elapsed: Duration, done: u64, total: u64) -> Option<Duration> {
    let rest = total.checked_sub(done).filter(|rest| *rest > 0 && done > 0)?;
    let seconds = elapsed.as_secs().checked_mul(rest)? / done;
    (elapsed >= TELLING && seconds > 0).then_some(Duration::from_secs(seconds))
}

/// Replaces control characters: texts may quote what a mirror, an index of packages or an image says.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
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

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the output of a build with a step of each kind.
    fn output_of_a_build(output: Output, verbose: bool) -> String {
        let buffer = Buffer::default();
        let mut progress = Progress::new(output, Box::new(buffer.clone()), "p").verbose(verbose);
        progress.step("fetching");
        progress.detail("3 of 4");
        progress.long_step("compiling");
        progress.done();
        progress.wait("booting, 1 s");
        progress.clear();
        progress.clear();
        progress.remark("no updates");
        drop(progress);
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_download_has_a_bar_on_a_terminal() {
        let shown = |here, total| {
            let buffer = Buffer::default();
            let mut progress = Progress::new(Output::Terminal, Box::new(buffer.clone()), "p");
            progress.step("fetching");
            progress.bytes(here, total);
            let bytes = buffer.0.lock().unwrap().clone();
            String::from_utf8(bytes).unwrap().split(ERASE).last().unwrap().to_owned()
        };
        assert_eq!(shown(0, 44_000_000), "p: fetching ... [........................] 0.0 of 44.0 MB");
        assert_eq!(
            shown(12_340_000, 24_000_000),
            "p: fetching ... [############............] 12.3 of 24.0 MB"
        );
        assert_eq!(shown(0, 0), "p: fetching ... [########################] 0.0 of 0.0 MB");
    }

    #[test]
    fn how_long_a_step_still_takes_is_said_when_its_speed_is_known() {
        let left =
            |seconds, done, total| left(Duration::from_secs(seconds), done, total).map(|left| left.as_secs());
        assert_eq!(left(60, 300, 1200), Some(180));
        assert_eq!([left(60, 0, 1200), left(60, 1200, 1200), left(60, 2, 1)], [None; 3]);
        assert_eq!([left(9, 300, 1200), left(10, 1, u64::MAX), left(60, 1199, 1200)], [None; 3]);
    }

    #[test]
    fn what_is_fetched_cannot_draw_on_the_terminal() {
        let buffer = Buffer::default();
        let mut progress = Progress::new(Output::Terminal, Box::new(buffer.clone()), "p");
        progress.step("fetching a\x1b[2J");
        progress.detail("\u{9b}2J");
        progress.wait("\x07");
        progress.remark("b\r\nc");
        drop(progress);
        let shown = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap().replace(ERASE, "");
        assert!(shown.contains("fetching a?[2J ... ?2J") && shown.ends_with("p: b??c\n"), "{shown:?}");
        assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
    }

    #[test]
    fn a_pipe_gets_only_steps_that_may_take_minutes() {
        assert_eq!(
            output_of_a_build(Output::Pipe, false),
            "p: compiling, which may take minutes\np: no updates\n"
        );
        assert_eq!(output_of_a_build(Output::Pipe, true), "p: fetching\np: compiling\np: no updates\n");
        assert_eq!(output_of_a_build(Output::Silent, true), "");
    }

    #[test]
    fn a_log_says_how_far_a_long_step_is() {
        let buffer = Buffer::default();
        let text = || String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let mut progress = Progress::new(Output::Pipe, Box::new(buffer.clone()), "p");
        progress.interval = Duration::from_millis(1);
        progress.long_step("compiling");
        while !text().contains("p: compiling: 0 s so far\n") {
            thread::yield_now();
        }
        progress.detail("3 of\n4");
        while !text().contains("p: compiling: 3 of?4, ") {
            thread::yield_now();
        }
        progress.done();
        let ended = text();
        thread::sleep(progress.interval * 20);
        assert_eq!(text(), ended, "a step that is done is not spoken of");
    }

    #[test]
    fn a_terminal_gets_every_step_and_the_line_of_a_wait_is_erased() {
        let lines = output_of_a_build(Output::Terminal, false);
        let lines: Vec<&str> = lines.split(ERASE).collect();
        let [first, fetching, detail, fetched, compiling, compiled, waiting, last] = lines[..] else {
            panic!("{lines:?}")
        };
        assert_eq!((first, fetching, detail), ("", "p: fetching ...", "p: fetching ... 3 of 4"));
        assert!(fetched.starts_with("p: fetching (0.") && fetched.ends_with(" s)\n"), "{fetched}");
        assert_eq!(compiling, "p: compiling ...");
        assert!(compiled.ends_with(" s)\n"), "{compiled}");
        assert_eq!((waiting, last), ("p: booting, 1 s", "p: no updates\n"));
    }
}
