//! What the tests with real guests share: the program under test, bare-metal guests on this machine's own KVM, a
//! terminal for tests to type on, and perf in Linux guests.

pub mod debian;
pub mod lab;
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

/// The packages that are built together. What users build is by itself: with others its libraries might have other features.
const BUILDS: [&[&str]; 3] =
    [&["--package=tally"], &["--package=tally-lab"], &["--package=guest-tests", "--package=perf-features"]];

/// A program of this workspace, built as users build it: in the lab every instruction of it is simulated. Cargo builds a test
/// without the programs that it runs, so the first caller has it build them.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let test = env::current_exe().expect("a process can find its program");
        let profiles = test.ancestors().nth(3).expect("tests are in TARGET/PROFILE/deps");
        for packages in BUILDS {
            let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            build.args(["build", "--quiet", "--release", "--bins"]).args(packages);
            let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
            assert!(status.success(), "these programs do not build: {packages:?}");
        }
        profiles.join("release")
    });
    folder.join(name)
}

/// Whether this machine's KVM can be used; if it cannot, says that the calling test is skipped, and why.
pub fn has_kvm() -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: /dev/kvm: {error}");
            false
        }
    }
}

/// Our bare-metal program as a file.
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

/// `tally run` with our bare-metal program, which does what these words say. It sees no PMU, whatever this machine has.
pub fn bare_metal(words: &str) -> Command {
    let mut command = Command::new(program("tally"));
    command.args(["run", "--pmu", "none", "--kernel", payload(), "--append", words]).stdin(Stdio::null());
    command
}

/// What a finished program wrote to its standard output.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a finished program wrote to its standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A temporary file with this content, executable.
pub fn temporary(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("temporary files can be made");
    file.write_all(content).expect("a temporary file can be written");
    let permissions = std::fs::Permissions::from_mode(0o755);
    file.as_file().set_permissions(permissions).expect("its permissions can be set");
    file
}
