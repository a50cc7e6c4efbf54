//! Runs many commands of unmodified `perf` in one shell script, and parses what they printed.
//!
//! The same script can run in a guest and on the simulated host that the guest is compared with.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::host;
use crate::lab::StepOutput;

/// `perf stat` with the output format that [`counts`] parses. The separator is a bar because names of events contain
/// commas and colons.
pub const STAT: &str = "perf stat -x'|'";

/// Prefix of the lines that the script itself prints between sections.
const MARK: &str = "####";

/// A shell script of named sections.
#[derive(Default)]
pub struct Script(String);

impl Script {
    /// Creates an empty script.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a section: commands that run in a shell of their own, with standard error merged into standard output.
    #[must_use]
    pub fn section(mut self, name: &str, commands: &str) -> Self {
        writeln!(self.0, "echo '{MARK} {name}'\n({commands}) 2>&1\necho \"{MARK} status $?\"")
            .expect("writing to a string cannot fail");
        self
    }

    /// Returns the script's text.
    pub fn into_bytes(self) -> Vec<u8> {
        [host::prelude().as_bytes(), self.0.as_bytes()].concat()
    }
}

/// Parsed output of a script, by section.
pub struct Sections {
    by_name: BTreeMap<String, Section>,
    /// All output, to show when a section is missing.
    everything: String,
}

#[derive(Default)]
struct Section {
    text: String,
    succeeded: bool,
}

impl Sections {
    /// Parses the output of a step that ran a script.
    pub fn of(output: &StepOutput) -> Self {
        let mut by_name = BTreeMap::new();
        let mut current = None;
        let text = output.text();
        for line in text.lines() {
            match line.strip_prefix(MARK).map(str::trim) {
                None => {
                    if let Some((_, Section { text, .. })) = &mut current {
                        text.push_str(line);
                        text.push('\n');
                    }
                }
                Some(mark) => match mark.strip_prefix("status ") {
                    None => current = Some((mark.to_owned(), Section::default())),
                    Some(status) => {
                        let (name, section) = current.take().expect("only a section has a status");
                        by_name.insert(name, Section { succeeded: status == "0", ..section });
                    }
                },
            }
        }
        Self { by_name, everything: format!("{text}{}status {}", output.err, output.status) }
    }

    /// Returns what a section printed. Panics if the section failed or is missing.
    pub fn text(&self, name: &str) -> &str {
        match self.by_name.get(name) {
            Some(Section { text, succeeded: true }) => text,
            Some(Section { text, .. }) => panic!("`{name}` failed: {text}"),
            None => panic!("`{name}` did not come to its end:\n{}", self.everything),
        }
    }

    /// Returns what `perf stat` counted in a section. Panics if there are no counts.
    pub fn counts(&self, name: &str) -> Vec<Count> {
        let counts = counts(self.text(name));
        assert!(!counts.is_empty(), "`{name}` counted nothing: {}", self.text(name));
        counts
    }

    /// Returns the values that `perf stat` counted in a section. Panics if an event did not run all of the time.
    pub fn values(&self, name: &str) -> Vec<u64> {
        self.counts(name).iter().map(Count::exact).collect()
    }

    /// Parses a section of lines `NAME NUMBER`, and returns the numbers by name.
    pub fn numbers(&self, name: &str) -> BTreeMap<&str, u64> {
        let text = self.text(name);
        text.lines()
            .map(|line| {
                let entry = line.rsplit_once(' ').and_then(|(key, number)| Some((key, number.parse().ok()?)));
                entry.unwrap_or_else(|| panic!("`{name}` is to print names and numbers: {text}"))
            })
            .collect()
    }
}

/// One line of [`STAT`]'s output.
#[derive(Debug, Clone, PartialEq)]
pub struct Count {
    /// The field before the value: a CPU (`-A`) or a time (`-I`). Empty without these options.
    pub label: String,
    pub event: String,
    pub value: Value,
    /// Percentage of the enabled time in which the event was on a counter.
    pub running: f64,
}

/// Result of `perf stat` for one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Number of times that the event occurred.
    Counted(u64),
    /// The event was never on a counter.
    NotCounted,
    /// The PMU has no such event.
    NotSupported,
}

impl Count {
    /// Returns the value of an event that was on a counter all of the time. Panics otherwise.
    pub fn exact(&self) -> u64 {
        match self.value {
            Value::Counted(value) if (self.running - 100.0).abs() < 0.005 => value,
            _ => panic!("not an exact count: {self:?}"),
        }
    }
}

/// Returns the lines of [`STAT`]'s output in a text, with or without a label (`-A`, `-I`). Other lines are ignored.
pub fn counts(text: &str) -> Vec<Count> {
    text.lines().filter_map(count).collect()
}

fn count(line: &str) -> Option<Count> {
    let fields: Vec<&str> = line.split('|').map(str::trim).collect();
    let (label, value, event, running) = match fields.as_slice() {
        [value, _unit, event, _time, running, _metric, _its_unit] => ("", value, event, running),
        [label, value, _unit, event, _time, running, _metric, _its_unit] => (*label, value, event, running),
        _ => return None,
    };
    Some(Count {
        label: label.to_owned(),
        event: (*event).to_owned(),
        value: self::value(value)?,
        running: running.parse().ok()?,
    })
}

fn value(text: &str) -> Option<Value> {
    match text {
        "<not counted>" => Some(Value::NotCounted),
        "<not supported>" => Some(Value::NotSupported),
        number => number.parse().ok().map(Value::Counted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(label: &str, event: &str, value: Value, running: f64) -> Count {
        Count { label: label.to_owned(), event: event.to_owned(), value, running }
    }

    #[test]
    fn lines_of_perf_stat_are_read_with_and_without_labels() {
        let text = "some warning\n\
                    4005||cpu/event=0xc0,umask=0x0/u|100145407|100.00||\n\
                    <not supported>||bus-cycles|0|100.00||\n\
                    <not counted>||r76|0|0.00||\n\
                    CPU3|17||cycles:u|100|59.50||\n     \
                    0.050123456|18||cycles:u|100|100.00||\n\
                    79518835||instructions|55819348|69.00|1.00|insn per cycle\n";
        assert_eq!(
            counts(text),
            [
                count("", "cpu/event=0xc0,umask=0x0/u", Value::Counted(4005), 100.0),
                count("", "bus-cycles", Value::NotSupported, 100.0),
                count("", "r76", Value::NotCounted, 0.0),
                count("CPU3", "cycles:u", Value::Counted(17), 59.5),
                count("0.050123456", "cycles:u", Value::Counted(18), 100.0),
                count("", "instructions", Value::Counted(79_518_835), 69.0),
            ]
        );
    }

    #[test]
    fn a_section_contains_the_output_of_its_commands() {
        let output = StepOutput {
            status: 0,
            out: b"#### one\na 1\nb c 2\n#### status 0\n#### two\n#### status 1\n".to_vec(),
            err: String::new(),
        };
        let sections = Sections::of(&output);
        assert_eq!(sections.numbers("one"), BTreeMap::from([("a", 1), ("b c", 2)]));
        assert!(!sections.by_name["two"].succeeded);
    }
}
