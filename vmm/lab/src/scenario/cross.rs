//! Compiles this project's programs for RISC-V hosts, and lints their code.
//!
//! The toolchain with which the project is compiled for this machine needs no RISC-V target. The compiler and the
//! standard library for RISC-V come from a newer release of the distribution. They are unpacked, not installed, and run
//! with the libraries of their own release. The compiled programs are linked statically. Every call runs cargo, which
//! recompiles a program if its source has changed.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Repository;
use guest_images::{Arch, Progress, Release, Suite, run_tool};

use crate::error::{Error, Result};
use crate::simulator::source::source;

const SUITE: Suite = Suite::Trixie;
/// Packages of this machine's architecture: the compiler, a linker, and the C library for RISC-V.
const PACKAGES: [&str; 5] = [
    "rustc-web",
    "rust-web-clippy",
    "binutils-riscv64-linux-gnu",
    "libc6-dev-riscv64-cross",
    "libgcc-14-dev-riscv64-cross",
];
/// Package of RISC-V's architecture.
const STANDARD_LIBRARY: &str = "libstd-rust-web-dev";
const RECIPE: &str = "1";

/// Cargo's arguments for the code that runs on RISC-V hosts: whole packages, and of this package the workload of
/// guests.
const LINTED: [&str; 2] = [
    "--all-targets --package tally --package tally-machine --package vpmu --package devices --package guest-agent \
     --package perf-features",
    "--package tally-lab --bin pmu-workload",
];

const TARGET: &str = "riscv64gc-unknown-linux-gnu";
const RUSTFLAGS: &str = "-Clinker-flavor=ld -Ctarget-feature=+crt-static -Crelocation-model=static";

