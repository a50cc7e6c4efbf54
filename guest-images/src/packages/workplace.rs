//! The directory to which apt downloads. apt's downloads run as the user `_apt` if root starts it, and that user cannot
//! reach root's cache. So they go to a temporary directory, from where this crate copies what it wants.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::{Builder, TempDir};

use crate::error::{Error, Result};
use crate::tool;

/// Downloads may be too large for `/tmp`, which may be in memory.
const PLACE: &str = "/var/tmp";

/// A temporary directory for downloads. It is removed when this is dropped.
pub struct Workplace {
    folder: TempDir,
}

impl Workplace {
    /// Creates the directory, which every user can read.
    pub fn new() -> Result<Self> {
        let builder = || {
            let mut builder = Builder::new();
            builder.prefix("tally-apt-");
            builder
        };
        let folder = builder()
            .tempdir_in(PLACE)
            .or_else(|_| builder().tempdir())
            .map_err(Error::io("create a folder in", PLACE))?;
        let everybody = fs::Permissions::from_mode(0o755);
        fs::set_permissions(folder.path(), everybody).map_err(Error::io("open up", folder.path()))?;
        Ok(Self { folder })
    }

    /// Creates a directory for files, to which the user that apt's configuration names may write. If that is not
    /// possible, apt downloads as the user who started it.
    pub fn downloads(&self, config: &Path) -> Result<PathBuf> {
        let path = self.folder("downloads")?;
        if rustix::process::geteuid().is_root() {
            let mut names = Command::new("apt-config");
            names.args(["dump", "--no-empty", "--format", "%v", "APT::Sandbox::User"]);
            let user = tool::run(names.env("APT_CONFIG", config), "apt")?;
            if let Ok(number) = tool::run(Command::new("id").args(["-u", user.trim()]), "coreutils") {
                chown(&path, number.trim().parse().ok(), None).map_err(Error::io("hand over", &path))?;
            }
        }
        Ok(path)
    }

    /// Creates a directory for package lists, with copies of those that are in `old`.
    pub fn lists(&self, old: &Path) -> Result<PathBuf> {
        let path = self.folder("lists")?;
        copy_files(old, &path)?;
        self.folder("lists/partial")?;
        Ok(path)
    }

    fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(Error::io("open up", &path))?;
        Ok(path)
    }
}

/// Copies the files in a directory, without apt's lock. Directories in it are left out.
pub fn copy_files(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).map_err(Error::io("read", from))? {
        let path = entry.map_err(Error::io("read", from))?.path();
        let Some(name) = path.file_name().filter(|name| *name != "lock" && path.is_file()) else { continue };
        fs::copy(&path, to.join(name)).map_err(Error::io("copy", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn apts_own_user_can_download_to_it() {
        let workplace = Workplace::new().unwrap();
        let config = workplace.folder.path().join("apt.conf");
        fs::write(&config, "APT::Sandbox::User \"nobody\";\n").unwrap();
        let downloads = workplace.downloads(&config).unwrap();
        for folder in downloads.ancestors() {
            assert_eq!(fs::metadata(folder).unwrap().mode() & 0o5, 0o5, "{}", folder.display());
        }
        let user = rustix::process::geteuid().as_raw();
        let expected = if user == 0 { 65534 } else { user };
        assert_eq!(fs::metadata(&downloads).unwrap().uid(), expected);
    }

    #[test]
    fn lists_are_copied_without_apts_lock() {
        let (workplace, old) = (Workplace::new().unwrap(), tempfile::tempdir().unwrap());
        for name in ["InRelease", "lock"] {
            fs::write(old.path().join(name), "").unwrap();
        }
        fs::create_dir(old.path().join("auxfiles")).unwrap();
        let lists = workplace.lists(old.path()).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(lists).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["InRelease", "partial"]);
    }
}
