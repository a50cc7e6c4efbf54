//! QEMU's options for a simulated host.

mod monitor;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use super::{Channels, Shape, Start, fd_path};
use crate::simulator::board::{HostPmu, Processor};
use crate::simulator::cpu::LabCpu;
use crate::simulator::silicon::Silicon;

/// Request to the monitor for the first CPU's registers.
pub const REGISTERS: &str = "{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"human-monitor-command\", \
                             \"arguments\": {\"command-line\": \"info registers\"}}\n";

/// Memory of a saved host for the files of a run, in MiB.
pub const FILES_MIB: u64 = 512;

pub use monitor::Monitor;

/// A simulated machine.
struct Board {
    machine: &'static str,
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

fn board(processor: Processor, pmu: HostPmu, silicon: Silicon) -> Board {
    if processor == Processor::Riscv64 {
        return Board {
            machine: "virt,aia=aplic-imsic,aia-guests=3",
            cpu: format!("{RISCV}{silicon}"),
            firmware: "fw_dynamic.bin",
        };
    }
    let perfmon_v2 = if pmu == HostPmu::PerfMonV2 { ",+perfmon-v2" } else { "" };
    Board { machine: "pc,usb=off", cpu: format!("{ZEN}{perfmon_v2}{silicon}"), firmware: "qboot.rom" }
}

/// Returns the command that starts a host on one of QEMU's processors.
pub fn command(
    cpu: &LabCpu,
    processor: Processor,
    kernel: &Path,
    start: &Start,
    shape: Shape,
    channels: &Channels,
) -> Command {
    let board = board(processor, shape.pmu, shape.silicon);
    let mut command = Command::new(&cpu.program);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.args(["-cpu", &board.cpu]);
    command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off"]);
    command.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
    command.args(["-smp", &shape.processors.to_string()]);
    command.arg("-L").arg(&cpu.firmware).args(["-bios", board.firmware]);
    command.arg("-kernel").arg(kernel).args(["-append", &processor.command_line()]);
    match start {
        Start::Boot { initrd } => {
            command.args(["-machine", board.machine, "-m", &shape.memory_mib.to_string()]);
            command.arg("-initrd").arg(fd_path(initrd.as_raw_fd()));
        }
        Start::ToSave { initrd, memory } => {
            add_memory(&mut command, board.machine, shape, memory, true);
            command.arg("-object").arg(format!("memory-backend-ram,id=files,size={FILES_MIB}M,share=on"));
            command.arg("-initrd").arg(initrd);
        }
        Start::Saved { host, files } => {
            add_memory(&mut command, board.machine, shape, &host.memory(), false);
            add_files(&mut command, files);
        }
        Start::ToSaveAgain { files, memory, .. } => {
            add_memory(&mut command, board.machine, shape, memory, true);
            add_files(&mut command, files);
        }
    }
    let can_be_saved = !matches!(start, Start::Boot { .. });
    // Without `ioeventfd`, a write of the host reaches its destination at once. With it, another thread of QEMU would
    // do that, at a moment that differs from run to run, and so would the interrupt that follows.
    let ports = if channels.input.is_some() || can_be_saved { 6 } else { 5 };
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
    if let Some(trace) = channels.trace {
        command.arg("-D").arg(fd_path(trace));
    }
    if let Some(input) = channels.input {
        command.arg("-chardev").arg(format!("socket,id=in,fd={input}"));
        command.args(["-device", "virtserialport,chardev=in,nr=5"]);
    } else if can_be_saved {
        command.args(["-chardev", "null,id=in", "-device", "virtserialport,chardev=in,nr=5"]);
    }
    if can_be_saved {
        // The host stops itself when it is ready, by the report of a panic.
        command.args(["-device", "nvdimm,memdev=files", "-device", "pvpanic-pci", "-action", "panic=pause"]);
    }
    command
}

/// Adds a machine that can be saved. Its memory is in a file; what it writes there is its own unless that is shared.
fn add_memory(command: &mut Command, machine: &str, shape: Shape, file: &Path, is_shared: bool) {
    let mib = shape.memory_mib;
    let limit = u64::from(mib) + FILES_MIB;
    // A comma would end the path.
    let file = file.display().to_string().replace(',', ",,");
    let sharing = if is_shared { "on" } else { "off" };
    command.args(["-machine", &format!("{machine},nvdimm=on,memory-backend=ram")]);
    command.args(["-m", &format!("{mib},slots=1,maxmem={limit}M")]);
    command
        .arg("-object")
        .arg(format!("memory-backend-file,id=ram,size={mib}M,mem-path={file},share={sharing}"));
}

/// Adds the memory with the files of a run to a machine that goes on from where it was saved.
fn add_files(command: &mut Command, files: &File) {
    let path = fd_path(files.as_raw_fd());
    let files = format!("memory-backend-file,id=files,size={FILES_MIB}M,share=on,mem-path={path}");
    command.arg("-object").arg(files).args(["-incoming", "defer"]);
}
