//! Compiles the programs that run in guests. The payloads are compiled with the C compiler. The agent is compiled with
//! a separate cargo process, because it needs another profile and other flags than this build: it must be small and
//! statically linked.

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
    for input in
        ["agent/Cargo.toml", "agent/src", "ebb/Cargo.toml", "ebb/src", "../Cargo.toml", "../Cargo.lock"]
    {
        println!("cargo::rerun-if-changed={input}");
    }
    build_agent(target, Path::new(&out));
}

/// Compiles the x86-64 payloads. Those for RISC-V are constants in `src/payloads/riscv64.rs`.
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
            "payloads/counting.c",
            "payloads/msr.c",
            "payloads/pmu.c",
            "payloads/rules.c",
            "payloads/amd_pmu.c",
            "payloads/intel_pmu.c",
            "payloads/hostile.c",
        ],
    );
    for program in ["outb", "loop"] {
        compile(program, out, &[&format!("payloads/{program}.S")]);
    }
}

/// Builds the agent in a target directory of its own, because the outer cargo has locked the usual one. All profiles
/// have the same agent, so they share it. Its dependencies are also those of the crates that use this one, so they have
/// been downloaded already.
fn build_agent(target: &str, out: &Path) {
    // Not position-independent, so that no relocations are needed at its start. `ebb-sample`, which is in it, follows
    // frame pointers.
    let mut flags =
        "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static\x1f-Cforce-frame-pointers=yes".to_owned();
    // Of this build's flags, only the linker flavor is passed on.
    let outer_flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    for flag in outer_flags.split('\x1f').filter(|flag| flag.starts_with("-Clinker-flavor=")) {
        flags = flags + "\x1f" + flag;
    }
    let cargo = env::var("CARGO").expect("cargo sets CARGO");
    let is_target = |folder: &&Path| folder.join("CACHEDIR.TAG").exists();
    let directory = out.ancestors().find(is_target).unwrap_or(out).join("agent-target");
    let status = Command::new(&cargo)
        .args(["build", "--quiet", "--offline", "--locked", "--package", "guest-agent", "--bin", "agent"])
        .args(["--profile", "agent", "--target", target, "--target-dir"])
        .arg(&directory)
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        // Otherwise clippy would replace the compiler of the agent, too.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .status()
        .unwrap_or_else(|error| panic!("cannot run `{cargo}`: {error}"));
    assert!(status.success(), "`{cargo}` could not build the guest's agent");
    let built = directory.join(target).join("agent/agent");
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
