//! Downloads and unpacks Debian packages without installing them.
//!
//! This uses apt with a separate configuration and state in the cache. The machine's sources, package lists and
//! installed packages are neither changed nor used, except for the address of the mirror and the network settings.
//! Signatures are checked as usual. No privileges are needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cache::{Cache, Guard};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::release::Release;
use crate::sources::Archive;
use crate::tool;

/// Package lists older than this are updated before they are used.
const MAX_AGE_OF_LISTS: Duration = Duration::from_hours(1);

/// A package in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// The package's name.
    pub name: String,
    /// The name of the `.deb` file.
    pub file: String,
    size: u64,
}

impl Package {
    /// Parses a line of `apt-get --print-uris`: `'URI' FILE SIZE HASH`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().skip(1);
        let file = words.next()?.to_owned();
        let size = words.next()?.parse().ok()?;
        Some(Self { name: file.split('_').next()?.to_owned(), file, size })
    }

    /// Returns true if the package contains shared libraries. Packages with a library's data or an interpreter's
    /// modules are excluded, because a program that is only linked with the library does not need them.
    pub fn is_library(&self) -> bool {
        const RUNTIME_DATA: [&str; 4] = ["-common", "-data", "-stdlib", "-minimal"];
        (self.name.starts_with("lib") || self.name.starts_with("zlib"))
            && !RUNTIME_DATA.iter().any(|suffix| self.name.ends_with(suffix))
    }
}

/// apt for one release. Holds a lock, so that other processes wait.
pub struct Apt {
    release: Release,
    config: PathBuf,
    debs: PathBuf,
    sources: PathBuf,
    _guard: Guard,
}

impl Apt {
    /// Configures apt for one release and updates its package lists.
    pub fn open(cache: &Cache, release: impl Into<Release>, progress: &mut Progress) -> Result<Self> {
        let release = release.into();
        let label = release.label();
        let guard = cache.lock(&format!("apt-{label}"), progress)?;
        let directory = cache.folder(&format!("apt/{label}"))?;
        for sub in ["lists/partial", "cache/archives/partial", "state", "sources.d"] {
            cache.folder(&format!("apt/{label}/{sub}"))?;
        }
        let apt = Self {
            release,
            config: directory.join("apt.conf"),
            debs: cache.folder("downloads")?,
            sources: cache.folder("downloads/source")?,
            _guard: guard,
        };
        let write = |name: &str, text: String| {
            fs::write(directory.join(name), text).map_err(Error::io("write", directory.join(name)))
        };
        let archive = Archive::of_this_machine()?;
        let wanted = stanza(&archive, release.suite.name());
        let stamp = directory.join("updated");
        let is_recent = fs::metadata(&stamp)
            .and_then(|file| file.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age < MAX_AGE_OF_LISTS));
        write("apt.conf", configuration(&directory, release)?)?;
        write("empty", String::new())?;
        if !is_recent || fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
            progress.step(format!("fetching the package lists of {release}"));
            // If the update fails, the lists are of no known archive.
            let _ = fs::remove_file(&stamp);
            apt.update(&archive, &directory)?;
            write("updated", wanted)?;
        }
        Ok(apt)
    }

    /// Fetches the package lists. While a mirror is being updated, its lists may not be those that its signed release
    /// file names. Under the release's other name, the mirror may still have lists and a release file that fit.
    fn update(&self, archive: &Archive, directory: &Path) -> Result<()> {
        let sources = directory.join("sources.d/tally.sources");
        let fetch = |suite: &str| {
            fs::write(&sources, stanza(archive, suite)).map_err(Error::io("write", &sources))?;
            tool::run(self.get().args(["update", "--error-on=any"]), "apt").map(drop)
        };
        let (name, alias) = (self.release.suite.name(), self.release.suite.alias());
        let Err(error) = fetch(name) else { return Ok(()) };
        let is_same = |path: &Path| fs::read_to_string(path).is_ok_and(|text| has_codename(&text, name));
        let release_file = format!("_dists_{alias}_InRelease");
        if fetch(alias).is_ok()
            && find(&directory.join("lists"), &release_file).is_some_and(|path| is_same(&path))
        {
            return Ok(());
        }
        Err(error)
    }

    /// Returns the packages with these names and all their dependencies.
    pub fn resolve(&self, names: &[&str]) -> Result<Vec<Package>> {
        let mut command = self.get();
        command.args(["install", "--quiet=2", "--no-install-recommends", "--print-uris"]).args(names);
        Ok(tool::run(&mut command, "apt")?.lines().filter_map(Package::parse).collect())
    }

    /// Downloads packages, unless that has been done before, and unpacks them into one directory.
    pub fn unpack(&self, packages: &[Package], into: &Path, progress: &mut Progress) -> Result<()> {
        let missing: Vec<&Package> = packages.iter().filter(|package| !self.has(package)).collect();
        if !missing.is_empty() {
            let bytes: u64 = missing.iter().map(|package| package.size).sum();
            progress.step(format!(
                "fetching {} packages of {} ({} MB)",
                missing.len(),
                self.release,
                bytes / 1_000_000
            ));
            let names = missing.iter().map(|package| format!("{}/{}", package.name, self.release.suite));
            // Downloads into a separate directory, so that a partial download is never used as a package.
            let arriving = self.debs.join("arriving");
            fs::create_dir_all(&arriving).map_err(Error::io("create", &arriving))?;
            tool::run(self.get().arg("download").args(names).current_dir(&arriving), "apt")?;
            for package in missing {
                let (from, to) = (arriving.join(&package.file), self.debs.join(&package.file));
                fs::rename(&from, &to).map_err(Error::io("find", &from))?;
            }
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
        progress.step(format!("fetching the source of {name} from {}", self.release));
        tool::run(
            self.get().args(["source", "--download-only", "--only-source", name]).current_dir(&self.sources),
            "apt",
        )?;
        let listed =
            tool::run(self.get().args(["source", "--print-uris", "--only-source", "-qq", name]), "apt")?;
        let dsc = listed
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1))
            .find(|file| Path::new(file).extension().is_some_and(|extension| extension == "dsc"))
            .ok_or_else(|| Error::NotInPackages {
                suite: self.release.suite.name(),
                what: format!("source of {name}"),
            })?;
        progress.step(format!("unpacking the source of {name}"));
        let mut command = Command::new("dpkg-source");
        command.args(["--no-check", "--no-copy", "--extract"]).arg(self.sources.join(dsc)).arg(into);
        tool::run(&mut command, "dpkg-dev").map(drop)
    }

    fn has(&self, package: &Package) -> bool {
        fs::metadata(self.debs.join(&package.file)).is_ok_and(|file| file.len() == package.size)
    }

    fn get(&self) -> Command {
        let mut command = Command::new("apt-get");
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C");
        command
    }
}

