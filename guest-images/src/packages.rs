//! Downloads and unpacks Debian packages without installing them, on any distribution.
//!
//! The lists of packages are fetched by HTTP from a mirror ([`crate::sources`]), verified by the archive's keys, and
//! kept in the cache. Files are compared with these lists whenever they are used. No program of the machine or of a
//! package is run, and no privileges are needed.

mod deb;
mod download;
mod index;
mod listed;
mod lists;
mod package;
mod release_file;
mod stanza;
mod version;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cache::{Cache, Guard};
use crate::error::{Error, Result};
use crate::http::Client;
use crate::progress::Progress;
use crate::release::Release;
use crate::tool;
use download::Downloads;
use index::{Index, Unmet};
use lists::{List, Lists};
use stanza::Stanza;

pub use archive_keys::expiry as keys_expire;
pub use package::Package;
pub(crate) use version::compare as compare_versions;

/// Package lists older than this are updated before they are used.
const MAX_AGE_OF_LISTS: Duration = Duration::from_hours(1);

/// The packages of one release. Holds a lock, so that other processes wait.
pub struct Repository {
    release: Release,
    lists: Lists,
    downloads: Downloads,
    debs: PathBuf,
    sources: PathBuf,
    _guard: Option<Guard>,
}

impl Repository {
    /// Opens the packages of a release, and updates their lists unless that has been done recently.
    pub fn open(cache: &Cache, release: impl Into<Release>, progress: &mut Progress) -> Result<Self> {
        let repository = Self::locked(cache, release.into(), progress)?;
        let updated = repository.lists.updated();
        if !updated.is_some_and(|at| at.elapsed().is_ok_and(|age| age < MAX_AGE_OF_LISTS)) {
            repository.update(progress)?;
        }
        Ok(repository)
    }

    fn locked(cache: &Cache, release: Release, progress: &mut Progress) -> Result<Self> {
        let guard = cache.lock(&format!("packages-{}", release.label()), progress)?;
        let lists = Lists::of_this_machine(cache, release)?;
        Self::new(cache, lists, Client::from_environment(), Some(guard))
    }

    fn new(cache: &Cache, lists: Lists, client: Client, guard: Option<Guard>) -> Result<Self> {
        Ok(Self {
            release: lists.release(),
            lists,
            downloads: Downloads::new(cache, client)?,
            debs: cache.folder("downloads")?,
            sources: cache.folder("downloads/source")?,
            _guard: guard,
        })
    }

    fn update(&self, progress: &mut Progress) -> Result<()> {
        let outcome = self.lists.update(&self.downloads, progress);
        outcome.map_err(|error| self.without_network(error, "the package lists".into()))
    }

    /// Returns the packages with these names and all their dependencies.
    pub fn resolve(&self, names: &[&str]) -> Result<Vec<Package>> {
        let lists = self.lists.read(List::Packages)?.ok_or(Error::NoLists(self.release.suite.name()))?;
        let index = Index::new(lists.iter().map(|(text, uri)| (text.as_str(), *uri)));
        let suite = self.release.suite.name();
        index.resolve(names).map_err(|unmet| match unmet {
            Unmet::NoPackage(name) => Error::NoPackage { suite, name },
            Unmet::Dependency { package, on } => Error::Unmet { suite, package, on },
        })
    }

    /// Returns the files of the newest version of a source package.
    fn resolve_source(&self, name: &str) -> Result<Vec<Package>> {
        let lists = self.lists.read(List::Sources)?.ok_or(Error::NoLists(self.release.suite.name()))?;
        let stanzas =
            lists.iter().flat_map(|(text, uri)| Stanza::all(text).map(move |stanza| (stanza, *uri)));
        let of_name = stanzas.filter(|(stanza, _)| stanza.field("Package") == Some(name));
        let sources = of_name.filter_map(|(stanza, uri)| Package::parse_source(stanza, uri));
        let sources = sources.filter(|files| !files.is_empty());
        sources.max_by(|one, other| compare_versions(&one[0].version, &other[0].version)).ok_or_else(|| {
            Error::NoPackage { suite: self.release.suite.name(), name: format!("{name} (source)") }
        })
    }

