//! Compiles this project's programs for RISC-V hosts, and lints their code.
//!
//! The toolchain that compiles it for this machine need not know of RISC-V. A newer release of the distribution has a compiler
//! that does, with its standard library: it is unpacked, not installed, and runs with the libraries of its own release. What
//! is compiled is one file that needs no library. Every call asks cargo whether it is still of today's source.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Apt;
use guest_images::{Arch, Progress, Release, Suite, run_tool};

use crate::{Error, Result};

const SUITE: Suite = Suite::Trixie;
/// Of this machine: the compiler, a linker, and what is linked.
const PACKAGES: [&str; 5] = [
    "rustc-web",
    "rust-web-clippy",
    "binutils-riscv64-linux-gnu",
    "libc6-dev-riscv64-cross",
    "libgcc-14-dev-riscv64-cross",
];
/// Of RISC-V.
const STANDARD_LIBRARY: &str = "libstd-rust-web-dev";
const RECIPE: &str = "1";

/// What runs on RISC-V hosts, as cargo is told of it: whole packages, and of this one the workload that guests run.
const LINTED: [&str; 2] = [
    "--all-targets --package tally --package tally-machine --package vpmu --package devices --package guest-agent \
     --package perf-features",
    "--package tally-lab --bin pmu-workload",
];

const TARGET: &str = "riscv64gc-unknown-linux-gnu";
const RUSTFLAGS: &str = "-Clinker-flavor=ld -Ctarget-feature=+crt-static -Crelocation-model=static";

/// Starts a program of the packages with their dynamic linker and libraries.
const START: &str = "\
#!/bin/sh
root=${0%/*}/root
libraries=$root/usr/lib/x86_64-linux-gnu
start() {
    exec \"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries\" \"$@\"
}
";
const COMPILE: &str = "start \"$root/usr/bin/rustc\" --sysroot \"$root/usr\" \"$@\"\n";
/// Cargo puts the compiler's name in front of its arguments.
const LINT: &str = "start \"$root/usr/bin/clippy-driver\" \"$@\" --sysroot \"$root/usr\"\n";
/// The compiler would leave to a C compiler which parts of the C library begin and end a program.
const LINK: &str = "\
c=$root/usr/riscv64-linux-gnu/lib gcc=$root/usr/lib/gcc-cross/riscv64-linux-gnu/14
start \"$root/usr/bin/riscv64-linux-gnu-ld.bfd\" \"$c/crt1.o\" \"$c/crti.o\" \"$gcc/crtbeginT.o\" \"$@\" \\
    -L\"$c\" -L\"$gcc\" --start-group -lgcc -lgcc_eh -lc --end-group \"$gcc/crtend.o\" \"$c/crtn.o\"
";

/// The unit tests of one of this project's libraries, as a program for the RISC-V host.
pub fn unit_tests(package: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling the tests of {package} for riscv64"));
    compile(package, &["test", "--no-run", "--lib"], &toolchain, progress)
}

/// The program of one of this project's packages, which has no other, for the RISC-V host.
pub fn program(package: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling {package} for riscv64"));
    compile(package, &["build", "--bins", "--profile", "lab"], &toolchain, progress)
}

/// One of the programs of this package, for the RISC-V host.
pub fn own_program(name: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling {name} for riscv64"));
    compile(env!("CARGO_PKG_NAME"), &["build", "--bin", name, "--profile", "lab"], &toolchain, progress)
}

/// The agent of the default guest, for guests on the RISC-V host.
pub fn agent(progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.step("compiling the guest's agent for riscv64");
    compile("guest-agent", &["build", "--bins", "--profile", "agent"], &toolchain, progress)
}

/// Runs clippy on what runs on RISC-V hosts, and lets no warning pass. Returns whether there was none.
pub fn lint(progress: &mut Progress) -> Result<bool> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.done();
    let mut passed = true;
    for what in LINTED {
        let mut command = cargo(&toolchain);
        command.args(["check", "--quiet"]).args(what.split_whitespace());
        command.env("RUSTC_WORKSPACE_WRAPPER", toolchain.join("clippy"));
        let status = command.env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__").status();
        passed &= status.map_err(Error::system("run cargo"))?.success();
    }
    Ok(passed)
}

/// Has cargo compile what is one program, and say where it is.
fn compile(package: &str, how: &[&str], toolchain: &Path, progress: &mut Progress) -> Result<PathBuf> {
    let mut command = cargo(toolchain);
    command.args(how).args(["--message-format", "json-render-diagnostics", "--package", package]);
    let messages = run_tool(&mut command, "cargo")?;
    progress.done();
    let (_, path) = messages.rsplit_once("\"executable\":\"").ok_or(Error::NoProgram)?;
    path.split('"').next().map(PathBuf::from).ok_or(Error::NoProgram)
}

/// The cargo of this build, with another compiler, where no other builds.
fn cargo(toolchain: &Path) -> Command {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for variable in ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
        command.env_remove(variable);
    }
    let variable = |name| format!("CARGO_TARGET_{}_{name}", TARGET.replace('-', "_").to_uppercase());
    command
        .env("RUSTC", toolchain.join("rustc"))
        .env(variable("LINKER"), toolchain.join("ld"))
        .env(variable("RUSTFLAGS"), RUSTFLAGS)
        .env("CARGO_BUILD_TARGET", TARGET)
        .env("CARGO_TARGET_DIR", project.join("target/riscv64"))
        .current_dir(project);
    command
}

/// The folder of the compiler and the linker.
fn toolchain(cache: &Cache, progress: &mut Progress) -> Result<PathBuf> {
    let mut key = Key::new("riscv64-toolchain").with(RECIPE).with(SUITE.name());
    key = PACKAGES.iter().chain([&STANDARD_LIBRARY, &START, &COMPILE, &LINT, &LINK]).fold(key, Key::with);
    cache.entry(&key, progress, |progress, entry| {
        let root = entry.join("root");
        let apt = Apt::open(cache, SUITE, progress)?;
        let mut packages = apt.resolve(&PACKAGES)?;
        packages.retain(|package| package.is_library() || PACKAGES.contains(&package.name.as_str()));
        apt.unpack(&packages, &root, progress)?;
        drop(apt);
        let apt = Apt::open(cache, Release { suite: SUITE, arch: Arch::Riscv64 }, progress)?;
        let mut packages = apt.resolve(&[STANDARD_LIBRARY])?;
        packages.retain(|package| package.name == STANDARD_LIBRARY);
        apt.unpack(&packages, &root, progress)?;
        for (name, what) in [("rustc", COMPILE), ("clippy", LINT), ("ld", LINK)] {
            let path = entry.join(name);
            fs::write(&path, START.to_owned() + what).map_err(Error::file("write", &path))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .map_err(Error::file("make a program of", &path))?;
        }
        Ok(())
    })
}
