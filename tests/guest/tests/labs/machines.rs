//! Tests of what a new user sees on machines that are not this one: Debian 12, Debian 13, and a distribution without
//! apt and dpkg. Their root folders are made of packages, and have nothing of Tally's; kernel and processor are this
//! machine's. Making them takes 20 s of a core each, once; the default guest 10 s on each.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use guest_images::Suite;
use guest_tests::machine::Machine;
use guest_tests::suite::{Test, second_tier, third_tier};
use guest_tests::{example, stderr, stdout, tests};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first_commands = tests![
        the_first_command_runs_on_debian_12,
        the_first_command_runs_on_debian_13,
        the_first_command_names_what_a_distribution_without_apt_lacks,
    ];
    [
        second_tier(tests![the_default_guest_is_the_same_to_the_byte_on_every_distribution]),
        third_tier(first_commands),
    ]
    .concat()
}

/// The folder of a new user's cache in a machine.
const CACHE: &str = "root/.cache/tally";

/// Builds the default guest in a machine, and returns its kernel and its initrd.
fn default_guest(machine: &Machine, builder: &Path) -> [Vec<u8>; 2] {
    fs::copy(builder, machine.path("tmp/default-guest")).expect("it is a folder of this test");
    let built = machine.run(&["/tmp/default-guest"]);
    assert!(built.status.success(), "{}", stderr(&built));
    let paths = stdout(&built);
    ["kernel ", "initrd "].map(|name| {
        let path = paths.lines().find_map(|line| line.strip_prefix(name)).expect("each has a line");
        fs::read(machine.path(path.trim_start_matches('/'))).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

fn the_default_guest_is_the_same_to_the_byte_on_every_distribution() {
    let builder = example("guest-images", "default-guest");
    // Without any cache, everything comes over the network, and without apt only by what the program has in itself.
    let Some(elsewhere) = Machine::debian(Suite::Trixie).map(Machine::without_apt) else { return };
    let first = default_guest(&elsewhere, &builder);
    assert!(first.iter().all(|file| file.len() > 1 << 20), "{:?}", first.each_ref().map(Vec::len));
    for suite in [Suite::Bookworm, Suite::Trixie] {
        let Some(machine) = Machine::debian(suite) else { return };
        // The same lists and packages again would only cost time.
        copy(&elsewhere.path(CACHE), &machine.path(CACHE), &["apt", "downloads", "indexes"]);
        assert!(default_guest(&machine, &builder) == first, "{suite}: the files differ");
    }
}

/// Copies folders of a cache to another one.
fn copy(from: &Path, to: &Path, folders: &[&str]) {
    fs::create_dir_all(to).expect("it is a folder of this test");
    for folder in folders.iter().map(|folder| from.join(folder)).filter(|folder| folder.exists()) {
        let copied = Command::new("cp").arg("-a").arg(&folder).arg(to).status().expect("there is cp");
        assert!(copied.success(), "{}", folder.display());
    }
}

/// Clones the project in a machine, and executes the README's first command there.
fn first_command(machine: &Machine) -> Output {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let clone = Command::new("git")
        .args(["clone", "--quiet"])
        .arg(project.canonicalize().expect("the project is there"))
        .arg(machine.path("root/tally"))
        .status()
        .expect("there is git");
    assert!(clone.success());
    let readme = fs::read_to_string(machine.path("root/tally/README.md")).expect("the project has one");
    let command = readme.lines().skip_while(|line| *line != "```sh").nth(1).expect("the README has commands");
    let command = command.split('#').next().expect("a line has a beginning");
    machine.run(&["sh", "-c", &format!("cd ~/tally && {command}")])
}

/// Checks what the README promises of its first command: counts and samples of a guest, whatever the machine was.
fn counts_and_samples(suite: Suite) {
    let Some(machine) = Machine::debian(suite) else { return };
    let done = first_command(&machine);
    // `perf stat` prints to the standard error.
    let text = stdout(&done) + &stderr(&done);
    println!("{text}");
    assert!(done.status.success(), "{text}");
    for line in ["instructions ", "cycles", "branches", "branch-misses", "# Samples: ", "chacha_permute"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let prints = |what: &str| text.lines().any(|line| line.trim_end().ends_with(what));
    assert!(!prints("<not supported>") && !prints("<not counted>"), "{text}");
}

fn the_first_command_runs_on_debian_12() {
    counts_and_samples(Suite::Bookworm);
}

fn the_first_command_runs_on_debian_13() {
    counts_and_samples(Suite::Trixie);
}

fn the_first_command_names_what_a_distribution_without_apt_lacks() {
    let Some(machine) = Machine::debian(Suite::Trixie).map(Machine::without_apt) else { return };
    let done = first_command(&machine);
    let said = stderr(&done);
    println!("{said}");
    assert!(!done.status.success(), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(
        last.contains("dnf install") && last.contains("ninja-build") && last.contains("glib2-devel"),
        "{said}"
    );
    assert!(!said.contains("panicked"), "{said}");
}
