//! Kernels as they are when they have been unpacked and patched, which takes longer than the rest of a start. They are
//! kept in the cache.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use guest_images::Progress;
use guest_images::cache::{Cache, Key};
use log::debug;
use tally_machine::{Kernel, SavedKernel};

use super::kept::{self, TargetMachine};

/// Version of what is in an entry's folder.
const VERSION: &str = "1";
const DESCRIPTION: &str = "kernel.json";
const IMAGE: &str = "image";

/// Kernels for a machine.
#[derive(Clone, Copy)]
pub struct Kernels<'a>(pub TargetMachine<'a>);

impl Kernels<'_> {
    /// Returns the kernel in a file, patched. `check` may refuse it before.
    pub fn read(self, path: &Path, check: impl Fn(&Kernel) -> Result<()>) -> Result<Kernel> {
        let cache = Kernel::IS_KEPT
            .then(|| self.cache(path))
            .transpose()
            .inspect_err(|error| debug!("{error:#}"))
            .ok()
            .flatten();
        let kept = cache
            .as_ref()
            .and_then(|cache| find(cache, path).inspect_err(|error| debug!("{error:#}")).ok().flatten());
        let kernel = if let Some(kernel) = kept {
            check(&kernel)?;
            kernel
        } else {
            let mut kernel = Kernel::read(path)?;
            check(&kernel)?;
            let TargetMachine { kvm, pmu, cpus } = self.0;
            if pmu.needs_retargeting() {
                kernel.retarget(kvm, pmu, cpus)?;
            }
            // The next run has more work, and nothing else is lost.
            if let Some(cache) = &cache {
                let _ = keep(cache, &kernel).inspect_err(|error| debug!("{error:#}"));
            }
            kernel
        };
        kernel.log_changes();
        Ok(kernel)
    }

    /// Returns the cache, and the key in it of the kernel in a file.
    fn cache(self, path: &Path) -> Result<(Cache, Key)> {
        let path = fs::canonicalize(path)?;
        let key = kept::key("patched-kernel", VERSION, self.0)?.with(kept::file_stamp(&path)?);
        Ok((Cache::open()?, key))
    }
}

/// Returns the kernel if it was kept.
fn find((cache, key): &(Cache, Key), path: &Path) -> Result<Option<Kernel>> {
    let Some(folder) = cache.find(key) else { return Ok(None) };
    let read = |name| fs::read(folder.join(name)).with_context(|| folder.display().to_string());
    let saved: SavedKernel = serde_json::from_slice(&read(DESCRIPTION)?)?;
    kept::used(&folder);
    Ok(Kernel::restored(path, read(IMAGE)?, saved))
}

fn keep((cache, key): &(Cache, Key), kernel: &Kernel) -> Result<()> {
    let Some(saved) = kernel.saved() else { return Ok(()) };
    let saved = serde_json::to_vec(&saved)?;
    cache.entry(key, &mut Progress::silent(), |_, folder| {
        fs::write(folder.join(DESCRIPTION), &saved)?;
        fs::write(folder.join(IMAGE), kernel.image())?;
        Ok::<_, anyhow::Error>(())
    })?;
    Ok(())
}
