//! Translates the arguments of `tally run` on this machine to arguments on the simulated host, and finds the files that
//! have to be copied.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use tally_lab::{Error, Result};

/// Kind of file that is the value of an option of `tally run`.
#[derive(Clone, Copy)]
enum Value {
    /// Files that `tally` reads.
    Files,
    /// A disk image.
    Disk,
    /// A directory.
    Share,
    /// A directory that would be too much to copy, or the archive of an image.
    Root,
    /// A file that `tally` creates.
    Created,
}

const OPTIONS: [(&str, Value); 8] = [
    ("--kernel", Value::Files),
    ("--initrd", Value::Files),
    ("--pmu-policy", Value::Files),
    ("--disk", Value::Disk),
    ("--share", Value::Share),
    ("--root", Value::Root),
    ("--flamegraph", Value::Created),
    ("--pmu-log", Value::Created),
];

/// A guest's access to a directory or a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// A shared directory, which has the same path on the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Share {
    pub path: PathBuf,
    pub access: Access,
}

/// A file that is copied between this machine and the host.
#[derive(Debug, PartialEq, Eq)]
pub struct CopiedFile {
    pub here: PathBuf,
    /// Path on the host: in the script's working directory, or in `$OUT` for a file that is created there.
    pub there: String,
}

/// The translated arguments, and the files that they need.
#[derive(Debug, Default)]
pub struct Localised {
    pub arguments: Vec<OsString>,
    /// Files that are copied to the host only.
    pub files: Vec<CopiedFile>,
    /// Files that are copied to the host and back.
    pub disks: Vec<CopiedFile>,
    pub shares: Vec<Share>,
    /// Files that are copied back only.
    pub created: Vec<CopiedFile>,
}

