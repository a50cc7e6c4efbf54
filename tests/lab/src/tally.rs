//! `tally run` on the simulated host.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use guest_images::{Progress, Suite};
use tally_lab::{Error, Result, Scenario};

/// Options of `tally run` whose value names files that it reads.
const FILE_OPTIONS: [&str; 4] = ["--kernel", "--initrd", "--disk", "--pmu-policy"];

/// The program `tally`, which cargo puts beside this one.
pub fn program() -> Result<PathBuf> {
    let here = env::current_exe().map_err(|source| Error::System { action: "find this program", source })?;
    let program = here.with_file_name("tally");
    if program.is_file() {
        Ok(program)
    } else {
        Err(Error::NoTally(here.parent().unwrap_or(Path::new("/")).to_path_buf()))
    }
}

/// `tally run` with these arguments, with the default guest and the files that the arguments name.
pub fn scenario(arguments: Vec<OsString>, guest: Suite, progress: &mut Progress) -> Result<Scenario> {
    let mut scenario =
        Scenario::new("exec ./tally run \"$@\"\n").file(program()?, "tally").guest(guest, progress)?;
    let (arguments, files) = localise(arguments);
    for (path, name) in files {
        scenario = scenario.file(path, &name);
    }
    Ok(scenario.arguments(arguments))
}

/// Arguments that name files of this machine, as they are to be on the simulated host, and those files.
fn localise(arguments: Vec<OsString>) -> (Vec<OsString>, Vec<(PathBuf, String)>) {
    let mut files = Vec::new();
    let mut here = Vec::new();
    // `--` in front of a command is for the program that reads it first, which was this one.
    if arguments.first().is_some_and(|first| !first.as_bytes().starts_with(b"-")) {
        here.push("--".into());
    }
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        if argument == "--" {
            here.push(argument);
            here.extend(rest);
            break;
        }
        let text = argument.as_bytes();
        if FILE_OPTIONS.iter().any(|option| text == option.as_bytes()) {
            here.push(argument);
            here.extend(rest.next().map(|value| rename(&value, &mut files)));
        } else if let Some(option) =
            FILE_OPTIONS.iter().find(|option| text.starts_with(format!("{option}=").as_bytes()))
        {
            let mut renamed = OsString::from(format!("{option}="));
            renamed.push(rename(OsStr::from_bytes(&text[option.len() + 1..]), &mut files));
            here.push(renamed);
        } else {
            here.push(argument);
        }
    }
    (here, files)
}

/// Gives the files in an option's value new names. A value may be a list of files with arguments, and a file may have
/// a mode behind a colon; what is not a file here stays as it is, for `tally` to complain about.
fn rename(value: &OsStr, files: &mut Vec<(PathBuf, String)>) -> OsString {
    let items = value.as_bytes().split(|&byte| byte == b',').map(|item| {
        let is_file = |end: &usize| Path::new(OsStr::from_bytes(&item[..*end])).is_file();
        let ends = item.iter().enumerate().filter(|(_, byte)| b" :".contains(byte)).map(|(at, _)| at);
        let Some(end) = std::iter::once(item.len()).chain(ends).find(is_file) else { return item.to_vec() };
        let path = PathBuf::from(OsStr::from_bytes(&item[..end]));
        let base = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = format!("given/{}/{base}", files.len());
        files.push((path, name.clone()));
        [name.as_bytes(), &item[end..]].concat()
    });
    OsString::from_vec(items.collect::<Vec<_>>().join(&b','))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn localised(arguments: &[&str]) -> (Vec<OsString>, usize) {
        let (here, files) = localise(arguments.iter().map(OsString::from).collect());
        (here, files.len())
    }

    #[test]
    fn a_command_keeps_its_separator() {
        assert_eq!(localised(&["uname", "-a"]).0, ["--", "uname", "-a"]);
        assert_eq!(localised(&["--cpus", "2", "--", "ls"]).0, ["--cpus", "2", "--", "ls"]);
    }

    #[test]
    fn files_come_along_and_get_other_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a kernel");
        std::fs::write(&file, "").unwrap();
        let file = file.to_str().unwrap();
        let (here, files) =
            localised(&["--kernel", file, &format!("--initrd={file} x=1,{file}"), "--disk=none:ro"]);
        assert_eq!(
            here,
            [
                "--kernel",
                "given/0/a kernel",
                "--initrd=given/1/a kernel x=1,given/2/a kernel",
                "--disk=none:ro"
            ]
        );
        assert_eq!(files, 3);
    }

    #[test]
    fn what_belongs_to_the_command_is_not_looked_at() {
        assert_eq!(localised(&["--", "x", "--kernel", "/bin/sh"]).0, ["--", "x", "--kernel", "/bin/sh"]);
    }
}
