//! Fetches package lists: those of a release, and beside them those of its security updates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::configuration::stanza;
use super::workplace::{Workplace, copy_files};
use super::{Apt, UPDATED, write};
use crate::cache::remove_folder;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::release::Release;
use crate::sources::Archive;
use crate::tool;

/// Archives of a release.
pub(super) struct Archives {
    main: Archive,
    /// The security updates, with the name of their suite.
    security: Option<(Archive, &'static str)>,
}

impl Archives {
    pub fn of(release: Release) -> Result<Self> {
        let main = Archive::of_this_machine()?;
        let security = release.suite.security().and_then(|suite| Some((main.security_updates()?, suite)));
        Ok(Self { main, security })
    }

    /// Returns the content of [`UPDATED`].
    pub fn stamp(&self, release: Release) -> String {
        let security = self.security.as_ref().map(|(archive, suite)| stanza(archive, suite));
        format!("{}\n{}", stanza(&self.main, release.suite.name()), security.unwrap_or_default())
    }
}

impl Apt {
    /// Fetches the package lists.
    pub(super) fn update(&self, archives: &Archives, progress: &mut Progress) -> Result<()> {
        progress.step(format!("fetching the package lists of {}", self.release));
        let (stamp, lists) = (self.directory.join(UPDATED), self.directory.join("lists"));
        let workplace = Workplace::new()?;
        let fetched = workplace.lists(&lists)?;
        // If the update fails, the lists are of no known archive.
        let _ = fs::remove_file(&stamp);
        self.fetch_lists(&archives.main, &fetched).map_err(|error| not_signed(error, &archives.main))?;
        self.fetch_security(archives, &fetched, progress)?;
        remove_folder(&lists)?;
        copy_files(&fetched, &self.folder("lists")?)?;
        write(&stamp, &archives.stamp(self.release))
    }

    /// Fetches the lists of the main archive. While a mirror is being updated, its lists may not be those that its
    /// signed release file names. Under the release's other name, the mirror may still have lists and a release file
    /// that fit.
    fn fetch_lists(&self, archive: &Archive, lists: &Path) -> Result<()> {
        let (sources, security) = (self.sources_file("tally"), self.sources_file("security"));
        let _ = fs::remove_file(security);
        let fetch = |suite: &str| {
            write(&sources, &stanza(archive, suite))?;
            tool::run(&mut self.update_command(lists), "apt").map(drop)
        };
        let (name, alias) = (self.release.suite.name(), self.release.suite.alias());
        let Err(error) = fetch(name) else { return Ok(()) };
        let is_same = |path: &Path| fs::read_to_string(path).is_ok_and(|text| has_codename(&text, name));
        let release_file = format!("_dists_{alias}_InRelease");
        if fetch(alias).is_ok() && find(lists, &release_file).is_some_and(|path| is_same(&path)) {
            return Ok(());
        }
        Err(error)
    }

    /// Fetches the lists of the security updates beside those of the main archive. Without them, a line says so.
    fn fetch_security(&self, archives: &Archives, lists: &Path, progress: &mut Progress) -> Result<()> {
        let Some(wanted) = self.release.suite.security() else { return Ok(()) };
        let Some((archive, suite)) = &archives.security else {
            progress.remark(&format!(
                "going on without {wanted}: neither this machine's package sources nor the mirror's address say where it is"
            ));
            return Ok(());
        };
        let sources = self.sources_file("security");
        write(&sources, &stanza(archive, suite))?;
        let mut update = self.update_command(lists);
        update.arg("-o").arg(format!("Dir::Etc::sourcelist={}", sources.display()));
        update.args(["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Get::List-Cleanup=false"]);
        if let Err(error) = tool::run(&mut update, "apt") {
            fs::remove_file(&sources).map_err(Error::io("remove", &sources))?;
            progress.remark(&format!("going on without {wanted}: {}", reason(&error)));
        }
        Ok(())
    }

    fn update_command(&self, lists: &Path) -> Command {
        let mut command = self.get();
        command
            .args(["update", "--error-on=any", "-o"])
            .arg(format!("Dir::State::lists={}", lists.display()));
        command
    }

