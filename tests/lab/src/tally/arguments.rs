//! A command line of this machine's as it is to be on the simulated host, and what has to go there with it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use tally_lab::{Error, Result};

/// What the value of an option of `tally run` names.
#[derive(Clone, Copy)]
enum Names {
    /// Files that it reads.
    Files,
    /// A disk's image.
    Disk,
    /// A folder.
    Share,
    /// A file that it makes.
    Made,
}

const OPTIONS: [(&str, Names); 7] = [
    ("--kernel", Names::Files),
    ("--initrd", Names::Files),
    ("--pmu-policy", Names::Files),
    ("--disk", Names::Disk),
    ("--share", Names::Share),
    ("--flamegraph", Names::Made),
    ("--pmu-log", Names::Made),
];

/// What a guest may do with a folder or a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// A folder that is at the same place there.
#[derive(Debug, PartialEq, Eq)]
pub struct Share {
    pub path: PathBuf,
    pub access: Access,
}

/// A file here, and where it is there.
#[derive(Debug, PartialEq, Eq)]
pub struct Twin {
    pub here: PathBuf,
    pub there: String,
}

/// The command line, and what goes with it.
#[derive(Debug, Default)]
pub struct Localised {
    pub arguments: Vec<OsString>,
    /// Files that only go there.
    pub files: Vec<Twin>,
    /// Files that go there and come back.
    pub disks: Vec<Twin>,
    pub shares: Vec<Share>,
    /// Files that only come back.
    pub made: Vec<Twin>,
}

impl Localised {
    /// Of the arguments that `tally run` is given.
    pub fn new(arguments: Vec<OsString>) -> Result<Self> {
        let mut localised = Self::default();
        // `--` in front of a command is for the program that reads it first, which was this one.
        if arguments.first().is_some_and(|first| !first.as_bytes().starts_with(b"-")) {
            localised.arguments.push("--".into());
        }
        let mut rest = arguments.into_iter();
        while let Some(argument) = rest.next() {
            if argument == "--" {
                localised.arguments.push(argument);
                localised.arguments.extend(rest);
                break;
            }
            let (name, value) = split(&argument);
            let Some(&(option, names)) = OPTIONS.iter().find(|(option, _)| name == option.as_bytes()) else {
                localised.arguments.push(argument);
                continue;
            };
            let joined = value.is_some();
            let Some(value) = value.map(OsStr::to_owned).or_else(|| rest.next()) else {
                localised.arguments.push(argument);
                continue;
            };
            let value = match names {
                Names::Files => localised.files(&value),
                Names::Disk => localised.disk(&value)?,
                Names::Share => localised.share(&value)?,
                Names::Made => localised.made(option, value)?,
            };
            if joined {
                let mut argument = OsString::from(format!("{option}="));
                argument.push(value);
                localised.arguments.push(argument);
            } else {
                localised.arguments.extend([argument, value]);
            }
        }
        Ok(localised)
    }

    /// A name there for a file from here.
    fn name(&self, path: &Path) -> String {
        let base = path.file_name().unwrap_or_default().to_string_lossy();
        format!("given/{}/{base}", self.files.len() + self.disks.len())
    }

    /// A value may be a list of files with arguments. What is no file here stays as it is, for `tally` to complain about.
    fn files(&mut self, value: &OsStr) -> OsString {
        let items = value.as_bytes().split(|&byte| byte == b',').map(|item| {
            let is_file = |end: &usize| Path::new(OsStr::from_bytes(&item[..*end])).is_file();
            let ends = item.iter().enumerate().filter(|(_, byte)| **byte == b' ').map(|(at, _)| at);
            let Some(end) = std::iter::once(item.len()).chain(ends).find(is_file) else {
                return item.to_vec();
            };
            let here = PathBuf::from(OsStr::from_bytes(&item[..end]));
            let there = self.name(&here);
            self.files.push(Twin { here, there: there.clone() });
            [HOME.as_bytes(), there.as_bytes(), &item[end..]].concat()
        });
        OsString::from_vec(items.collect::<Vec<_>>().join(&b','))
    }