    /// Downloads packages, unless that has been done before, and unpacks them into one directory.
    pub fn unpack(&self, packages: &[Package], into: &Path, progress: &mut Progress) -> Result<()> {
        let missing = missing(packages, &self.debs, progress);
        if !missing.is_empty() {
            progress.step(format!("fetching {} packages of {}", missing.len(), self.release));
            self.download(&missing, &self.debs, progress)?;
        }
        for package in packages {
            progress.detail(&package.name);
            deb::unpack(&self.debs.join(&package.file), into)?;
        }
        Ok(())
    }

    /// Downloads a source package and unpacks it, with the distribution's patches, into a new directory.
    pub fn unpack_source(&self, name: &str, into: &Path, progress: &mut Progress) -> Result<()> {
        let files = self.fetch_source(name, |_| true, progress)?;
        let dsc = files.iter().find(|file| has_extension(file, "dsc")).ok_or_else(|| self.no_source(name))?;
        progress.step(format!("unpacking the source of {name}"));
        let mut command = Command::new("dpkg-source");
        command.args(["--no-check", "--no-copy", "--extract"]).arg(self.sources.join(&dsc.file)).arg(into);
        tool::run(&mut command, "dpkg-dev").map(drop)
    }

    /// Downloads the original archive of a source package and unpacks it, without the distribution's patches, into a
    /// new directory.
    pub fn unpack_original(&self, name: &str, into: &Path, progress: &mut Progress) -> Result<()> {
        let is_original = |file: &Package| file.file.contains(".orig.tar.") && !has_extension(file, "asc");
        let files = self.fetch_source(name, is_original, progress)?;
        let [archive] = &files[..] else { return Err(self.no_source(name)) };
        progress.step(format!("unpacking the source of {name}"));
        fs::create_dir_all(into).map_err(Error::io("create", into))?;
        let mut command = Command::new("tar");
        command.args(["--extract", "--no-same-owner", "--strip-components=1", "--directory"]).arg(into);
        tool::run(command.arg("--file").arg(self.sources.join(&archive.file)), "tar").map(drop)
    }

    /// Downloads the wanted files of a source package, unless that has been done before.
    fn fetch_source(
        &self,
        name: &str,
        is_wanted: impl Fn(&Package) -> bool,
        progress: &mut Progress,
    ) -> Result<Vec<Package>> {
        progress.step(format!("fetching the source of {name} from {}", self.release));
        let lists = self.lists.fetch(List::Sources, &self.downloads, progress);
        lists.map_err(|error| self.without_network(error, "the list of source packages".into()))?;
        let mut files = self.resolve_source(name)?;
        files.retain(is_wanted);
        self.download(&missing(&files, &self.sources, progress), &self.sources, progress)?;
        Ok(files)
    }

    /// Downloads files into a directory of the cache.
    fn download(&self, files: &[&Package], into: &Path, progress: &mut Progress) -> Result<()> {
        let total = files.iter().map(|file| file.listed.size).sum();
        let mut before = 0;
        for file in files {
            let report = &mut |here| progress.bytes(before + here, total);
            let outcome = self.downloads.file(&file.uri, file.listed, &into.join(&file.file), report);
            outcome.map_err(|error| self.without_network(error, format!("the package {}", file.name)))?;
            before += file.listed.size;
        }
        Ok(())
    }

    fn no_source(&self, name: &str) -> Error {
        Error::NotInPackages { suite: self.release.suite.name(), what: format!("original source of {name}") }
    }

    /// Says what is missing, and how to do without it, if there is no network.
    fn without_network(&self, error: Error, what: String) -> Error {
        match error {
            Error::Download { uri, failure } if failure.is_of_network() => {
                Error::NoNetwork { what, suite: self.release.suite.name(), uri, failure }
            }
            error => error,
        }
    }
}

fn has_extension(file: &Package, extension: &str) -> bool {
    Path::new(&file.file).extension().is_some_and(|other| other == extension)
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

pub(crate) mod untrusted {
    pub use super::deb::unpack;
    pub use super::index::Index;
    pub use super::release_file::ReleaseFile;
}

#[cfg(test)]
mod tests;