/// Start of the wrapper scripts: defines a function that runs a program with the packages' dynamic linker and
/// libraries.
const START: &str = "\
#!/bin/sh
root=${0%/*}/root
libraries=$root/usr/lib/x86_64-linux-gnu
start() {
    exec \"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries\" \"$@\"
}
";
const COMPILE: &str = "start \"$root/usr/bin/rustc\" --sysroot \"$root/usr\" \"$@\"\n";
/// Runs clippy. Cargo passes the compiler's name as the first argument.
const LINT: &str = "start \"$root/usr/bin/clippy-driver\" \"$@\" --sysroot \"$root/usr\"\n";
/// Runs the linker with the startup files of the C library, which rustc otherwise leaves to a C compiler.
const LINK: &str = "\
c=$root/usr/riscv64-linux-gnu/lib gcc=$root/usr/lib/gcc-cross/riscv64-linux-gnu/14
start \"$root/usr/bin/riscv64-linux-gnu-ld.bfd\" \"$c/crt1.o\" \"$c/crti.o\" \"$gcc/crtbeginT.o\" \"$@\" \\
    -L\"$c\" -L\"$gcc\" --start-group -lgcc -lgcc_eh -lc --end-group \"$gcc/crtend.o\" \"$c/crtn.o\"
";

/// Compiles the unit tests of one of this project's libraries for the RISC-V host. Returns the path of the program.
pub fn unit_tests(package: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling the tests of {package} for riscv64"));
    compile(package, &["test", "--no-run", "--lib"], &toolchain, progress)
}

/// Compiles the only program of one of this project's packages for the RISC-V host. Returns the path of the program.
pub fn program(package: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling {package} for riscv64"));
    compile(package, &["build", "--bins", "--profile", "lab"], &toolchain, progress)
}

/// Compiles the only program of one of this project's packages for a release, with more options of the compiler.
/// Returns the path of the program.
pub fn released(package: &str, options: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling {package} for riscv64"));
    let mut command = cargo(&toolchain);
    command.env(variable("RUSTFLAGS"), format!("{RUSTFLAGS} {options}"));
    command.args(["build", "--bins", "--locked", "--profile", "dist", "--target-dir", "target/dist"]);
    run(command, package, progress)
}

/// Compiles one of this package's programs for the RISC-V host. Returns the path of the program.
pub fn own_program(name: &str, progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.long_step(format!("compiling {name} for riscv64"));
    compile(env!("CARGO_PKG_NAME"), &["build", "--bin", name, "--profile", "lab"], &toolchain, progress)
}

/// Compiles the default guest's agent for guests on the RISC-V host. Returns the path of the program.
pub fn agent(progress: &mut Progress) -> Result<PathBuf> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.step("compiling the guest's agent for riscv64");
    compile("guest-agent", &["build", "--bins", "--profile", "agent"], &toolchain, progress)
}

/// Runs clippy on the code that runs on RISC-V hosts, with warnings as errors. Returns true if there were none.
pub fn lint(progress: &mut Progress) -> Result<bool> {
    let toolchain = toolchain(&Cache::open()?, progress)?;
    progress.done();
    let mut passed = true;
    for arguments in LINTED {
        let mut command = cargo(&toolchain);
        command.args(["check", "--quiet"]).args(arguments.split_whitespace());
        command.env("RUSTC_WORKSPACE_WRAPPER", toolchain.join("clippy"));
        let status = command.env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__").status();
        passed &= status.map_err(Error::system("run cargo"))?.success();
    }
    Ok(passed)
}

/// Runs cargo with arguments that compile one program. Returns the path of the program.
fn compile(package: &str, arguments: &[&str], toolchain: &Path, progress: &mut Progress) -> Result<PathBuf> {
    let mut command = cargo(toolchain);
    command.args(arguments);
    run(command, package, progress)
}

/// Runs a cargo that compiles one program. Returns the path of the program.
fn run(mut command: Command, package: &str, progress: &mut Progress) -> Result<PathBuf> {
    command.args(["--message-format", "json-render-diagnostics", "--package", package]);
    let messages = run_tool(&mut command, "cargo")?;
    progress.done();
    let (_, path) = messages.rsplit_once("\"executable\":\"").ok_or(Error::NoProgram)?;
    path.split('"').next().map(PathBuf::from).ok_or(Error::NoProgram)
}

/// Returns the name of the variable that sets a target's option.
fn variable(name: &str) -> String {
    format!("CARGO_TARGET_{}_{name}", TARGET.replace('-', "_").to_uppercase())
}

/// Returns a command for the cargo of this build, with the compiler for RISC-V and a target directory of its own.
fn cargo(toolchain: &Path) -> Command {
    let project = source().unwrap_or(Path::new(".")).join("../..");
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for variable in ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
        command.env_remove(variable);
    }
    command
        .env("RUSTC", toolchain.join("rustc"))
        .env(variable("LINKER"), toolchain.join("ld"))
        .env(variable("RUSTFLAGS"), RUSTFLAGS)
        .env("CARGO_BUILD_TARGET", TARGET)
        .env("CARGO_TARGET_DIR", project.join("target/riscv64"))
        .current_dir(project);
    command
}

/// Returns the directory of the scripts that run compiler, clippy and linker, and unpacks the packages if needed.
fn toolchain(cache: &Cache, progress: &mut Progress) -> Result<PathBuf> {
    if source().is_none() {
        return Err(Error::NoSource);
    }
    let mut key = Key::new("riscv64-toolchain").with(RECIPE).with(SUITE.name());
    key = PACKAGES.iter().chain([&STANDARD_LIBRARY, &START, &COMPILE, &LINT, &LINK]).fold(key, Key::with);
    cache.entry(&key, progress, |progress, entry| {
        let root = entry.join("root");
        let repository = Repository::open(cache, SUITE, progress)?;
        let mut packages = repository.resolve(&PACKAGES)?;
        packages.retain(|package| package.is_library() || PACKAGES.contains(&package.name.as_str()));
        repository.unpack(&packages, &root, progress)?;
        drop(repository);
        let repository = Repository::open(cache, Release { suite: SUITE, arch: Arch::Riscv64 }, progress)?;
        let mut packages = repository.resolve(&[STANDARD_LIBRARY])?;
        packages.retain(|package| package.name == STANDARD_LIBRARY);
        repository.unpack(&packages, &root, progress)?;
        for (name, what) in [("rustc", COMPILE), ("clippy", LINT), ("ld", LINK)] {
            let path = entry.join(name);
            fs::write(&path, START.to_owned() + what).map_err(Error::file("write", &path))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .map_err(Error::file("make executable", &path))?;
        }
        Ok(())
    })
}
