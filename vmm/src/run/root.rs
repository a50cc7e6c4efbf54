//! `tally run --root`: a folder of the host is the guest's root, as far as the caller may read it, or an image of a
//! container, which is unpacked into the cache.
//!
//! The share's server leaves out what is not for guests ([`devices::fs::Root`]). The agent mounts it under an overlay,
//! so that the guest writes to its own memory.

use std::borrow::Cow;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use devices::fs::{FileOwner, Mounts, Root, Share};
use guest_agent::protocol::{OWN_FOLDERS, Variable};
use guest_images::cache::Cache;
use guest_images::container::{self, Config, Image, Owned};
use guest_images::{Arch, Progress};

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

/// Returns the options with a folder as the root, and with a command: without one, an image's own runs below its root,
/// and a shell below another one.
pub fn resolved(options: &Run) -> Result<Cow<'_, Run>> {
    let Some(root) = &options.root else {
        if options.user.is_some() && options.command.is_empty() {
            bail!("--user is for a COMMAND");
        }
        return Ok(Cow::Borrowed(options));
    };
    let mut options = options.clone();
    if container::is_image(root) {
        let mut progress = Progress::stderr("tally").verbose(options.verbose > 0);
        let opened = container::open(&Cache::open()?, root, Arch::default(), &mut progress);
        progress.clear();
        let Image { root, config, .. } = opened.map_err(|error| anyhow!("--root {error}"))?;
        use_image(&mut options, root, config);
    } else if options.command.is_empty() {
        let shell = env::var_os("SHELL").filter(|shell| {
            let shell = Path::new(shell);
            root == Path::new("/") && shell.is_absolute() && shell.is_file()
        });
        options.command = vec![shell.unwrap_or_else(|| SHELL.into())];
    }
    Ok(Cow::Owned(options))
}

/// Has an unpacked image be the root. What is given is not what the image says.
fn use_image(options: &mut Run, root: PathBuf, config: Config) {
    options.root = Some(root);
    if options.command.is_empty() {
        let words = [&config.entrypoint, &config.cmd].into_iter().flatten().flatten();
        options.command = words.map(OsString::from).collect();
        if options.command.is_empty() {
            options.command.push(SHELL.into());
        }
    }
    let user = config.user.as_ref().filter(|user| !user.is_empty()).map(OsString::from);
    options.user = options.user.take().or(user);
    options.image = Some(config);
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
    let image = container::hold(&path);
    // An image is in the cache, and has nothing of Tally's in it.
    let hidden = if image.is_some() { Vec::new() } else { hidden() };
    if hidden.iter().any(|hidden| path.starts_with(hidden)) {
        bail!("--root {}: this is Tally's own, which no guest sees", folder.display());
    }
    let image = image.transpose().map_err(|reason| anyhow!("--root {}: {reason}", folder.display()))?;
    let (owners, held) = image.map(|image| (image.owners.into_inner(), image.folder)).unzip();
    let owner = |(inode, Owned { user, group, mode })| (inode, FileOwner { user, group, mode });
    let owners: Vec<_> = owners.into_iter().flatten().map(owner).collect();
    let root = Root { path: &path, mounts, own: &OWN_FOLDERS, hidden: &hidden, owners: &owners };
    let mut share = Share::open_root(&root, shares)?;
    if let Some(folder) = held {
        share.hold(folder);
    }
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
    /// Returns the working directory of a command that this process starts from this folder: the image's, if there is
    /// one.
    pub fn working_dir(&mut self, here: Option<&Path>, image: Option<&Config>) -> Result<OsString> {
        if let Some(image) = image {
            let given = image.working_dir.as_deref().filter(|folder| !folder.is_empty());
            return Ok(Path::new("/").join(given.unwrap_or_default()).into());
        }
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
        _ if options.image.is_some() => Vec::new(),
        // Another user's home is where that user's files are.
        Some(_) => env::vars_os()
            .filter(|(name, _)| is_callers(name) && (name != "HOME" || options.user.is_none()))
            .collect(),
        None => Vec::new(),
    };
    let images = options.image.iter().flat_map(|image| image.env.iter().flatten());
    variables.extend(
        images.filter_map(|text| text.split_once('=')).map(|(name, value)| (name.into(), value.into())),
    );
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
        let command = |arguments: &[&str]| resolved(&options(arguments)).unwrap().command.clone();
        assert_eq!(command(&["--root", "/srv"]), ["/bin/sh"]);
        assert_eq!(command(&["--root", "/srv", "--", "true"]), ["true"]);
        assert!(command(&[]).is_empty());
    }

    #[test]
    fn an_images_command_environment_and_user_are_used_unless_given() {
        let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        let config = Config {
            entrypoint: words(&["/start"]),
            cmd: words(&["serve", "-v"]),
            env: words(&["PATH=/bin", "A=image"]),
            working_dir: Some("srv".into()),
            user: Some("web".into()),
        };
        let used = |arguments: &[&str], config: &Config| {
            let mut options = options(&[&["--root", "image.tar"], arguments].concat());
            use_image(&mut options, "/cache/root".into(), config.clone());
            options
        };
        let own = used(&[], &config);
        assert_eq!(own.command, ["/start", "serve", "-v"]);
        assert_eq!(
            (own.user.as_deref(), own.root.as_deref()),
            (Some("web".as_ref()), Some("/cache/root".as_ref()))
        );
        assert_eq!(
            environment(&own).unwrap(),
            [("PATH".into(), "/bin".into()), ("A".into(), "image".into())]
        );
        let given = used(&["--user", "0", "--env", "A=mine", "--", "id"], &config);
        assert_eq!((&given.command[..], given.user.as_deref()), (&["id".into()][..], Some("0".as_ref())));
        assert_eq!(environment(&given).unwrap().last(), Some(&("A".into(), "mine".into())));
        let empty = used(&[], &Config { user: Some(String::new()), ..Config::default() });
        assert_eq!((&empty.command[..], empty.user), (&["/bin/sh".into()][..], None));
    }

    #[test]
    fn a_user_without_a_command_is_refused_and_another_users_home_is_not_the_callers() {
        let refused = resolved(&options(&["--user", "web"])).unwrap_err().to_string();
        assert_eq!(refused, "--user is for a COMMAND");
        let home = |arguments: &[&str]| {
            let variables = environment(&options(&[&["--root", "/"], arguments].concat())).unwrap();
            variables.iter().any(|(name, _)| name == "HOME")
        };
        assert_eq!([home(&[]), home(&["--user", "web"])], [env::var_os("HOME").is_some(), false]);
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
        let mut start = |here: &Path| root.working_dir(Some(here), None).map_err(|error| error.to_string());
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
