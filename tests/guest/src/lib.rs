//! Shared parts of the tests with real guests: the program under test, bare-metal guests on this machine's own KVM, a
//! pseudo-terminal for tests to type on, and perf in Linux guests.

pub mod debian;
pub mod host;
pub mod lab;
pub mod machine;
pub mod model;
pub mod perf;
pub mod programs;
pub mod prometheus;
pub mod suite;
pub mod terminal;

use std::env;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use guest_images::payloads::BARE_METAL;

/// Packages of each cargo invocation. `tally` and `tally-lab` are built alone, as users build them: in one invocation
/// with other packages, cargo would unify the features of their dependencies.
const BUILDS: [&[&str]; 3] = [
    &["--package=tally"],
    &["--package=tally-lab"],
    &["--package=guest-tests", "--package=perf-features", "--package=ebb-promises", "--package=tally-ebb"],
];

/// Returns the path of a program of this workspace. The first call builds all programs, because cargo builds a test
/// without the programs that the test runs. They are release builds: the lab simulates every instruction that they
/// execute.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let test = env::current_exe().expect("a process can find its program");
        let target = test.ancestors().nth(3).expect("tests are in TARGET/PROFILE/deps");
        for packages in BUILDS {
            build(&[&["--release", "--bins"], packages].concat());
        }
        target.join("release")
    });
    folder.join(name)
}

/// Returns an example of a crate, and builds it first.
pub fn example(package: &str, name: &str) -> PathBuf {
    let test = env::current_exe().expect("a process can find its program");
    let profile = test.ancestors().nth(2).expect("tests are in TARGET/PROFILE/deps");
    build(&["--package", package, "--example", name]);
    profile.join("examples").join(name)
}

/// Returns the cargo that runs this test, for commands in the workspace.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo
}

/// Builds a part of the workspace.
fn build(selection: &[&str]) {
    let status = cargo().args(["build", "--quiet"]).args(selection).status().expect("cargo runs");
    assert!(status.success(), "does not build: {selection:?}");
}

/// Returns true if this machine's KVM can be used. If not, prints that the calling test is skipped, and why.
pub fn has_kvm() -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: /dev/kvm: {error}");
            false
        }
    }
}

/// Returns the path of the bare-metal test program, as a temporary file.
pub fn payload() -> &'static str {
    static FILE: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("temporary folders can be made");
        let path = folder.path().join("payload");
        std::fs::write(&path, BARE_METAL).expect("a temporary file can be written");
        let text = path.to_str().expect("temporary paths are plain text").to_owned();
        (folder, text)
    });
    path
}

/// Returns a `tally run` command for the bare-metal test program with `words` as its command line. The guest sees no
/// PMU, whatever this machine has.
pub fn bare_metal(words: &str) -> Command {
    let mut command = Command::new(program("tally"));
    command.args(["run", "--pmu", "none", "--kernel", payload(), "--append", words]).stdin(Stdio::null());
    command
}

/// Returns what a finished program wrote to its standard output.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns what a finished program wrote to its standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Creates an executable temporary file with this content.
pub fn temporary(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("temporary files can be made");
    file.write_all(content).expect("a temporary file can be written");
    let permissions = std::fs::Permissions::from_mode(0o755);
    file.as_file().set_permissions(permissions).expect("its permissions can be set");
    file
}
