//! The lab: a simulated host with an exact PMU, for machines that have none.
//!
//! A patched QEMU simulates a processor with virtualisation and a PMU that counts every instruction (`cpu`), an
//! unmodified Debian kernel with KVM runs on it (`host`), and a [`Scenario`] is a script that runs there. Virtual time
//! is counted in instructions, so that a scenario does the same thing every time and a test can say `==`.

pub mod bench;
mod board;
pub mod cores;
mod cpu;
pub mod cross;
mod error;
mod host;
mod machine;
pub mod peer;
pub mod pmu_figures;
pub mod programs;
mod scenario;
pub mod self_test;
mod symbols;
mod tools;
pub mod use_figures;
mod watch;
// A program for RISC-V is compiled with the rest of this, and what is measured here is not there.
#[cfg(target_arch = "x86_64")]
pub mod watch_figures;

use std::path::PathBuf;
use std::time::Instant;

use guest_images::cache::Cache;
use guest_images::{Arch, Progress, Release};

pub use board::HostPmu;
pub use cores::Core;
pub use error::Error;
pub use host::default_host;
pub use scenario::{Outcome, Scenario, Streams, quoted};
pub use tools::ensure;

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Builds all of a kind of lab that has not been built: the CPU, the host, the default guest. How long the first build took
/// is kept, because it cannot be measured again without throwing everything away.
pub fn build(arch: Arch, progress: &mut Progress) -> Result<()> {
    let cache = Cache::open()?;
    let begun = Instant::now();
    let first = !cpu::was_built(&cache);
    scenario::guest_with(Release::of(arch), &[], progress)?;
    host::build(&cache, default_host(arch), progress)?;
    cpu::build(&cache, arch, progress)?;
    if first {
        let path = first_build_time_path(&cache);
        let seconds = begun.elapsed().as_secs().to_string();
        std::fs::write(&path, seconds).map_err(Error::file("write", path))?;
    }
    Ok(())
}

/// How many seconds the first build took, if [`build`] made it.
pub fn first_build_seconds() -> Result<Option<u64>> {
    let path = first_build_time_path(&Cache::open()?);
    Ok(std::fs::read_to_string(path).ok().and_then(|seconds| seconds.parse().ok()))
}

fn first_build_time_path(cache: &Cache) -> PathBuf {
    cache.root().join("first-build-seconds")
}