impl Localised {
    /// Translates the arguments of `tally run`.
    pub fn new(arguments: Vec<OsString>) -> Result<Self> {
        let mut localised = Self::default();
        // The `--` in front of a command was consumed when this program parsed its arguments.
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
            let Some(&(option, kind)) = OPTIONS.iter().find(|(option, _)| name == option.as_bytes()) else {
                localised.arguments.push(argument);
                continue;
            };
            let joined = value.is_some();
            let Some(value) = value.map(OsStr::to_owned).or_else(|| rest.next()) else {
                localised.arguments.push(argument);
                continue;
            };
            let value = match kind {
                // The policy of this name is built in, whether or not there is a file.
                Value::Files if option == "--pmu-policy" && value == "tenant" => value,
                Value::Files => localised.files(&value),
                Value::Disk => localised.disk(&value)?,
                Value::Share => localised.share(&value)?,
                Value::Root if Path::new(&value).is_file() => localised.files(&value),
                Value::Root => {
                    let why = "a root is not copied to the simulated host; --share brings a folder";
                    return Err(refused("--root", Path::new(&value), why));
                }
                Value::Created => localised.created(option, value)?,
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

    /// Returns the path on the host for a file of this machine.
    fn path_there(&self, path: &Path) -> String {
        let base = path.file_name().unwrap_or_default().to_string_lossy();
        format!("given/{}/{base}", self.files.len() + self.disks.len())
    }

    /// Translates a comma-separated list of files, each of which may have arguments. A name that is no file is not
    /// changed, so `tally` reports it.
    fn files(&mut self, value: &OsStr) -> OsString {
        let items = value.as_bytes().split(|&byte| byte == b',').map(|item| {
            let is_file = |end: &usize| Path::new(OsStr::from_bytes(&item[..*end])).is_file();
            let ends = item.iter().enumerate().filter(|(_, byte)| **byte == b' ').map(|(at, _)| at);
            let Some(end) = std::iter::once(item.len()).chain(ends).find(is_file) else {
                return item.to_vec();
            };
            let here = PathBuf::from(OsStr::from_bytes(&item[..end]));
            let there = self.path_there(&here);
            self.files.push(CopiedFile { here, there: there.clone() });
            [HOME.as_bytes(), there.as_bytes(), &item[end..]].concat()
        });
        OsString::from_vec(items.collect::<Vec<_>>().join(&b','))
    }

    /// Translates the value of `--disk`.
    fn disk(&mut self, value: &OsStr) -> Result<OsString> {
        let (path, access, mode) = with_access(value, Access::ReadWrite);
        let here = PathBuf::from(path);
        if !metadata("--disk", &here)?.is_file() {
            return Err(refused("--disk", &here, "only regular files can be copied to the simulated host"));
        }
        if access == Access::ReadWrite
            && let Err(error) = fs::File::options().write(true).open(&here)
        {
            return Err(refused("--disk", &here, error.to_string()));
        }
        let there = self.path_there(&here);
        let value = [HOME.as_bytes(), there.as_bytes(), mode].concat();
        let files = if access == Access::ReadWrite { &mut self.disks } else { &mut self.files };
        files.push(CopiedFile { here, there });
        Ok(OsString::from_vec(value))
    }

    /// Translates the value of `--share`.
    fn share(&mut self, value: &OsStr) -> Result<OsString> {
        let (path, access, mode) = with_access(value, Access::ReadOnly);
        let given = Path::new(path);
        if !metadata("--share", given)?.is_dir() {
            return Err(refused("--share", given, "not a folder"));
        }
        let path = fs::canonicalize(given).map_err(|error| refused("--share", given, error.to_string()))?;
        if let Some(own) = conflict(&path) {
            let why = format!("the simulated host has a {own} of its own; share another folder");
            return Err(refused("--share", given, why));
        }
        let value = [path.as_os_str().as_bytes(), mode].concat();
        self.shares.push(Share { path, access });
        Ok(OsString::from_vec(value))
    }

    /// Translates the path of a file that `tally` creates. Returns an error if the file cannot be created here, before
    /// the run starts.
    fn created(&mut self, option: &'static str, value: OsString) -> Result<OsString> {
        let here = PathBuf::from(&value);
        match fs::metadata(&here) {
            Ok(metadata) if metadata.is_dir() => return Err(refused(option, &here, "is a directory")),
            // Devices exist on the host too. In /dev, so do the names of standard streams, such as /dev/stderr,
            // whatever they refer to.
            Ok(metadata) if !metadata.is_file() || here.starts_with("/dev") => return Ok(value),
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
        let there = format!("made/{}", self.created.len());
        let value = format!("/out/{there}").into();
        self.created.push(CopiedFile { here, there });
        Ok(value)
    }
}

/// Options of `tally run`, each with a value, that its template depends on.
const OF_A_TEMPLATE: [&str; 6] =
    ["--cpus", "--memory", "--pmu", "--counters", "--on-starvation", "--sandbox"];
/// Those that it does not depend on.
const OF_A_RUN: [&str; 3] = ["--name", "--metrics", "--flamegraph"];

/// Returns the options of a run that makes a template for these arguments of `tally run`. Returns `None` if a run with
/// these boots, or if that is not known.
pub fn template(arguments: &[OsString]) -> Option<Vec<OsString>> {
    let mut options = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if !argument.as_bytes().starts_with(b"-") {
            return Some(options);
        }
        if argument == "--" {
            return rest.next().map(|_command| options);
        }
        let (name, value) = split(argument);
        let value = value.or_else(|| rest.next().map(OsString::as_os_str))?;
        let is_one_of = |names: &[&str]| names.iter().any(|known| known.as_bytes() == name);
        if name == b"--share" {
            // Only their number matters.
            options.push(format!("--share={HOME}").into());
        } else if is_one_of(&OF_A_TEMPLATE) && value != "kvm" {
            options.extend([OsStr::from_bytes(name).to_owned(), value.to_owned()]);
        } else if !is_one_of(&OF_A_RUN) {
            return None;
        }
    }
    None
}

/// The script's working directory on the host, to which files are copied.
const HOME: &str = "/scenario/";

/// Splits an argument at its first `=` into an option and a value.
fn split(argument: &OsStr) -> (&[u8], Option<&OsStr>) {
    let text = argument.as_bytes();
    match text.iter().position(|byte| *byte == b'=') {
        Some(at) => (&text[..at], Some(OsStr::from_bytes(&text[at + 1..]))),
        None => (text, None),
    }
}

/// Splits a suffix `:ro` or `:rw` from a path. Returns the path, the access, and the suffix.
fn with_access(value: &OsStr, default: Access) -> (&OsStr, Access, &[u8]) {
    let text = value.as_bytes();
    let at = text.len().saturating_sub(3);
    let access = match &text[at..] {
        b":ro" => Access::ReadOnly,
        b":rw" => Access::ReadWrite,
        _ => return (value, default, b""),
    };
    (OsStr::from_bytes(&text[..at]), access, &text[at..])
}

fn metadata(option: &'static str, path: &Path) -> Result<Metadata> {
    fs::metadata(path).map_err(|error| refused(option, path, error.to_string()))
}

/// Returns the host's own directory with which a shared directory would conflict, if there is one.
fn conflict(path: &Path) -> Option<&'static str> {
    /// Directories of the host in which a shared directory may be, but which it must not replace.
    const SHARED: [&str; 7] = ["/etc", "/init", "/out", "/run", "/usr/bin", "/usr/lib", "/usr/share"];
    /// Directories of the host in which no shared directory may be.
    const WHOLE: [&str; 9] =
        ["/bin", "/dev", "/lab", "/lib", "/lib64", "/proc", "/sbin", "/scenario", "/sys"];
    let is_inside = |own: &&&str| Path::new(own).starts_with(path);
    let contains = |own: &&&str| path.starts_with(own);
    WHOLE
        .iter()
        .find(|own| is_inside(own) || contains(own))
        .or_else(|| SHARED.iter().find(is_inside))
        .copied()
}

/// Returns an error's message without the name of a temporary file.
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
    fn a_template_has_the_options_that_it_depends_on() {
        let template =
            |arguments: &[&str]| template(&arguments.iter().map(OsString::from).collect::<Vec<_>>());
        let of = |options: &[&str]| Some(options.iter().map(OsString::from).collect());
        assert_eq!(template(&["true", "--cpus", "2"]), of(&[]));
        assert_eq!(template(&["--name", "x", "--cpus=2", "--", "true"]), of(&["--cpus", "2"]));
        let two_shares = ["--share=/scenario/", "--share=/scenario/"];
        assert_eq!(template(&["--share", ".:rw", "--share=/usr", "--", "true"]), of(&two_shares));
        for boots in [
            &["--pmu", "kvm", "--", "true"][..],
            &["--append", "x", "--", "true"],
            &["-v", "--", "true"],
            &["--cpus", "2", "--"],
            &["--cpus", "2"],
            &["--cpus"],
            &[],
        ] {
            assert_eq!(template(boots), None, "{boots:?}");
        }
    }

