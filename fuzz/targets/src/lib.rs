//! Fuzz targets: what Tally reads from guests, files and other processes, as functions of any bytes.
//!
//! A target panics if Tally does what it never must: panic itself, work without bound, or let somebody reach what is
//! not theirs. The program of this package runs a target with libFuzzer, which looks for such bytes; `cargo fuzz`
//! builds and starts it. The ordinary tests run each target on its [corpus].
//!
//! A target has no state between two calls, so that an input does the same each time.

mod agent;
pub mod corpus;
mod image;
mod kernels;
mod memory;
mod mirror;
mod operator;
mod pmu;
mod rdpmc;
mod riscv;
mod share;
mod snapshot;
mod virtio;

use std::fmt::Debug;

use arbitrary::{Arbitrary, Unstructured};

/// Environment variable with the name of the target that the program runs.
pub const TARGET_VARIABLE: &str = "TALLY_FUZZ_TARGET";

/// Environment variable that makes targets print what they do with an input.
pub const REPLAY_VARIABLE: &str = "TALLY_FUZZ_REPLAY";

/// Makes a target's steps of an input. Returns `None` if it is too short for them.
fn parse<'a, T: Arbitrary<'a> + Debug>(data: &'a [u8]) -> Option<T> {
    let input = T::arbitrary_take_rest(Unstructured::new(data)).ok()?;
    if std::env::var_os(REPLAY_VARIABLE).is_some() {
        eprintln!("{input:#?}");
    }
    Some(input)
}

/// Length to which an image's repeated part can bring it: work that grows with the square of this takes so long that it
/// is a finding. Much longer ones would only take the time of other inputs.
const LONGEST: usize = 64 << 10;

/// Returns how often the last part of an image is repeated behind it, so that a short input can be a long image: never,
/// unless the input says one of the highest numbers.
fn repetitions(number: u8, part: usize, image: usize) -> usize {
    const FEWEST: u8 = 240;
    let room = LONGEST.saturating_sub(image) / part.max(1);
    number.checked_sub(FEWEST).map_or(0, |exponent| room.min(1 << exponent))
}

/// A fuzz target.
#[derive(Debug)]
pub struct Target {
    /// Name of the target, and of its corpus.
    pub name: &'static str,
    pub about: &'static str,
    pub max_len: usize,
    /// Runs the target on an input.
    pub run: fn(&[u8]),
}

#[rustfmt::skip]
pub const TARGETS: [Target; 12] = [
    Target { name: "agent",    about: "the messages and streams of the guest's agent",                   max_len: 16 << 10, run: agent::run },
    Target { name: "image",    about: "images of containers: their archives, and layers one over the other",   max_len: 32 << 10, run: image::run },
    Target { name: "kernels",  about: "kernel images: bzImage, ELF, multiboot, RISC-V, all compressions", max_len: 64 << 10, run: kernels::run },
    Target { name: "memory",   about: "a guest's whole memory, for `tally record`, `tally top` and `tally symbols`", max_len: 16 << 10, run: memory::run },
    Target { name: "mirror",   about: "answers of mirrors and proxies, indexes, packages",               max_len: 16 << 10, run: mirror::run },
    Target { name: "operator", about: "answers of VMs to `tally list` and `tally stat`, and event logs", max_len: 16 << 10, run: operator::run },
    Target { name: "pmu",      about: "register accesses, with a shared page that changes meanwhile",    max_len: 4 << 10,  run: pmu::run },
    Target { name: "rdpmc",    about: "the search for RDPMC in x86 kernels, and its bound",              max_len: 4 << 10,  run: rdpmc::run },
    Target { name: "riscv",    about: "the changes to RISC-V kernels",                                   max_len: 16 << 10, run: riscv::run },
    Target { name: "share",    about: "FUSE requests to a share whose files the host replaces",          max_len: 4 << 10,  run: share::run },
    Target { name: "snapshot", about: "a snapshot's state: devices, PMUs, the agent; without KVM",        max_len: 32 << 10, run: snapshot::run },
    Target { name: "virtio",   about: "registers and rings of disks, shares, consoles and networks",     max_len: 4 << 10,  run: virtio::run },
];

pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
