//! This project's programs that run on the simulated host. They are in the directory of `tally-lab`, and are built
//! there if they are missing.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use guest_images::{Progress, child};
use tally_lab::{Error, Result};

/// Returns the path of a program. Builds the program first if it is missing and its source exists.
pub fn program(name: &'static str, progress: &mut Progress) -> Result<PathBuf> {
    let here = env::current_exe().map_err(|source| Error::System { action: "find this program", source })?;
    let program = here.with_file_name(name);
    if !program.is_file()
        && let Some(building) = begin(name, &here)?
    {
        building.finish(progress)?;
    }
    if program.is_file() {
        Ok(program)
    } else {
        let folder = here.parent().unwrap_or(Path::new("/")).to_path_buf();
        Err(Error::MissingProgram { program: name, package: package(name), folder })
    }
}

/// Begins to build `tally` if this program was started by cargo, as its source may have changed.
pub fn begin_tally() -> Result<Option<Building>> {
    match env::current_exe() {
        Ok(here) if env::var_os("CARGO").is_some() => begin("tally", &here),
        _ => Ok(None),
    }
}

/// A build by cargo, which goes on while other things are done.
pub struct Building {
    cargo: Child,
    name: &'static str,
}

impl Building {
    /// Waits for the end of the build.
    pub fn finish(mut self, progress: &mut Progress) -> Result<()> {
        progress.long_step(format!("building {}", self.name));
        let status = self.cargo.wait();
        progress.done();
        let status = status.map_err(|source| Error::System { action: "wait for cargo", source })?;
        if status.success() {
            Ok(())
        } else {
            Err(Error::Command(format!("cargo build --package {}", package(self.name))))
        }
    }
}

fn package(program: &str) -> &'static str {
    if program == "tally" { "tally" } else { env!("CARGO_PKG_NAME") }
}

/// Begins to build a program with the profile and into the target directory of the one at `here`. Does nothing if
/// `here` is not in a target directory of cargo's, as for an installed program.
fn begin(name: &'static str, here: &Path) -> Result<Option<Building>> {
    let Some(source) = tally_lab::source() else { return Ok(None) };
    // TARGET_DIR/TARGET/PROFILE/tally-lab
    let mut folders = here.ancestors().skip(1);
    let profile = folders.next().and_then(Path::file_name).and_then(|name| name.to_str());
    let (Some(profile), Some(target)) = (profile, folders.nth(1)) else { return Ok(None) };
    if !target.join("CACHEDIR.TAG").is_file() || !source.join("Cargo.toml").is_file() {
        return Ok(None);
    }
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", package(name), "--bin", name]);
    cargo.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    child::die_with_this_process(&mut cargo, child::Death::Terminate);
    let cargo = cargo.arg("--target-dir").arg(target).current_dir(source).spawn();
    let cargo = cargo.map_err(|source| Error::System { action: "run cargo", source })?;
    Ok(Some(Building { cargo, name }))
}