    #[test]
    fn the_arguments_of_the_guests_command_are_not_translated() {
        let arguments = ["--", "x", "--kernel", "/bin/sh", "--share", "/none"];
        assert_eq!(localised(&arguments).unwrap().arguments, arguments);
    }

    #[test]
    fn the_policy_that_is_built_in_is_no_file() {
        let arguments = ["--pmu-policy", "tenant", "--pmu-policy=tenant"];
        let localised = localised(&arguments).unwrap();
        assert_eq!(localised.arguments, arguments);
        assert!(localised.files.is_empty());
    }

    #[test]
    fn files_are_copied_under_other_names() {
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
        assert_eq!(localised.disks, [CopiedFile { here: file.into(), there: "given/4/a kernel".into() }]);
    }

    #[test]
    fn a_shared_folder_has_the_same_path_on_the_host() {
        let folder = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(folder.path()).unwrap();
        let text = path.to_str().unwrap();
        let localised = localised(&["--share", &format!("{text}/."), &format!("--share={text}:rw")]).unwrap();
        assert_eq!(localised.arguments, ["--share", text, &*format!("--share={text}:rw")]);
        let shared = |access| Share { path: path.clone(), access };
        assert_eq!(localised.shares, [shared(Access::ReadOnly), shared(Access::ReadWrite)]);
    }

    #[test]
    fn a_file_that_cannot_be_created_is_reported_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("out.svg");
        let text = place.to_str().unwrap();
        let localised = localised(&["--flamegraph", text, "--pmu-log=/dev/stderr"]).unwrap();
        assert_eq!(localised.arguments, ["--flamegraph", "/out/made/0", "--pmu-log=/dev/stderr"]);
        assert_eq!(localised.created, [CopiedFile { here: place.clone(), there: "made/0".into() }]);
        assert!(!place.exists());
        let refusal = refusal(&["--pmu-log", "/no/such/place"]);
        assert_eq!(refusal, "--pmu-log /no/such/place: No such file or directory (os error 2)");
    }

    #[test]
    fn what_cannot_be_copied_to_the_host_is_refused() {
        assert!(refusal(&["--share", "/no/such"]).starts_with("--share /no/such: No such file"));
        assert_eq!(refusal(&["--share", "/etc/passwd"]), "--share /etc/passwd: not a folder");
        assert!(refusal(&["--root", "/"]).starts_with("--root /: a root is not copied"));
        assert!(refusal(&["--share", "/usr"]).contains("has a /usr/bin of its own"));
        assert!(refusal(&["--share=/proc/self"]).contains("has a /proc of its own"));
        assert!(refusal(&["--disk", "/dev/null"]).contains("only regular files"));
    }
}
