//! The host's processor.

use std::{fmt, fs};

/// The properties of a processor that matter to PMUs. All RISC-V processors are alike in this, so it is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor;

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a RISC-V processor")
    }
}

/// Returns true if the host's processor has this multi-letter ISA extension.
pub fn has(extension: &str) -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    value(&cpuinfo, "isa").split('_').any(|word| word == extension)
}

/// Returns the value of a key for the first processor.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}
