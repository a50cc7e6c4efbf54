//! `tally run --root`: a folder of the host is the guest's root, as far as the caller may read it.
//!
//! The share's server leaves out what is not for guests ([`devices::fs::Root`]). The agent mounts it under an overlay,
//! so that the guest writes to its own memory.

use std::borrow::Cow;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use devices::fs::{Mounts, Root, Share};
use guest_agent::protocol::{OWN_FOLDERS, Variable};
use guest_images::cache::Cache;

use crate::cli::Run;
use crate::protocol::socket_dir::SocketDir;

/// Variables of this process that a command below a root gets. Those of the locale, which begin with `LC_`, too.
const CALLERS: [&str; 5] = ["PATH", "HOME", "TERM", "LANG", "LANGUAGE"];
const SHELL: &str = "/bin/sh";

/// A root that was opened.
pub struct OpenedRoot {
    /// The canonical path of the folder.
    pub path: PathBuf,
    pub share: Share,
    mounts: Mounts,
}

/// Returns the options with a command: without one, a shell runs below a root.
pub fn with_command(options: &Run) -> Cow<'_, Run> {
    let Some(root) = options.root.as_ref().filter(|_| options.command.is_empty()) else {
        return Cow::Borrowed(options);
    };
    let shell = env::var_os("SHELL").filter(|shell| {
        let shell = Path::new(shell);
        root == Path::new("/") && shell.is_absolute() && shell.is_file()
    });
    Cow::Owned(Run { command: vec![shell.unwrap_or_else(|| SHELL.into())], ..options.clone() })
}

/// Opens the root that the options name. `shares` is the number of the guest's shares, with this one.
pub fn open(options: &Run, shares: usize) -> Result<Option<OpenedRoot>> {
    let Some(folder) = &options.root else { return Ok(None) };
    if options.append.split_whitespace().any(|word| word.starts_with("root=")) {
        bail!("--root, and root= in --append: a guest has one root");
    }
    // If it is not there, opening it says so.
    let path = fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
    let mounts = if options.root_mounts { Mounts::Seen } else { Mounts::Hidden };
    let hidden = hidden();
    if hidden.iter().any(|hidden| path.starts_with(hidden)) {
        bail!("--root {}: this is Tally's own, which no guest sees", folder.display());
    }
    let root = Root { path: &path, mounts, own: &OWN_FOLDERS, hidden: &hidden };
    let share = Share::open_root(&root, shares)?;
    Ok(Some(OpenedRoot { path, share, mounts }))
}

/// Returns folders of this program's that no guest sees.
fn hidden() -> Vec<PathBuf> {
    let home = |name: &str, below: &str| {
        let home = env::var_os(name).map(PathBuf::from).filter(|home| home.is_absolute());
        home.map(|home| home.join(below))
    };
    let mut folders: Vec<PathBuf> = Cache::open().map(|cache| cache.root().to_owned()).into_iter().collect();
    folders.extend(SocketDir::own().map(|sockets| sockets.path().to_owned()));
    // What is in the cache that other runs use is not for guests either.
    folders.extend([home("XDG_CACHE_HOME", "tally"), home("HOME", ".cache/tally")].into_iter().flatten());
    folders
}

impl OpenedRoot {
    /// Returns the working directory of a command that this process starts from this folder.
    pub fn working_dir(&mut self, here: Option<&Path>) -> Result<OsString> {
        let Some(inside) = here.and_then(|here| here.strip_prefix(&self.path).ok()) else {
            let home = env::var_os("HOME").filter(|home| self.has(Path::new(home)));
            return Ok(home.unwrap_or_else(|| "/".into()));
        };
        let is_own = inside.iter().next().is_some_and(|first| OWN_FOLDERS.iter().any(|own| first == *own));
        let missing =
            if is_own { inside.iter().next().map(PathBuf::from) } else { self.share.first_missing(inside) };
        let Some(missing) = missing else { return Ok(Path::new("/").join(inside).into()) };
        let place = Path::new("/").join(missing);
        let place = place.display();
        match self.mounts {
            _ if is_own => {
                bail!("the guest has a {place} of its own, without the current folder: `--share .` brings it")
            }
            Mounts::Hidden => bail!(
                "the current folder is not in the guest, which does not see {place}: `--share .` brings it, \
                 or `--root-mounts` if {place} is a mount"
            ),
            Mounts::Seen => {
                bail!(
                    "the current folder is not in the guest, which does not see {place}: `--share .` brings it"
                )
            }
        }
    }

