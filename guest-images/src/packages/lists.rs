//! The package lists of a release and of its security updates: signed indexes and the lists that these name, as they
//! were fetched, in the cache.

use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use archive_keys::{Keys, Refusal};
use tempfile::NamedTempFile;

use super::download::Downloads;
use super::listed::Listed;
use super::release_file::ReleaseFile;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::http::Failure;
use crate::progress::Progress;
use crate::release::Release;
use crate::sources::{Archive, Expiry};
use crate::{date, decompress};

/// File with the addresses of the lists. It is written when they have been updated.
const UPDATED: &str = "updated";
const INDEX: &str = "InRelease";
/// The last index of an archive whose lists could not be had. No older one is used.
const UNUSED: &str = "InRelease.unused";

/// A list of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    Packages,
    Sources,
}

/// A suite of an archive.
struct Part {
    archive: Archive,
    suite: &'static str,
}

/// The lists of a release in the cache.
pub struct Lists {
    release: Release,
    /// The release and its security updates.
    parts: Vec<Part>,
    folder: PathBuf,
    keys: Keys,
}

impl Lists {
    /// Returns the lists of a release by the archives of this machine.
    pub fn of_this_machine(cache: &Cache, release: Release) -> Result<Self> {
        let archive = Archive::of_this_machine();
        let security = archive.security_updates();
        Self::new(cache, release, archive, security, Keys::of_debian())
    }

    /// Returns the lists of a release by these archives, which are signed by these keys or by their own.
    pub(super) fn new(
        cache: &Cache,
        release: Release,
        main: Archive,
        security: Option<Archive>,
        keys: Keys,
    ) -> Result<Self> {
        let mut parts = vec![Part { archive: main, suite: release.suite.name() }];
        if let Some((suite, archive)) = release.suite.security().zip(security) {
            parts.push(Part { archive, suite });
        }
        Ok(Self { release, parts, folder: cache.folder(&format!("indexes/{}", release.label()))?, keys })
    }

    pub fn release(&self) -> Release {
        self.release
    }

    /// Returns the time at which the lists were fetched from these archives.
    pub fn updated(&self) -> Option<SystemTime> {
        let stamp = self.folder.join(UPDATED);
        let is_of_these = fs::read_to_string(&stamp).is_ok_and(|text| text == self.stamp());
        fs::metadata(stamp).and_then(|file| file.modified()).ok().filter(|_| is_of_these)
    }

    /// Returns the content of [`UPDATED`].
    fn stamp(&self) -> String {
        let lines: Vec<String> =
            self.parts.iter().map(|part| format!("{} {}", part.archive.uri, part.suite)).collect();
        lines.join("\n")
    }

    /// Fetches the indexes and the lists of packages.
    pub fn update(&self, downloads: &Downloads, progress: &mut Progress) -> Result<()> {
        progress.step(format!("fetching the package lists of {}", self.release));
        let stamp = self.folder.join(UPDATED);
        // If the update fails, the lists are of no known archive.
        let _ = fs::remove_file(&stamp);
        for part in &self.parts {
            self.update_index(part, downloads, progress)
                .or_else(|error| self.go_on_without(part, error, progress))?;
        }
        if let (Some(wanted), 1) = (self.release.suite.security(), self.parts.len()) {
            progress.remark(&format!(
                "going on without {wanted}: neither this machine's package sources nor the mirror's address say where it is"
            ));
        }
        self.fetch(List::Packages, downloads, progress)?;
        write(&stamp, self.stamp().as_bytes())
    }

    /// Fetches an index, and puts it in the place of the one that is here if it is signed and not older.
    fn update_index(&self, part: &Part, downloads: &Downloads, progress: &mut Progress) -> Result<()> {
        let uri = format!("{}/{INDEX}", part.uri());
        let text = self.verified(part, &uri, downloads.text(&uri)?)?;
        let wrong = |what: String| Error::Index { uri: uri.clone(), what };
        let index = ReleaseFile::parse(&text).ok_or_else(|| wrong("is not an index of packages".into()))?;
        if index.codename != part.suite {
            return Err(wrong(format!("is that of {}, not of {}", index.codename, part.suite)));
        }
        match index.valid_until.filter(|until| *until <= SystemTime::now()) {
            Some(until) if part.archive.expiry == Expiry::Refused => {
                return Err(wrong(format!("was valid until {} only", date::day(until))));
            }
            Some(until) => progress.remark(&format!(
                "{uri} was valid until {} only, which this machine's apt is told to accept",
                date::day(until)
            )),
            None => {}
        }
        let folder = self.folder.join(part.suite);
        let dates = [INDEX, UNUSED].into_iter().filter_map(|name| Some(self.stored(part, name)?.date));
        if let Some(here) = dates.max().filter(|here| *here > index.date) {
            let (of, here) = (date::day(index.date), date::day(here));
            let what = format!("is of {of}, older than the one of {here} in {}", folder.display());
            return Err(wrong(what));
        }
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        write(&folder.join(INDEX), text.as_bytes())
    }

    /// Returns the text of an index if one of the keys has signed it.
    fn verified(&self, part: &Part, uri: &str, signed: Vec<u8>) -> Result<String> {
        let mut keys = self.keys.clone();
        for file in part.archive.keyrings() {
            keys = keys.with_file(file);
        }
        let not_signed = |reason: String| Error::NotSigned { uri: uri.to_owned(), reason };
        let no_signature = || {
            not_signed("it is not a signed text. A proxy may have answered in place of the mirror".to_owned())
        };
        let signed = String::from_utf8(signed).map_err(|_| no_signature())?;
        keys.verify(&signed, SystemTime::now()).map_err(|refusal| match refusal {
            Refusal::NotSigned => no_signature(),
            Refusal::Signature(reason) => not_signed(reason),
        })
    }

