//! Compiles the programs that go into guests: those that run without a library with the C compiler that Rust links with,
//! and the agent with a cargo of its own, because it is another program than this build makes it, small and for Linux.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets CARGO_CFG_TARGET_ARCH");
    let target = match &*arch {
        "x86_64" => "x86_64-unknown-linux-gnu",
        "riscv64" => "riscv64gc-unknown-linux-gnu",
        _ => panic!("there are no guests for {arch}"),
    };
    if arch == "x86_64" {
        compile_payloads(&out);
    }
    for input in ["agent/Cargo.toml", "agent/src", "../Cargo.toml", "../Cargo.lock"] {
        println!("cargo::rerun-if-changed={input}");
    }
    build_agent(target, Path::new(&out));
}

/// What needs no library. Other kinds of processor have none that has to be compiled.
fn compile_payloads(out: &str) {
    println!("cargo::rerun-if-changed=payloads");
    compile(
        "payload",
        out,
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
        compile(program, out, &[&format!("payloads/{program}.S")]);
    }
}

/// Builds the agent where no other cargo builds, so that neither waits for the other. Its dependency is one of this crate
/// as well, so it is there already.
fn build_agent(target: &str, out: &Path) {
    // Its place in memory is fixed, so that nothing has to be relocated when it starts.
    let mut flags = "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static".to_owned();
    // How to talk to the linker is all that it takes from this build's.
    let of_this_build = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    for flag in of_this_build.split('\x1f').filter(|flag| flag.starts_with("-Clinker-flavor=")) {
        flags = flags + "\x1f" + flag;
    }
    let cargo = env::var("CARGO").expect("cargo sets CARGO");
    let folder = out.join("agent-target");
    let status = Command::new(&cargo)
        .args(["build", "--quiet", "--offline", "--locked", "--package", "guest-agent", "--bin", "agent"])
        .args(["--profile", "agent", "--target", target, "--target-dir"])
        .arg(&folder)
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        // What checks this build would take the place of the compiler in that one.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .status()
        .unwrap_or_else(|error| panic!("cannot run `{cargo}`: {error}"));
    assert!(status.success(), "`{cargo}` could not build the guest's agent");
    let built = folder.join(target).join("agent/agent");
    fs::copy(&built, out.join("agent"))
        .unwrap_or_else(|error| panic!("cannot copy {}: {error}", built.display()));
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
