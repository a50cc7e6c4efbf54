//! QEMU's options for a simulated host.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use super::{Channels, Shape, fd_path};
use crate::board::{HostPmu, Processor};
use crate::cpu::LabCpu;

/// Request to the monitor for the first CPU's registers.
pub const REGISTERS: &str = "{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"human-monitor-command\", \
                             \"arguments\": {\"command-line\": \"info registers\"}}\n";

/// A simulated machine.
struct Board {
    /// Value of `-machine`.
    machine: &'static str,
    /// Value of `-cpu`.
    cpu: String,
    /// Value of `-bios`.
    firmware: &'static str,
}

/// An AMD Zen with virtualisation whose CPUID does not say that it is virtual. The family determines which events Linux
/// uses; see `cpu/README.md`. ERMS is off, as on processors of this family: the simulation is slow at REP MOVSB and REP
/// STOSB, which Linux would use with ERMS.
const ZEN: &str = "max,family=23,model=49,stepping=0,+svm,-hypervisor,+perfctr-core,-erms";
/// A processor with virtualisation and with overflow interrupts (Sscofpmf). KVM passes these on to guests only with an
/// AIA, which is an option of the machine.
const RISCV: &str = "rv64,h=true,sscofpmf=true,pmu-num=8";

fn board(processor: Processor, pmu: HostPmu) -> Board {
    if processor == Processor::Riscv64 {
        return Board {
            machine: "virt,aia=aplic-imsic,aia-guests=3",
            cpu: RISCV.to_owned(),
            firmware: "fw_dynamic.bin",
        };
    }
    let perfmon_v2 = if pmu == HostPmu::PerfMonV2 { ",+perfmon-v2" } else { "" };
    Board { machine: "pc,usb=off", cpu: format!("{ZEN}{perfmon_v2}"), firmware: "qboot.rom" }
}

/// Returns the command that boots a kernel on one of QEMU's processors.
pub fn command(
    cpu: &LabCpu,
    processor: Processor,
    kernel: &Path,
    initrd: &File,
    shape: Shape,
    channels: &Channels,
) -> Command {
    let board = board(processor, shape.pmu);
    let mut command = Command::new(&cpu.program);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.args(["-machine", board.machine, "-cpu", &board.cpu]);
    command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off"]);
    command.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
    command.args(["-smp", &shape.processors.to_string(), "-m", &shape.memory_mib.to_string()]);
    command.arg("-L").arg(&cpu.firmware).args(["-bios", board.firmware]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(fd_path(initrd.as_raw_fd()));
    command.args(["-append", &processor.command_line()]);
    // Without `ioeventfd`, a write of the host reaches its destination at once. With it, another thread of QEMU would do
    // that, at a moment that differs from run to run, and so would the interrupt that follows.
    let ports = if channels.input.is_some() { 6 } else { 5 };
    command.arg("-device").arg(format!("virtio-serial-pci,max_ports={ports},ioeventfd=off"));
    let outputs = [("out", 1, channels.stdout), ("err", 2, channels.stderr), ("files", 4, channels.files)];
    for (name, number, end) in outputs {
        command.arg("-chardev").arg(format!("file,id={name},path={}", fd_path(end)));
        command.arg("-device").arg(format!("virtserialport,chardev={name},nr={number}"));
    }
    command.arg("-chardev").arg(format!("file,id=console,path={}", fd_path(channels.console)));
    command.args(["-serial", "chardev:console"]);
    command.arg("-chardev").arg(format!("socket,id=control,fd={}", channels.control));
    command.args(["-device", "virtserialport,chardev=control,nr=3"]);
    command.arg("-chardev").arg(format!("socket,id=monitor,fd={}", channels.monitor));
    command.args(["-qmp", "chardev:monitor"]);
    if let Some(input) = channels.input {
        command.arg("-chardev").arg(format!("socket,id=in,fd={input}"));
        command.args(["-device", "virtserialport,chardev=in,nr=5"]);
    }
    command
}
