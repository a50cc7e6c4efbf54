//! Downloads and unpacks Debian packages without installing them.
//!
//! This uses apt with a separate configuration and state in the cache. The machine's sources, package lists and
//! installed packages are neither changed nor used, except for the addresses of the mirror and the network settings.
//! apt checks the signatures of the package lists as usual. Files are compared with these lists whenever they are used.
//! No privileges are needed; if root starts it, apt downloads as the user `_apt`.

mod configuration;
mod lists;
mod package;
mod workplace;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::cache::{Cache, Guard};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::release::Release;
use crate::tool;
use configuration::configuration;
use lists::Archives;
use workplace::Workplace;

pub use package::Package;

/// Package lists older than this are updated before they are used.
const MAX_AGE_OF_LISTS: Duration = Duration::from_hours(1);
/// File with the sources of the lists. It is written when they have been updated.
const UPDATED: &str = "updated";

/// apt for one release. Holds a lock, so that other processes wait.
pub struct Apt {
    cache: Cache,
    release: Release,
    directory: PathBuf,
    debs: PathBuf,
    sources: PathBuf,
    _guard: Option<Guard>,
}

impl Apt {
    /// Configures apt for one release and updates its package lists, unless that has been done recently.
    pub fn open(cache: &Cache, release: impl Into<Release>, progress: &mut Progress) -> Result<Self> {
        let apt = Self::configure(cache, release.into(), progress)?;
        let archives = Archives::of(apt.release)?;
        let stamp = apt.directory.join(UPDATED);
        let is_recent = apt.updated().is_some_and(|at| at.elapsed().is_ok_and(|age| age < MAX_AGE_OF_LISTS));
        if !is_recent || fs::read_to_string(stamp).ok() != Some(archives.stamp(apt.release)) {
            apt.update(&archives, progress)?;
        }
        Ok(apt)
    }

    /// Updates the package lists of a release, however old they are.
    pub fn update_lists(cache: &Cache, release: Release, progress: &mut Progress) -> Result<()> {
        Self::configure(cache, release, progress)?.update(&Archives::of(release)?, progress)
    }

    /// Returns apt with the package lists as they are, and the time at which they were updated. They are only for
    /// information: another process may be updating them.
    pub fn as_updated(cache: &Cache, release: Release) -> Result<Option<(Self, SystemTime)>> {
        if !cache.root().join(folder_of(release)).join(UPDATED).exists() {
            return Ok(None);
        }
        let apt = Self::in_cache(cache, release, None)?;
        let updated = apt.updated();
        Ok(updated.map(|at| (apt, at)))
    }

    fn in_cache(cache: &Cache, release: Release, guard: Option<Guard>) -> Result<Self> {
        Ok(Self {
            cache: cache.clone(),
            release,
            directory: cache.folder(&folder_of(release))?,
            debs: cache.folder("downloads")?,
            sources: cache.folder("downloads/source")?,
            _guard: guard,
        })
    }

    /// Writes apt's configuration.
    fn configure(cache: &Cache, release: Release, progress: &mut Progress) -> Result<Self> {
        let guard = cache.lock(&format!("apt-{}", release.label()), progress)?;
        let apt = Self::in_cache(cache, release, Some(guard))?;
        for folder in ["lists", "cache", "cache/archives", "state", "sources.d"] {
            apt.folder(folder)?;
        }
        write(&apt.directory.join("apt.conf"), &configuration(&apt.directory, release)?)?;
        write(&apt.directory.join("empty"), "")?;
        Ok(apt)
    }

