//! Prometheus from the distribution's package.

use std::path::PathBuf;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Repository;
use guest_images::{Progress, Result, Suite};

/// Returns the path of the program `prometheus`, which needs only the C library.
pub fn program(progress: &mut Progress) -> Result<PathBuf> {
    let cache = Cache::open()?;
    let suite = Suite::default();
    let entry = cache.entry(&Key::new("prometheus").with(suite.name()), progress, |progress, entry| {
        let repository = Repository::open(&cache, suite, progress)?;
        let mut packages = repository.resolve(&["prometheus"])?;
        packages.retain(|package| package.name == "prometheus");
        repository.unpack(&packages, entry, progress)
    })?;
    Ok(entry.join("usr/bin/prometheus"))
}
