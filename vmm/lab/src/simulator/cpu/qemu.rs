//! QEMU, which simulates an AMD and a RISC-V processor.

use std::process::Command;

use guest_images::Suite;

use super::{Firmware, Kind, Simulator};
use crate::simulator::tools;

pub const QEMU: Simulator = Simulator {
    package: "qemu",
    suite: Suite::Bookworm,
    unpack: |repository, into, progress| repository.unpack_source("qemu", into, progress),
    tree: "lab-cpu-tree",
    hooks: "hooks.patch",
    places: &[
        ("x86_64/devices.", "configs/devices/x86_64-softmmu/devices."),
        ("riscv64/devices.", "configs/devices/riscv64-softmmu/devices."),
        ("x86_64/", "target/i386/tcg/sysemu/"),
        ("riscv64/", "target/riscv/"),
        ("first.", "include/first/first."),
        ("silicon.", "include/silicon."),
        ("silicon-timer.", "include/silicon-timer."),
    ],
    configure: &[
        "--target-list=x86_64-softmmu,riscv64-softmmu",
        "--without-default-features",
        // Only the devices that the simulated hosts have.
        "--without-default-devices",
        "--with-devices-x86_64=devices",
        "--with-devices-riscv64=devices",
        "--enable-tcg",
        "--enable-fdt=system",
        "--enable-trace-backends=nop",
        "--disable-docs",
        "--disable-werror",
        "--disable-debug-info",
        // Checks of QEMU itself, which take some 3 % of a simulated host's time.
        "--disable-stack-protector",
        "--disable-qom-cast-debug",
        // Half of the time to compile. The patch has what executes the guest optimised, and little else takes time.
        "--extra-cflags=-O0 -U_FORTIFY_SOURCE",
    ],
    headers: &["x86_64/devices.mak", "riscv64/devices.mak"],
    tools: &tools::COMPILING_QEMU,
    compiling: |program| {
        let mut command = Command::new("ninja");
        command.arg(program);
        command
    },
};

pub const X86_64: Kind = Kind {
    name: "lab-cpu",
    simulator: &QEMU,
    program: "qemu-system-x86_64",
    firmware: Firmware {
        name: "lab-firmware",
        suite: QEMU.suite,
        packages: &["seabios", "qemu-system-data"],
        files: &[
            "share/seabios/bios-256k.bin",
            "share/qemu/qboot.rom",
            "share/qemu/kvmvapic.bin",
            "share/qemu/linuxboot_dma.bin",
        ],
    },
};

/// The firmware is sid's, as trixie's OpenSBI is much older than the host's kernel.
pub const RISCV64: Kind = Kind {
    name: "lab-cpu-riscv64",
    simulator: &QEMU,
    program: "qemu-system-riscv64",
    firmware: Firmware {
        name: "lab-firmware-riscv64",
        suite: Suite::Sid,
        packages: &["opensbi"],
        files: &["lib/riscv64-linux-gnu/opensbi/generic/fw_dynamic.bin"],
    },
};
