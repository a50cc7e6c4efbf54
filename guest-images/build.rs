//! Compiles the programs that go into guests: they run without a library, so the C compiler that Rust links with does.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=payloads");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    compile(
        "payload",
        &out,
        &[
            "-m32",
            "-march=i686",
            "-mgeneral-regs-only",
            "-O1",
            "-fno-strict-aliasing",
            "-Wl,-T,payloads/payload.ld",
            "-Wl,-m,elf_i386",
            "-Wl,-z,max-page-size=4096",
            "payloads/start.S",
            "payloads/instructions.S",
            "payloads/payload.c",
            "payloads/text.c",
            "payloads/cpu.c",
            "payloads/apic.c",
            "payloads/pmu.c",
            "payloads/amd_pmu.c",
            "payloads/intel_pmu.c",
            "payloads/hostile.c",
        ],
    );
    for program in ["outb", "loop"] {
        compile(program, &out, &[&format!("payloads/{program}.S")]);
    }
}

fn compile(name: &str, out: &str, arguments: &[&str]) {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .args(["-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-no-pie", "-fno-stack-protector"])
        .args(["-fno-asynchronous-unwind-tables", "-fcf-protection=none", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wl,--build-id=none", "-s", "-o"])
        .arg(Path::new(out).join(name))
        .args(arguments)
        .status()
        .unwrap_or_else(|error| panic!("cannot run the C compiler `{compiler}`: {error}"));
    assert!(status.success(), "`{compiler}` could not compile {name}");
}