    fn disk(&mut self, value: &OsStr) -> Result<OsString> {
        let (path, access, mode) = with_access(value, Access::ReadWrite);
        let here = PathBuf::from(path);
        if !look("--disk", &here)?.is_file() {
            return Err(refused("--disk", &here, "only regular files get to the simulated host"));
        }
        if access == Access::ReadWrite
            && let Err(error) = fs::File::options().write(true).open(&here)
        {
            return Err(refused("--disk", &here, error.to_string()));
        }
        let there = self.name(&here);
        let named = [HOME.as_bytes(), there.as_bytes(), mode].concat();
        let twins = if access == Access::ReadWrite { &mut self.disks } else { &mut self.files };
        twins.push(Twin { here, there });
        Ok(OsString::from_vec(named))
    }

    fn share(&mut self, value: &OsStr) -> Result<OsString> {
        let (path, access, mode) = with_access(value, Access::ReadOnly);
        let given = Path::new(path);
        if !look("--share", given)?.is_dir() {
            return Err(refused("--share", given, "not a folder"));
        }
        let path = fs::canonicalize(given).map_err(|error| refused("--share", given, error.to_string()))?;
        if let Some(own) = hosts_own(&path) {
            let why = format!("the simulated host has a {own} of its own; share another folder");
            return Err(refused("--share", given, why));
        }
        let named = [path.as_os_str().as_bytes(), mode].concat();
        self.shares.push(Share { path, access });
        Ok(OsString::from_vec(named))
    }

    /// Whether a file can be made there is found out now, and not when there is something to write.
    fn made(&mut self, option: &'static str, value: OsString) -> Result<OsString> {
        let here = PathBuf::from(&value);
        match fs::metadata(&here) {
            Ok(found) if found.is_dir() => return Err(refused(option, &here, "is a directory")),
            // Such as /dev/stderr, which is there as well.
            // What is a device, or one of this process's own streams whatever that is, is there too.
            Ok(found) if !found.is_file() || here.starts_with("/dev") => return Ok(value),
            Ok(_) => {
                fs::File::options()
                    .append(true)
                    .open(&here)
                    .map_err(|error| refused(option, &here, error.to_string()))?;
            }
            Err(_) => {
                let folder = here.parent().filter(|folder| !folder.as_os_str().is_empty());
                tempfile::tempfile_in(folder.unwrap_or(Path::new(".")))
                    .map_err(|error| refused(option, &here, plain(&error)))?;
            }
        }
        let there = format!("made/{}", self.made.len());
        let named = format!("/out/{there}").into();
        self.made.push(Twin { here, there });
        Ok(named)
    }
}

/// The folder there that files are in.
const HOME: &str = "/scenario/";

/// An argument's name, and the value behind its `=`.
fn split(argument: &OsStr) -> (&[u8], Option<&OsStr>) {
    let text = argument.as_bytes();
    match text.iter().position(|byte| *byte == b'=') {
        Some(at) => (&text[..at], Some(OsStr::from_bytes(&text[at + 1..]))),
        None => (text, None),
    }
}

/// A path, what it says of access, and how it says that.
fn with_access(value: &OsStr, unless_said: Access) -> (&OsStr, Access, &[u8]) {
    let text = value.as_bytes();
    let at = text.len().saturating_sub(3);
    let access = match &text[at..] {
        b":ro" => Access::ReadOnly,
        b":rw" => Access::ReadWrite,
        _ => return (value, unless_said, b""),
    };
    (OsStr::from_bytes(&text[..at]), access, &text[at..])
}

fn look(option: &'static str, path: &Path) -> Result<Metadata> {
    fs::metadata(path).map_err(|error| refused(option, path, error.to_string()))
}

/// What the simulated host has of its own that this folder would cover.
fn hosts_own(path: &Path) -> Option<&'static str> {
    /// Others may be in these, but not in their place.
    const SHARED: [&str; 7] = ["/etc", "/init", "/out", "/run", "/usr/bin", "/usr/lib", "/usr/share"];
    const WHOLE: [&str; 9] =
        ["/bin", "/dev", "/lab", "/lib", "/lib64", "/proc", "/sbin", "/scenario", "/sys"];
    let covered = |own: &&&str| Path::new(own).starts_with(path);
    let around = |own: &&&str| path.starts_with(own);
    WHOLE.iter().find(|own| covered(own) || around(own)).or_else(|| SHARED.iter().find(covered)).copied()
}