    fn sources_file(&self, name: &str) -> PathBuf {
        self.directory.join(format!("sources.d/{name}.sources"))
    }
}

/// Returns an error of its own if apt has refused the archive's signature.
fn not_signed(error: Error, archive: &Archive) -> Error {
    let refused = match &error {
        Error::Command { tail, .. } => tail.contains("is not signed") || tail.contains("GPG error"),
        _ => false,
    };
    if refused { Error::NotSigned { uri: archive.uri.clone(), reason: reason(&error) } } else { error }
}

/// Returns apt's own reason for a failure, which is the first of its errors.
fn reason(error: &Error) -> String {
    let said = match error {
        Error::Command { tail, .. } => tail.split("; ").find_map(|line| line.strip_prefix("E: ")),
        _ => None,
    };
    said.map_or_else(|| error.to_string(), str::to_owned)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Cache, folder_of_ours};
    use std::os::unix::fs::PermissionsExt;
    use tempfile::TempDir;

    /// Returns an archive in a directory, with the release file of a suite but without a signature.
    fn unsigned_archive(suite: &str) -> (TempDir, Archive) {
        let folder = tempfile::tempdir().unwrap();
        // apt's own user reads it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let dists = folder.path().join("dists").join(suite);
        fs::create_dir_all(&dists).unwrap();
        fs::write(dists.join("Release"), format!("Codename: {suite}\nDate: Sat, 11 Jul 2026 10:16:37 UTC\n"))
            .unwrap();
        let archive = Archive { uri: format!("file:{}", folder.path().display()), signed_by: None };
        (folder, archive)
    }

    fn apt_in(folder: &TempDir) -> Apt {
        let cache = Cache::at(folder.path()).unwrap();
        Apt::configure(&cache, Release::default(), &mut Progress::silent()).unwrap()
    }

    #[test]
    fn an_archive_without_a_signature_is_refused() {
        let folder = folder_of_ours();
        let apt = apt_in(&folder);
        let (_files, main) = unsigned_archive(apt.release.suite.name());
        let uri = main.uri.clone();
        let said = apt.update(&Archives { main, security: None }, &mut Progress::silent()).unwrap_err();
        assert!(matches!(&said, Error::NotSigned { uri: named, .. } if *named == uri), "{said}");
        assert!(!apt.directory.join(UPDATED).exists());
    }

    #[test]
    fn a_mirror_without_security_updates_is_used_without_them() {
        let (folder, lists) = (folder_of_ours(), Workplace::new().unwrap());
        let apt = apt_in(&folder);
        let (_files, archive) = unsigned_archive("other");
        let suite = apt.release.suite.security().unwrap();
        let archives = Archives { main: archive.clone(), security: Some((archive, suite)) };
        let lists = lists.lists(&apt.directory.join("lists")).unwrap();
        apt.fetch_security(&archives, &lists, &mut Progress::silent()).unwrap();
        assert!(!apt.sources_file("security").exists(), "apt would miss the lists");
    }

    #[test]
    fn lists_from_before_there_were_security_updates_are_fetched_again() {
        let archive = Archive { uri: "http://mirror.example/debian".into(), signed_by: None };
        let release = Release::default();
        let security = archive.security_updates().zip(release.suite.security());
        let stamp = |security| Archives { main: archive.clone(), security }.stamp(release);
        assert_ne!(stamp(security), stamp(None));
    }

    fn failure(tail: &str) -> Error {
        Error::Command {
            command: "apt-get update".into(),
            status: "exit status: 100".into(),
            tail: tail.into(),
        }
    }

    #[test]
    fn a_release_file_names_its_release() {
        let text = "Origin: Debian\nSuite: stable\nVersion: 13.7\nCodename: trixie\n";
        assert!(has_codename(text, "trixie") && !has_codename(text, "stable") && !has_codename(text, "trix"));
    }

    #[test]
    fn a_mirror_that_cannot_be_verified_is_named_with_apts_reason() {
        let archive = Archive { uri: "http://mirror.example/debian".into(), signed_by: None };
        let refusal = "The repository 'http://mirror.example/debian bookworm InRelease' is not signed.";
        let said = not_signed(failure(&format!("W: GPG error: ...; E: {refusal}; N: See ...")), &archive);
        assert!(said.to_string().starts_with("the signature of http://mirror.example/debian"), "{said}");
        assert!(said.to_string().contains(refusal) && !said.to_string().contains("N: "), "{said}");
        let other = not_signed(failure("E: Failed to fetch http://mirror.example: 404"), &archive);
        assert!(matches!(other, Error::Command { .. }));
    }
}
