//! This project's programs that run on the simulated host. They are in the directory of `tally-lab`, and are built
//! there if they are missing.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::Progress;
use tally_lab::{Error, Result};

/// Returns the path of a program. Builds the program first if it is missing and its source exists.
pub fn program(name: &'static str, progress: &mut Progress) -> Result<PathBuf> {
    let here = env::current_exe().map_err(|source| Error::System { action: "find this program", source })?;
    let program = here.with_file_name(name);
    if !program.is_file() {
        build(name, &here, progress)?;
    }
    if program.is_file() {
        Ok(program)
    } else {
        let folder = here.parent().unwrap_or(Path::new("/")).to_path_buf();
        Err(Error::MissingProgram { program: name, package: package(name), folder })
    }
}

/// Builds `tally` if its source has changed and this program was started by cargo.
pub fn update_tally(progress: &mut Progress) -> Result<()> {
    match env::current_exe() {
        Ok(here) if env::var_os("CARGO").is_some() => build("tally", &here, progress),
        _ => Ok(()),
    }
}

fn package(program: &str) -> &'static str {
    if program == "tally" { "tally" } else { env!("CARGO_PKG_NAME") }
}

/// Builds a program with the profile and into the target directory of the one at `here`. Does nothing if `here` is not
/// in a target directory of cargo's, as for an installed program.
fn build(name: &str, here: &Path, progress: &mut Progress) -> Result<()> {
    let Some(source) = tally_lab::source() else { return Ok(()) };
    // TARGET_DIR/TARGET/PROFILE/tally-lab
    let mut folders = here.ancestors().skip(1);
    let profile = folders.next().and_then(Path::file_name).and_then(|name| name.to_str());
    let (Some(profile), Some(target)) = (profile, folders.nth(1)) else { return Ok(()) };
    if !target.join("CACHEDIR.TAG").is_file() || !source.join("Cargo.toml").is_file() {
        return Ok(());
    }
    progress.long_step(format!("building {name}"));
    let package = package(name);
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", package, "--bin", name]);
    cargo.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    let status = cargo.arg("--target-dir").arg(target).current_dir(source).status();
    let status = status.map_err(|source| Error::System { action: "run cargo", source })?;
    if status.success() { Ok(()) } else { Err(Error::Command(format!("cargo build --package {package}"))) }
}