/// An error without the temporary name that it is about.
fn plain(error: &io::Error) -> String {
    let source = error.get_ref().and_then(|inner| inner.source()).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}

fn refused(option: &'static str, path: &Path, why: impl Into<String>) -> Error {
    Error::Refused { option, path: path.to_owned(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn localised(arguments: &[&str]) -> Result<Localised> {
        Localised::new(arguments.iter().map(OsString::from).collect())
    }

    fn refusal(arguments: &[&str]) -> String {
        localised(arguments).unwrap_err().to_string()
    }

    #[test]
    fn a_command_keeps_its_separator() {
        assert_eq!(localised(&["uname", "-a"]).unwrap().arguments, ["--", "uname", "-a"]);
        assert_eq!(localised(&["--cpus", "2", "--", "ls"]).unwrap().arguments, ["--cpus", "2", "--", "ls"]);
    }

    #[test]
    fn what_belongs_to_the_command_is_not_looked_at() {
        let arguments = ["--", "x", "--kernel", "/bin/sh", "--share", "/none"];
        assert_eq!(localised(&arguments).unwrap().arguments, arguments);
    }

    #[test]
    fn files_come_along_and_get_other_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a kernel");
        fs::write(&file, "").unwrap();
        let file = file.to_str().unwrap();
        let localised = localised(&[
            "--kernel",
            file,
            &format!("--initrd={file} x=1,{file}"),
            &format!("--disk={file}:ro"),
            "--disk",
            file,
        ])
        .unwrap();
        assert_eq!(
            localised.arguments,
            [
                "--kernel",
                "/scenario/given/0/a kernel",
                "--initrd=/scenario/given/1/a kernel x=1,/scenario/given/2/a kernel",
                "--disk=/scenario/given/3/a kernel:ro",
                "--disk",
                "/scenario/given/4/a kernel",
            ]
        );
        assert_eq!(localised.files.len(), 4);
        assert_eq!(localised.disks, [Twin { here: file.into(), there: "given/4/a kernel".into() }]);
    }

    #[test]
    fn a_folder_is_at_the_same_place_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(folder.path()).unwrap();
        let text = path.to_str().unwrap();
        let localised = localised(&["--share", &format!("{text}/."), &format!("--share={text}:rw")]).unwrap();
        assert_eq!(localised.arguments, ["--share", text, &*format!("--share={text}:rw")]);
        let shared = |access| Share { path: path.clone(), access };
        assert_eq!(localised.shares, [shared(Access::ReadOnly), shared(Access::ReadWrite)]);
    }

    #[test]
    fn a_place_for_a_file_is_looked_at_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("out.svg");
        let text = place.to_str().unwrap();
        let localised = localised(&["--flamegraph", text, "--pmu-log=/dev/stderr"]).unwrap();
        assert_eq!(localised.arguments, ["--flamegraph", "/out/made/0", "--pmu-log=/dev/stderr"]);
        assert_eq!(localised.made, [Twin { here: place.clone(), there: "made/0".into() }]);
        assert!(!place.exists());
        let refusal = refusal(&["--pmu-log", "/no/such/place"]);
        assert_eq!(refusal, "--pmu-log /no/such/place: No such file or directory (os error 2)");
    }

    #[test]
    fn what_cannot_go_there_is_refused() {
        assert!(refusal(&["--share", "/no/such"]).starts_with("--share /no/such: No such file"));
        assert_eq!(refusal(&["--share", "/etc/passwd"]), "--share /etc/passwd: not a folder");
        assert!(refusal(&["--share", "/usr"]).contains("has a /usr/bin of its own"));
        assert!(refusal(&["--share=/proc/self"]).contains("has a /proc of its own"));
        assert!(refusal(&["--disk", "/dev/null"]).contains("only regular files"));
    }
}