    /// Returns a directory of apt's in the cache, and creates it if necessary.
    fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.cache.folder(&format!("{}/{name}", folder_of(self.release)))?;
        // apt gives these to its own user.
        if ["lists", "cache/archives"].contains(&name) {
            let partial = folder.join("partial");
            fs::create_dir_all(&partial).map_err(Error::io("create", partial))?;
        }
        Ok(folder)
    }

    /// Returns the time at which the package lists were updated.
    fn updated(&self) -> Option<SystemTime> {
        fs::metadata(self.directory.join(UPDATED)).and_then(|file| file.modified()).ok()
    }

    /// Returns the packages with these names and all their dependencies.
    pub fn resolve(&self, names: &[&str]) -> Result<Vec<Package>> {
        let mut command = self.get();
        command.args(["install", "--quiet=2", "--no-install-recommends", "--print-uris"]).args(names);
        Package::parse_all(&tool::run(&mut command, "apt")?)
    }

    /// Returns the files of a source package.
    fn resolve_source(&self, name: &str) -> Result<Vec<Package>> {
        let mut command = self.get();
        command.args(["source", "--print-uris", "--only-source", "--quiet=2", name]);
        Package::parse_all(&tool::run(&mut command, "apt")?)
    }

    /// Returns the newest version of a source package, without its epoch.
    pub fn source_version(&self, name: &str) -> Result<String> {
        Ok(self.description(&self.resolve_source(name)?, name)?.version())
    }

    /// Downloads packages, unless that has been done before, and unpacks them into one directory.
    pub fn unpack(&self, packages: &[Package], into: &Path, progress: &mut Progress) -> Result<()> {
        let missing = missing(packages, &self.debs, progress);
        if !missing.is_empty() {
            let bytes: u64 = missing.iter().map(|package| package.size).sum();
            progress.step(format!(
                "fetching {} packages of {} ({} MB)",
                missing.len(),
                self.release,
                bytes / 1_000_000
            ));
            let names = missing.iter().map(|package| format!("{}={}", package.name, package.version()));
            let mut download = self.get();
            download.arg("download").args(names);
            self.download(&mut download, &missing, &self.debs)?;
        }
        for package in packages {
            progress.detail(&package.name);
            let deb = self.debs.join(&package.file);
            tool::run(Command::new("dpkg-deb").arg("-x").arg(deb).arg(into), "dpkg")?;
        }
        Ok(())
    }

    /// Downloads a source package and unpacks it, with the distribution's patches, into a new directory.
    pub fn unpack_source(&self, name: &str, into: &Path, progress: &mut Progress) -> Result<()> {
        let files = self.resolve_source(name)?;
        let dsc = &self.description(&files, name)?.file;
        let missing = missing(&files, &self.sources, progress);
        if !missing.is_empty() {
            progress.step(format!("fetching the source of {name} from {}", self.release));
            let mut download = self.get();
            download.args(["source", "--download-only", "--only-source", name]);
            self.download(&mut download, &missing, &self.sources)?;
        }
        progress.step(format!("unpacking the source of {name}"));
        let mut command = Command::new("dpkg-source");
        command.args(["--no-check", "--no-copy", "--extract"]).arg(self.sources.join(dsc)).arg(into);
        tool::run(&mut command, "dpkg-dev").map(drop)
    }

    /// Downloads the original archive of a source package and unpacks it, without the distribution's patches, into a
    /// new directory.
    pub fn unpack_original(&self, name: &str, into: &Path, progress: &mut Progress) -> Result<()> {
        /// apt's program that downloads a file and compares its hash.
        const HELPER: &str = "/usr/lib/apt/apt-helper";
        let mut files = self.resolve_source(name)?;
        files.retain(|file| file.file.contains(".orig.tar."));
        let [archive] = &files[..] else {
            let what = format!("original source of {name}");
            return Err(Error::NotInPackages { suite: self.release.suite.name(), what });
        };
        if !missing(&files, &self.sources, progress).is_empty() {
            progress.step(format!("fetching the source of {name} from {}", self.release));
            let mut download = Command::new(HELPER);
            download.env("APT_CONFIG", self.config()).env("LC_ALL", "C");
            download.args(["download-file", &archive.uri, &archive.file, &archive.hash()]);
            self.download(&mut download, &[archive], &self.sources)?;
        }
        progress.step(format!("unpacking the source of {name}"));
        fs::create_dir_all(into).map_err(Error::io("create", into))?;
        let mut command = Command::new("tar");
        command.args(["--extract", "--no-same-owner", "--strip-components=1", "--directory"]).arg(into);
        tool::run(command.arg("--file").arg(self.sources.join(&archive.file)), "tar").map(drop)
    }

    /// Returns the file with the description of a source package.
    fn description<'a>(&self, files: &'a [Package], name: &str) -> Result<&'a Package> {
        let is_description = |path: &Path| path.extension().is_some_and(|extension| extension == "dsc");
        files.iter().find(|file| is_description(Path::new(&file.file))).ok_or_else(|| Error::NotInPackages {
            suite: self.release.suite.name(),
            what: format!("source of {name}"),
        })
    }

    /// Runs a command of apt that downloads these files, and moves them into a directory of the cache.
    fn download(&self, command: &mut Command, files: &[&Package], into: &Path) -> Result<()> {
        let workplace = Workplace::new()?;
        let arriving = workplace.downloads(&self.config())?;
        tool::run(command.current_dir(&arriving), "apt")?;
        files.iter().try_for_each(|file| file.take(&arriving, into))
    }

    fn config(&self) -> PathBuf {
        self.directory.join("apt.conf")
    }

    fn get(&self) -> Command {
        let mut command = Command::new("apt-get");
        command.env("APT_CONFIG", self.config()).env("LC_ALL", "C");
        command
    }
}

/// Returns apt's directory for a release in the cache.
fn folder_of(release: Release) -> String {
    format!("apt/{}", release.label())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))
}

/// Returns the files that have to be downloaded, because they are not in the directory, or are not those that the
/// signed index names.
fn missing<'a>(files: &'a [Package], folder: &Path, progress: &mut Progress) -> Vec<&'a Package> {
    let missing: Vec<&Package> = files.iter().filter(|file| !file.is_in(folder)).collect();
    for file in missing.iter().map(|file| &file.file).filter(|file| folder.join(file).exists()) {
        progress
            .remark(&format!("{file} in the cache is not what the signed index names: fetching it again"));
    }
    missing
}