/// Returns whether a release file is that of the release with this name.
fn has_codename(release_file: &str, name: &str) -> bool {
    release_file
        .lines()
        .any(|line| line.strip_prefix("Codename:").is_some_and(|codename| codename.trim() == name))
}

/// Returns the path of the file in a directory whose name ends like this.
fn find(directory: &Path, end: &str) -> Option<PathBuf> {
    let paths = fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    paths.into_iter().find(|path| path.to_string_lossy().ends_with(end))
}

/// Returns the content of a `.sources` file for the binary and source packages of a release.
fn stanza(archive: &Archive, suite: &str) -> String {
    let signed_by = archive.signed_by.as_ref().map(|keys| format!("Signed-By: {keys}\n")).unwrap_or_default();
    let uri = &archive.uri;
    format!("Types: deb deb-src\nURIs: {uri}\nSuites: {suite}\nComponents: main\n{signed_by}")
}

/// Returns an apt configuration that keeps everything in `directory`. It takes over only the machine's network
/// settings.
fn configuration(directory: &Path, release: Release) -> Result<String> {
    let (directory, arch) = (directory.display(), release.arch.in_packages());
    let machine = tool::run(Command::new("apt-config").args(["dump", "Acquire"]), "apt")?;
    let network: String = machine
        .lines()
        .filter(|line| !line.starts_with("Acquire::IndexTargets") && !line.starts_with("Acquire::Languages"))
        .flat_map(|line| [line, "\n"])
        .collect();
    Ok(format!(
        "Dir::Etc::main \"/dev/null\";\nDir::Etc::parts \"/dev/null\";\nDir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\nDir::Etc::sourcelist \"/dev/null\";\n\
         Dir::Etc::sourceparts \"{directory}/sources.d\";\nDir::State \"{directory}/state\";\n\
         Dir::State::lists \"{directory}/lists\";\nDir::State::status \"{directory}/empty\";\n\
         Dir::Cache \"{directory}/cache\";\n\
         APT::Architecture \"{arch}\";\nAPT::Architectures {{ \"{arch}\"; }};\nAPT::Sandbox::User \"root\";\n\
         APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n{network}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str) -> Package {
        Package { name: name.into(), file: format!("{name}_1_amd64.deb"), size: 1 }
    }

    #[test]
    fn a_release_file_names_its_release() {
        let text = "Origin: Debian\nSuite: stable\nVersion: 13.7\nCodename: trixie\n";
        assert!(has_codename(text, "trixie") && !has_codename(text, "stable") && !has_codename(text, "trix"));
    }

    #[test]
    fn a_line_of_apt_is_parsed() {
        let line = "'http://mirror.example/pool/libc6_2.36_amd64.deb' libc6_2.36_amd64.deb 2759320 SHA256:00";
        let expected = Package { name: "libc6".into(), file: "libc6_2.36_amd64.deb".into(), size: 2_759_320 };
        assert_eq!(Package::parse(line), Some(expected));
    }

    #[test]
    fn libraries_are_distinguished_from_their_data_packages() {
        assert!(package("libpython3.11").is_library() && package("zlib1g").is_library());
        assert!(!package("libpython3.11-stdlib").is_library() && !package("python3").is_library());
    }
}