    fn has(&mut self, path: &Path) -> bool {
        path.is_absolute() && self.share.first_missing(path).is_none()
    }
}

/// Returns the variables that the command gets from this process.
pub fn environment(options: &Run) -> Result<Vec<Variable>> {
    if !options.env.is_empty() && options.command.is_empty() {
        bail!("--env is for a COMMAND");
    }
    let is_callers =
        |name: &OsStr| CALLERS.iter().any(|known| name == *known) || name.as_bytes().starts_with(b"LC_");
    let mut variables: Vec<Variable> = match options.root {
        Some(_) => env::vars_os().filter(|(name, _)| is_callers(name)).collect(),
        None => Vec::new(),
    };
    for given in &options.env {
        let value = match &given.value {
            Some(value) => value.clone(),
            None => env::var_os(&given.name)
                .with_context(|| format!("--env {}: it is not set here", given.name.display()))?,
        };
        variables.push((given.name.clone(), value));
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn options(arguments: &[&str]) -> Run {
        let cli = Cli::try_parse_from([&["tally", "run"], arguments].concat()).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        *run
    }

    #[test]
    fn a_variable_has_the_value_that_is_given_or_the_callers() {
        let given =
            environment(&options(&["--env", "A=b=c", "--env", "PATH", "--env", "EMPTY=", "--", "true"]));
        let path = env::var_os("PATH").unwrap();
        assert_eq!(
            given.unwrap(),
            [("A".into(), "b=c".into()), ("PATH".into(), path), ("EMPTY".into(), "".into())]
        );
        let refused = |arguments: &[&str]| environment(&options(arguments)).unwrap_err().to_string();
        assert_eq!(
            refused(&["--env", "NO_SUCH_VARIABLE", "--", "true"]),
            "--env NO_SUCH_VARIABLE: it is not set here"
        );
        assert_eq!(refused(&["--env", "A=b"]), "--env is for a COMMAND");
    }

    #[test]
    fn a_command_without_a_root_has_nothing_of_the_callers() {
        assert_eq!(environment(&options(&["--", "true"])).unwrap(), []);
        let below = environment(&options(&["--root", "/", "--", "true"])).unwrap();
        assert!(below.iter().any(|(name, _)| name == "PATH"));
        let known =
            |name: &OsStr| CALLERS.iter().any(|known| name == *known) || name.as_bytes().starts_with(b"LC_");
        assert!(below.iter().all(|(name, _)| known(name)), "{below:?}");
    }

    #[test]
    fn below_a_root_there_is_a_shell_without_a_command() {
        let command = |arguments: &[&str]| with_command(&options(arguments)).command.clone();
        assert_eq!(command(&["--root", "/srv"]), ["/bin/sh"]);
        assert_eq!(command(&["--root", "/srv", "--", "true"]), ["true"]);
        assert!(command(&[]).is_empty());
    }

    #[test]
    fn a_command_starts_where_the_caller_is_or_a_line_says_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        for name in ["home/user", "tmp/work"] {
            fs::create_dir_all(path.join(name)).unwrap();
        }
        let options = options(&["--root", path.to_str().unwrap()]);
        let mut root = open(&options, 1).unwrap().unwrap();
        let mut start = |here: &Path| root.working_dir(Some(here)).map_err(|error| error.to_string());
        assert_eq!(start(&path.join("home/user")).unwrap(), "/home/user");
        assert_eq!(start(&path).unwrap(), "/");
        let own = start(&path.join("tmp/work")).unwrap_err();
        assert!(own.starts_with("the guest has a /tmp of its own") && own.contains("`--share .`"), "{own}");
        let missing = start(&path.join("home/gone/x")).unwrap_err();
        assert!(
            missing.contains("does not see /home/gone: ") && missing.contains("`--root-mounts`"),
            "{missing}"
        );
        assert_eq!(start(Path::new("/proc")).unwrap(), "/", "there is no such HOME");
    }

    #[test]
    fn a_guest_has_one_root() {
        let said = |arguments: &[&str]| open(&options(arguments), 1).err().map(|error| error.to_string());
        let two = said(&["--root", "/", "--append", "quiet root=/dev/vda"]);
        assert_eq!(two.as_deref(), Some("--root, and root= in --append: a guest has one root"));
        assert_eq!(said(&["--root", "/no/such"]).as_deref(), Some("--root /no/such: no such directory"));
        assert_eq!(said(&[]), None);
    }
}
