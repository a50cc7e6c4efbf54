//! Compiles the programs of a package, so that the same commit gives the same programs on every machine with the same
//! compiler: no path of this machine is in them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use guest_images::{Arch, Progress};
use tally_lab::cross;

use crate::tree::iso_time;

/// Where compiled programs are.
pub type Programs = PathBuf;

/// The commit that is packed.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The beginning of its hash.
    pub hash: String,
    /// Its time, in seconds since 1970.
    pub time: u64,
}

impl Commit {
    /// Returns the commit of this checkout. `SOURCE_DATE_EPOCH` sets another time, where there is no repository, too.
    pub fn of_the_checkout() -> Result<Self> {
        let git = |format: &str| {
            let mut git = Command::new("git");
            git.arg("-C").arg(project()).args(["log", "-1", &format!("--format={format}")]);
            let output = git.output().ok().filter(|output| output.status.success())?;
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let time = env::var("SOURCE_DATE_EPOCH").ok().or_else(|| git("%ct"));
        let time = time.context("this is no checkout of a repository: set SOURCE_DATE_EPOCH")?;
        let time = time.parse().with_context(|| format!("{time}: not a time in seconds since 1970"))?;
        // Of a length that does not depend on the checkout.
        let hash = git("%H").map_or_else(|| "unknown".into(), |hash| hash.chars().take(12).collect());
        Ok(Self { hash, time })
    }

    /// Returns its day and minute as a number that grows.
    pub fn day(&self) -> String {
        let digits = iso_time(self.time);
        digits.chars().filter(char::is_ascii_digit).take("YYYYMMDDhhmm".len()).collect()
    }
}

/// Returns the project's folder.
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Compiles the programs, and returns their folder.
pub fn programs(arch: Arch, progress: &mut Progress) -> Result<Programs> {
    match arch {
        Arch::X86_64 => here(progress),
        Arch::Riscv64 => {
            let program = cross::released("tally", &remapped(), progress)?;
            Ok(program.parent().context("a program is in a folder")?.to_owned())
        }
    }
}

fn here(progress: &mut Progress) -> Result<Programs> {
    progress.long_step("compiling the programs");
    let target = project().join("target/dist");
    // Each alone: cargo would unify the features of their dependencies.
    for package in ["tally", "tally-lab"] {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(project()).args([
            "build",
            "--profile",
            "dist",
            "--locked",
            "--quiet",
            "--package",
            package,
        ]);
        // These take the place of those in the configuration.
        cargo
            .env("TALLY_WITHOUT_SOURCE", "1")
            .env("RUSTFLAGS", format!("-Ctarget-feature=+crt-static {}", remapped()));
        if !cargo.arg("--target-dir").arg(&target).status().context("cannot start cargo")?.success() {
            bail!("{package} does not compile");
        }
    }
    Ok(target.join("x86_64-unknown-linux-gnu/dist"))
}

/// Returns the compiler's options that put other names in place of this machine's paths.
fn remapped() -> String {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let project = project().canonicalize().unwrap_or_else(|_| project());
    let option = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let home = home.map_or_else(String::new, |home| option(&home, "cargo"));
    format!("{home} {}", option(&project, "tally"))
}
