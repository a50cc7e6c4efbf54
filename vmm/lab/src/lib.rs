//! The lab: a simulated host with KVM and an exact PMU, for machines that have neither.
//!
//! A patched QEMU or Bochs simulates a processor with virtualisation and a PMU that counts every instruction (`cpu`).
//! An unmodified Debian kernel with KVM runs on that processor (`host`). A [`Scenario`] is a script that runs on this
//! host. One instruction takes one nanosecond of virtual time, so a scenario does the same each time, and tests can
//! compare counts with `==`.

mod error;
mod measure;
mod scenario;
pub mod self_test;
mod shell;
mod simulator;

use std::path::{Path, PathBuf};
use std::time::Instant;

use guest_images::cache::Cache;
use guest_images::{Progress, Release};

pub use error::{Error, Result};
pub use measure::{bench, figures, profile, published};
pub use scenario::cores::Core;
pub use scenario::{Outcome, Scenario, Streams, cores, cross, guest, packed, passt, peer, programs};
pub use shell::quoted;
pub use simulator::board::{HostPmu, Perfmon, Processor};
pub use simulator::image::default_host;
pub use simulator::silicon::Silicon;
pub use simulator::source::source;
pub use simulator::tools::ensure;
use simulator::{cpu, image};

/// Builds the parts of a lab that have not been built: the CPU, the host, the default guest. Saves a host, if hosts of
/// this kind are saved. Stores the time that the first build takes, which cannot be measured again without deleting the
/// cache.
pub fn build(processor: Processor, progress: &mut Progress) -> Result<()> {
    let cache = Cache::open()?;
    let begun = Instant::now();
    let first = !cpu::was_built(&cache);
    let arch = processor.arch();
    guest(Release::of(arch), progress)?;
    let pmu = if processor == Processor::Intel { HostPmu::INTEL } else { HostPmu::default() };
    Scenario::new("").host(default_host(arch)).pmu(pmu).build_host(progress)?;
    if first {
        let path = first_build_time_path(&cache);
        let seconds = begun.elapsed().as_secs().to_string();
        std::fs::write(&path, seconds).map_err(Error::file("write", path))?;
    }
    Ok(())
}

/// Returns the names of the parts of a simulated host, which is built if needed. They change with everything that a
/// program's counts on the host depend on, except the program.
pub fn parts_of_host(host: Release, processor: Processor, progress: &mut Progress) -> Result<String> {
    let cache = Cache::open()?;
    let cpu = cpu::build(&cache, processor, progress)?;
    let image = image::build(&cache, host, processor, progress)?;
    // The parts' folders in the cache, which are named by what they were built from.
    let folders = [&cpu.program, &image.initrd].map(|file| file.parent().and_then(Path::file_name));
    Ok(folders.map(|folder| folder.unwrap_or_default().to_string_lossy()).join(" "))
}

/// Returns the time in seconds that the first build took, if [`build`] made it.
pub fn first_build_seconds() -> Result<Option<u64>> {
    let path = first_build_time_path(&Cache::open()?);
    Ok(std::fs::read_to_string(path).ok().and_then(|seconds| seconds.parse().ok()))
}

fn first_build_time_path(cache: &Cache) -> PathBuf {
    cache.root().join("first-build-seconds")
}
