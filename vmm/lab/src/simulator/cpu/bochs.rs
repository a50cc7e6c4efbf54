//! Bochs, which simulates an Intel processor: QEMU's TCG has no VMX.

use std::process::Command;
use std::thread::available_parallelism;

use guest_images::Suite;

use super::{Firmware, Kind, Simulator};
use crate::simulator::tools;

/// The original source is taken, as Debian's patches concern only the paths of its own packages.
pub const BOCHS: Simulator = Simulator {
    package: "bochs",
    suite: Suite::Trixie,
    unpack: |repository, into, progress| repository.unpack_original("bochs", into, progress),
    tree: "lab-cpu-intel-tree",
    hooks: "bochs/hooks.patch",
    places: &[
        ("bochs/console.", "iodev/lab_console."),
        ("bochs/pmu.", "instrument/lab/pmu."),
        ("silicon.", "instrument/lab/silicon."),
        ("bochs/instrument.", "instrument/lab/instrument."),
        ("bochs/Makefile.", "instrument/lab/Makefile."),
        ("x86_64/pmu-model.", "instrument/lab/pmu-model."),
        ("x86_64/pmu-branch.", "instrument/lab/pmu-branch."),
    ],
    // Instrumentation is how the PMU is told of what executes. It needs one call for each instruction, as without
    // chained handlers. Each round of a REP instruction is a cycle, as without repeat speedups.
    configure: &[
        "--enable-instrumentation=instrument/lab",
        "--disable-handlers-chaining",
        "--disable-repeat-speedups",
        "--enable-smp",
        "--enable-cpu-level=6",
        "--enable-x86-64",
        "--enable-vmx=2",
        "--enable-avx",
        "--enable-evex",
        "--enable-monitor-mwait",
        "--enable-fast-function-calls",
        "--enable-pci",
        "--enable-long-phy-address",
        "--disable-large-ramfile",
        "--disable-plugins",
        "--disable-debugger",
        "--disable-debugger-gui",
        "--disable-docbook",
        "--with-nogui",
        "CFLAGS=-O3 -w",
        "CXXFLAGS=-O3 -w",
    ],
    // Bochs' Makefiles do not know all uses of these.
    headers: &["bochs/hooks.patch", "bochs/instrument.h", "bochs/pmu.h", "silicon.h", "bochs/Makefile.in"],
    tools: &tools::COMPILING_BOCHS,
    compiling: |program| {
        let mut command = Command::new("sh");
        let jobs = available_parallelism().map_or(1, usize::from);
        command.args(["-c", "exec make --no-print-directory \"$@\" 2>&1", "make"]);
        command.arg(format!("--jobs={jobs}")).arg(program);
        command
    },
};

pub const INTEL: Kind = Kind {
    name: "lab-cpu-intel",
    simulator: &BOCHS,
    program: "bochs",
    firmware: Firmware {
        name: "lab-firmware-intel",
        suite: BOCHS.suite,
        packages: &["bochsbios"],
        files: &["share/bochs/BIOS-bochs-latest"],
    },
};
