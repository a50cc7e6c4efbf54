//! Embeds the lab CPU's sources, so that the installed program can build it on any machine. Compiles the programs of
//! known length.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs in `cpu/programs.S` with the N of each. `src/self_test.rs` has their counts.
const PROGRAMS: [(&str, u32); 10] = [
    ("loop", 10_000_000),
    ("rep", 100_000),
    ("fault", 1000),
    ("ud", 1000),
    ("call", 100_000),
    ("alternate", 100_000),
    ("never", 100_000),
    ("stream", 4),
    ("small", 10),
    ("operands", 1000),
];

fn main() {
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    embed_cpu(&root.join("cpu"), &out);
    println!("cargo::rerun-if-changed=programs");
    compile(&root.join("programs/loop.S"), &out.join("loop"), &[]);
    let mut table = String::from("&[\n");
    for (name, size) in PROGRAMS {
        let options = [&*format!("-DPROGRAM_{name}"), &*format!("-DN={size}")];
        let program = out.join(format!("known-{name}"));
        compile(&root.join("cpu/programs.S"), &program, &options);
        writeln!(table, "    ({name:?}, include_bytes!({:?})),", program.display().to_string())
            .expect("writing to a string cannot fail");
    }
    table.push_str("]\n");
    fs::write(out.join("programs.rs"), table).expect("OUT_DIR can be written");
    // Firmware images are flat binaries.
    let flat = ["-Wl,--oformat=binary", "-Wl,-Ttext=0"];
    for image in ["guest-loop.rom", "guest-exits.rom", "boot.rom"] {
        compile(&root.join(format!("programs/{image}.S")), &out.join(image), &flat);
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()))
        .map(|entry| entry.expect("a directory can be read to its end").path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}

fn embed_cpu(folder: &Path, out: &Path) {
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut table = String::from("&[\n");
    let folders = [folder.to_owned(), folder.join("x86_64"), folder.join("riscv64"), folder.join("bochs")];
    for path in folders.iter().flat_map(|folder| files(folder)) {
        let name = path.strip_prefix(folder).expect("the file is in the directory").display().to_string();
        if [".c", ".cc", ".h", ".in", ".mak", ".patch"].iter().any(|suffix| name.ends_with(suffix)) {
            writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string())
                .expect("writing to a string cannot fail");
        }
    }
    table.push_str("]\n");
    fs::write(out.join("cpu_files.rs"), table).expect("OUT_DIR can be written");
}

/// Compiles an assembly program that uses no library. The C compiler with which Rust links is enough for that.
fn compile(source: &Path, program: &Path, options: &[&str]) {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none"])
        .args(options)
        .arg("-o")
        .args([program, source])
        .status()
        .unwrap_or_else(|error| panic!("cannot run the C compiler `{compiler}`: {error}"));
    assert!(status.success(), "`{compiler}` could not compile {}", source.display());
}