    /// Returns the index that is here.
    fn index(&self, part: &Part) -> Option<ReleaseFile> {
        self.stored(part, INDEX)
    }

    fn stored(&self, part: &Part, name: &str) -> Option<ReleaseFile> {
        ReleaseFile::parse(&fs::read_to_string(self.folder.join(part.suite).join(name)).ok()?)
    }

    /// Fetches the lists of a kind that the indexes name, unless they are here.
    pub fn fetch(&self, list: List, downloads: &Downloads, progress: &mut Progress) -> Result<()> {
        for (part, index) in self.indexes() {
            let outcome = self.fetch_list(list, part, &index, downloads, progress);
            outcome.or_else(|error| self.go_on_without(part, error, progress))?;
        }
        Ok(())
    }

    fn fetch_list(
        &self,
        list: List,
        part: &Part,
        index: &ReleaseFile,
        downloads: &Downloads,
        progress: &mut Progress,
    ) -> Result<()> {
        let path = self.path(part, list);
        let name = format!("{}.xz", list.path(self.release));
        let listed = listed(index, &name, part)?;
        if listed.is(&path) {
            return Ok(());
        }
        let mut report = |here| progress.bytes(here, listed.size);
        if index.is_by_hash {
            let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
            let by_hash = format!("{}/{folder}/by-hash/SHA256/{}", part.uri(), listed.hex());
            match downloads.file(&by_hash, listed, &path, &mut report) {
                Err(Error::Download { failure: Failure::NotFound, .. }) => {}
                outcome => return outcome,
            }
        }
        downloads.file(&format!("{}/{name}", part.uri()), listed, &path, &mut report)
    }

    /// Goes on without the security updates, and says so, if the mirror does not have them or is being updated. An
    /// index that cannot be verified is an error.
    fn go_on_without(&self, part: &Part, error: Error, progress: &mut Progress) -> Result<()> {
        let is_missing = match &error {
            Error::Download { failure, .. } => {
                matches!(failure, Failure::NotFound | Failure::OtherSize { .. })
            }
            Error::WrongHash { .. } => true,
            _ => false,
        };
        if !part.is_security() || !is_missing {
            return Err(error);
        }
        let folder = self.folder.join(part.suite);
        match fs::rename(folder.join(INDEX), folder.join(UNUSED)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::io("rename", folder)(error));
            }
            _ => {}
        }
        progress.remark(&format!("going on without {}: {error}", part.suite));
        Ok(())
    }

    /// Returns the lists of a kind as they are here, each with the address of its archive, or `None` if one is missing.
    pub fn read(&self, list: List) -> Result<Option<Vec<(String, &str)>>> {
        let mut texts = Vec::new();
        for (part, index) in self.indexes() {
            let path = self.path(part, list);
            let name = list.path(self.release);
            if !listed(&index, &format!("{name}.xz"), part)?.is(&path) {
                return Ok(None);
            }
            let size = listed(&index, name, part)?.size;
            texts.push((decompressed(&path, size)?, part.archive.uri.as_str()));
        }
        Ok((!texts.is_empty()).then_some(texts))
    }

    fn indexes(&self) -> impl Iterator<Item = (&Part, ReleaseFile)> {
        self.parts.iter().filter_map(|part| Some((part, self.index(part)?)))
    }

    fn path(&self, part: &Part, list: List) -> PathBuf {
        self.folder.join(part.suite).join(match list {
            List::Packages => "Packages.xz",
            List::Sources => "Sources.xz",
        })
    }
}

impl Part {
    /// Returns the address of the suite.
    fn uri(&self) -> String {
        format!("{}/dists/{}", self.archive.uri, self.suite)
    }

    fn is_security(&self) -> bool {
        self.suite.ends_with("-security")
    }
}

impl List {
    /// Returns the path in a suite of the list, which is there only compressed.
    fn path(self, release: Release) -> &'static str {
        match (self, release.arch.in_packages()) {
            (Self::Sources, _) => "main/source/Sources",
            (Self::Packages, "riscv64") => "main/binary-riscv64/Packages",
            (Self::Packages, _) => "main/binary-amd64/Packages",
        }
    }
}

fn listed(index: &ReleaseFile, name: &str, part: &Part) -> Result<Listed> {
    index.file(name).ok_or_else(|| Error::Index {
        uri: format!("{}/{INDEX}", part.uri()),
        what: format!("has no {name}"),
    })
}

/// Returns the text of a compressed list, which is no longer than its index says.
fn decompressed(path: &Path, size: u64) -> Result<String> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let name = path.to_string_lossy();
    let mut text = String::new();
    decompress::reader(&name, BufReader::new(file))
        .take(size)
        .read_to_string(&mut text)
        .map_err(Error::io("decompress", path))?;
    Ok(text)
}

/// Writes a file at once.
fn write(path: &Path, content: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    let file = NamedTempFile::new_in(folder).map_err(Error::io("create a file in", folder))?;
    fs::write(file.path(), content).map_err(Error::io("write", path))?;
    file.persist(path).map(drop).map_err(|refused| Error::io("create", path)(refused.error))
}
