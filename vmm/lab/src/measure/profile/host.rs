//! What differs between the hosts that can be profiled: the names of functions, and how the workload is run.

use std::fs;
use std::time::Duration;

use guest_images::payloads::riscv64;
use guest_images::{Arch, Progress, Release};

use super::{OVERFLOWS_BEFORE, ProfiledHost};
use crate::error::{Error, Result};
use crate::measure::bench::{Events, Programs, Row};
use crate::scenario::Scenario;
use crate::scenario::cross;
use crate::scenario::symbols::Symbols;
use crate::scenario::trace::{Flags, MARK};
use crate::simulator::board::{HostPmu, Processor};
use crate::simulator::image::default_host;

pub const AMD: ProfiledHost = ProfiledHost {
    processor: Processor::Amd,
    handler: "asm_exc_nmi",
    counted: [
        ("entries into the guest", "__svm_vcpu_run"),
        ("exits to user space", "kvm_arch_vcpu_ioctl_run"),
        ("system calls", "entry_SYSCALL_64"),
    ],
    flags: |_| Some(Flags::Amd),
    scenario: on_amd,
};

pub const RISCV: ProfiledHost = ProfiledHost {
    processor: Processor::Riscv64,
    handler: "pmu_sbi_ovf_handler",
    counted: [
        ("entries into the guest", GUEST_ENTRY),
        ("exits to user space", "kvm_arch_vcpu_ioctl_run"),
        ("system calls", "do_trap_ecall_u"),
    ],
    flags: |symbols| symbols.range(GUEST_ENTRY).map(|entry| Flags::Riscv { entry }),
    scenario: on_riscv,
};

/// The function by which a RISC-V host enters a guest.
const GUEST_ENTRY: &str = "__kvm_riscv_switch_to";

/// What the script prints before the first line of what Tally has in memory.
pub const PLACE: &str = "tally is at ";

impl ProfiledHost {
    /// The release whose kernel the host and the guest have: the symbols are those of both.
    fn release(&self) -> Release {
        default_host(self.processor.arch())
    }

    /// Returns the kernel's functions.
    pub fn symbols(&self, progress: &mut Progress) -> Result<Symbols> {
        let release = self.release();
        Symbols::of_host(release, self.processor, progress, |progress| {
            Ok(Scenario::with_all_counters("cat /proc/kallsyms")
                .host(release)
                .pmu(HostPmu::default())
                .run(progress)?
                .stdout)
        })
    }
}

fn on_amd(row: Row, programs: &Programs, progress: &mut Progress) -> Result<Scenario> {
    let Row { workload, units, measure } = row;
    let program = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
    let sampled = measure.command(Events::Instructions);
    let command = format!("--pmu amd -- {sampled} ./bench-workload {workload} {}", units * 4);
    scenario(&AMD, "NMI:", &command).file(&programs.tally, "tally").guest_with(
        AMD.release(),
        &[("bench-workload", &program)],
        progress,
    )
}

/// The workload is the loop that the other figures of this host are of.
fn on_riscv(row: Row, _: &Programs, progress: &mut Progress) -> Result<Scenario> {
    let sampled = row.measure.command(Events::Instructions);
    let command = format!("-- {sampled} sh -c 'for time in $(seq 200); do ./loop; done'");
    let tally = cross::released("tally", "", progress)?;
    scenario(&RISCV, "riscv-pmu", &command).file(tally, "tally").guest_with(
        RISCV.release(),
        &[("loop", riscv64::LOOP)],
        progress,
    )
}

/// Runs a guest, and begins the trace when it has taken some overflows. `interrupts` is in the host's line of these.
fn scenario(host: &ProfiledHost, interrupts: &str, command: &str) -> Scenario {
    let script = format!(
        "taken() {{ awk '/{interrupts}/ {{ print $2 }}' /proc/interrupts; }}
        first=$(taken)
        ./tally run {command} &
        until [ $(($(taken) - ${{first:-0}})) -gt {OVERFLOWS_BEFORE} ]; do
            kill -0 $! || exit 1
            sleep 0.02
        done
        echo \"{PLACE}$(grep -m 1 /tally /proc/$!/maps)\"
        echo {MARK} >/dev/console
        wait $!"
    );
    Scenario::with_all_counters(script).named("profile").host(host.release()).limit(Duration::from_mins(15))
}

/// Returns the host for an architecture.
pub fn of(arch: Arch) -> &'static ProfiledHost {
    match arch {
        Arch::X86_64 => &AMD,
        Arch::Riscv64 => &RISCV,
    }
}
