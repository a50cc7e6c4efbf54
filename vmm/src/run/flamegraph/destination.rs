//! Destination of a picture: a file, or a stream.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{self, Path, PathBuf};

use tempfile::NamedTempFile;

use crate::host::signals;
use crate::host::terminal::standard_stream;

/// The mode of a new file.
const MODE: u32 = 0o644;
/// The mode of a file that its owner alone may read.
const PRIVATE: u32 = 0o600;

/// A destination that can be written to.
#[derive(Debug)]
pub enum Destination {
    /// A file, which is replaced by the whole picture at once, or not at all.
    File(PathBuf),
    /// A device, a pipe or one of our standard streams, which is written to as it is.
    Stream(File),
}

impl Destination {
    /// Checks that a path can be written to, and leaves nothing there.
    pub fn new(path: &Path) -> io::Result<Self> {
        let path = match path.metadata() {
            Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(metadata) => {
                if let Some(stream) = ours(&metadata) {
                    return Ok(Self::Stream(stream));
                }
                let file = File::options().write(true).open(path)?;
                if !metadata.is_file() {
                    return Ok(Self::Stream(file));
                }
                path.canonicalize()?
            }
            // Absolute, as the sandbox forbids asking for the current directory at the end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => path::absolute(followed(path))?,
            Err(error) => return Err(error),
        };
        tempfile::tempfile_in(folder(&path))?;
        Ok(Self::File(path))
    }

    /// Returns the directory that is written to, if the picture becomes a file.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(folder(path)),
            Self::Stream(_) => None,
        }
    }

    /// Writes the picture, which `draw` produces. A file that is `private` can be read by its owner only.
    pub fn write(self, private: bool, draw: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        match self {
            Self::File(path) => {
                // None ends this process while there is a temporary file.
                signals::while_events_wait(|| replace(&path, private, draw))?
            }
            Self::Stream(file) => buffered(&file, draw),
        }
    }
}

/// Returns our standard stream with this inode, if there is one: the picture must not replace what the command wrote
/// there.
fn ours(metadata: &Metadata) -> Option<File> {
    let streams = [standard_stream(&io::stdout()), standard_stream(&io::stderr())];
    streams.into_iter().flatten().find(|stream| {
        stream.metadata().is_ok_and(|of| (of.dev(), of.ino()) == (metadata.dev(), metadata.ino()))
    })
}

/// Follows symbolic links that lead to no file yet.
fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    while let Ok(target) = fs::read_link(&path) {
        path = folder(&path).join(target);
    }
    path
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn replace(
    path: &Path,
    private: bool,
    draw: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let kept = path.metadata().map_or(Permissions::from_mode(MODE), |old| old.permissions());

    // In the same directory, so that it can be renamed.
    let file: NamedTempFile = tempfile::Builder::new()
        .prefix(".tally-")
        .permissions(if private { Permissions::from_mode(PRIVATE) } else { kept })
        .tempfile_in(folder(path))?;
    buffered(file.as_file(), draw)?;
    file.persist(path)?;
    Ok(())
}

fn buffered(file: &File, draw: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut writer = BufWriter::new(file);
    draw(&mut writer)?;
    writer.flush()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: &Path) {
        Destination::new(path).unwrap().write(false, |to| to.write_all(b"picture")).unwrap();
    }

    #[test]
    fn a_device_stays_a_device() {
        write(Path::new("/dev/null"));
        assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
    }

    #[test]
    fn a_link_is_followed_to_a_file_that_is_there_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, other] = ["file", "link", "other"].map(|name| folder.path().join(name));
        symlink("other", &link).unwrap();
        symlink("link", &file).unwrap();
        for _ in 0..2 {
            write(&file);
            assert!(file.is_symlink() && link.is_symlink() && !other.is_symlink());
            assert_eq!(fs::read(&other).unwrap(), b"picture");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_picture_replaces_another_one_and_has_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.svg");
        fs::write(&path, "an older and longer picture").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        write(&path);
        assert_eq!(fs::read(&path).unwrap(), b"picture");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o640);
        Destination::new(&path).unwrap().write(true, |to| to.write_all(b"private")).unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), path.metadata().unwrap().mode() & 0o777),
            (b"private".to_vec(), PRIVATE)
        );
    }

    #[test]
    fn a_pipe_gets_the_picture() {
        let (reader, writer) = io::pipe().unwrap();
        write(Path::new(&format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writer))));
        drop(writer);
        assert_eq!(io::read_to_string(reader).unwrap(), "picture");
    }

    #[test]
    fn a_failed_drawing_leaves_the_old_picture_and_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.svg");
        for old in [None, Some("old")] {
            if let Some(old) = old {
                fs::write(&path, old).unwrap();
            }
            let destination = Destination::new(&path).unwrap();
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(old.is_some()));
            destination.write(false, |_| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), old);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(old.is_some()));
        }
    }

    #[test]
    fn a_destination_that_cannot_be_written_to_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let circle = folder.path().join("circle");
        symlink("circle", &circle).unwrap();
        for path in [Path::new("/no/such/folder/x.svg"), Path::new("/"), &circle] {
            assert!(Destination::new(path).is_err(), "{}", path.display());
        }
    }
}
