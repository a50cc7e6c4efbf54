//! What cargo and the compiler make of the sources.
//!
//! Whether the compiler has kept what it needed: Rust 1.95 removes a comparison whose result is still used, if the
//! block that uses it ends with a branch on it (<https://github.com/rust-lang/rust/issues/158206>, mended by its pull
//! request 158214): what is used then is a variable that nothing has written. A program reads whatever the optimiser
//! makes of that. So these tests look for such variables in what the compiler has made of a program ("MIR").

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use guest_tests::cargo;
use serde_json::Value;

/// A variable of a function, by its number.
type Variable = u32;

/// Returns the functions that read a truth value that they never write, each with the variable. Other variables may
/// have a type without values or without a size.
fn reads_of_nothing(mir: &str) -> Vec<(&str, Variable)> {
    let mut found = Vec::new();
    let mut lines = mir.lines();
    while let Some(head) = lines.find(|line| !line.starts_with([' ', '}']) && line.ends_with('{')) {
        // Arguments are written by the caller; the variable 0 is the result.
        let mut written: BTreeSet<_> = variables(head).chain([0]).collect();
        let (mut read, mut truths) = (BTreeSet::new(), BTreeSet::new());
        for line in lines.by_ref().take_while(|line| *line != "}").map(str::trim_start) {
            truths.extend(line.strip_suffix(": bool;").and_then(|line| variables(line).last()));
            let (target, value) = line.split_once(" = ").unwrap_or(("", line));
            written.extend(variables(target).next());
            written.extend(line.split('&').skip(1).filter_map(|reference| variables(reference).next()));
            let operands =
                ["copy ", "move ", "discriminant("].iter().flat_map(|how| value.split(how).skip(1));
            read.extend(operands.filter_map(place));
        }
        let of_nothing = read.difference(&written).filter(|variable| truths.contains(variable));
        found.extend(of_nothing.map(|variable| (head, *variable)));
    }
    found
}

/// Returns the variables that a text names.
fn variables(text: &str) -> impl Iterator<Item = Variable> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(move |c| !is_part(c)).filter_map(|word| word.strip_prefix('_')?.parse().ok())
}

/// Returns the variable at the beginning of a text, which may be in parentheses and behind pointers.
fn place(text: &str) -> Option<Variable> {
    let text = text.trim_start_matches(['(', '*']);
    let name = text.strip_prefix('_')?;
    name[..name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len())].parse().ok()
}

/// Compiles a program of one file with optimisation.
fn compile(source: &str, folder: &Path, options: &[&str]) {
    let file = folder.join("program.rs");
    fs::write(&file, source).expect("it is a folder of this test");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args(["-O", "--edition=2024"])
        .args(options)
        .arg(file)
        .current_dir(folder)
        .status()
        .expect("there is a compiler");
    assert!(compiled.success());
}

/// With Rust 1.95, `flag` is printed as false: nothing writes `two` where it is used.
const CASE: &str = "\
fn clear_if_two(number: u8, flag: &mut bool) -> bool {
    let two = number == 2;
    *flag &= !two;
    two
}

fn main() {
    let mut flag = true;
    if clear_if_two(std::hint::black_box(1), &mut flag) {
        println!(\"two\");
    }
    print!(\"{flag}\");
}
";

#[test]
fn a_comparison_that_the_compiler_has_removed_is_found() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    compile(CASE, folder.path(), &["--emit=mir,link"]);
    let mir = fs::read_to_string(folder.path().join("program.mir")).expect("it was made");
    let run = Command::new(folder.path().join("program")).output().expect("it was made");
    let is_right = String::from_utf8_lossy(&run.stdout) == "true";
    let found = reads_of_nothing(&mir);
    assert_eq!(found.is_empty(), is_right, "{found:?}");
    assert!(found.iter().all(|(function, _)| function.starts_with("fn main()")), "{found:?}");
}

/// Compiles all that is in `tally` once more: eight minutes of a core. What others have written is kept for the next
/// time: then it is one or two.
#[test]
#[ignore = "it compiles everything anew"]
fn nothing_in_tally_reads_a_variable_that_was_never_written() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mir");
    let built = cargo()
        .args(["build", "--quiet", "--profile=lab", "--package=tally", "--lib", "--message-format=json"])
        .env("CARGO_TARGET_DIR", &folder)
        .env("RUSTFLAGS", "--emit=mir -C target-feature=+crt-static")
        .stderr(Stdio::inherit())
        .output()
        .expect("there is cargo");
    assert!(built.status.success());
    // What runs while compiling is compiled without these flags.
    let of_target = folder.join("x86_64-unknown-linux-gnu");
    let messages = String::from_utf8(built.stdout).expect("it is JSON");
    let files: Vec<_> = messages.lines().filter_map(|message| mir_file(message, &of_target)).collect();
    assert!(files.len() > 50, "{}", files.len());
    for file in files {
        let mir = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(reads_of_nothing(&mir), [], "{}", file.display());
    }
}

/// Returns where the MIR of a library is that cargo says it has compiled, now or before: beside what others need to
/// know of it.
fn mir_file(message: &str, of_target: &Path) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).expect("it is JSON");
    let names = message["filenames"].as_array()?;
    let library = names.iter().find_map(|name| name.as_str()?.strip_suffix(".rmeta"))?;
    let (folder, name) = library.rsplit_once("/lib")?;
    let folder = Path::new(folder);
    folder.starts_with(of_target).then(|| folder.join(format!("{name}.mir")))
}

/// Returns the crates that a program consists of, each with the features that it is compiled with.
fn crates_of(package: &str) -> BTreeMap<String, String> {
    let tree = cargo()
        .args(["tree", "--locked", "--package", package, "--edges", "normal", "--no-dedupe"])
        .args(["--prefix", "none", "--format", "{p}|{f}"])
        .output()
        .expect("there is cargo");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let text = String::from_utf8(tree.stdout).expect("names are text");
    text.lines().filter_map(|line| line.split_once('|')).map(|(name, of)| (name.into(), of.into())).collect()
}

#[test]
fn the_two_programs_of_the_first_command_share_what_they_are_compiled_of() {
    let [tally, mut lab] = ["tally", "tally-lab"].map(crates_of);
    lab.retain(|name, features| tally.get(name).is_some_and(|others| others != features));
    assert!(tally.keys().any(|name| name.starts_with("guest-images")));
    // Whatever uses one of these is compiled twice, and takes minutes of the first command.
    assert_eq!(lab, BTreeMap::new(), "`tally` has other features of these");
}
