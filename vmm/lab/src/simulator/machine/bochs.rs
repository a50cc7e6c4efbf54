//! Bochs' configuration for a simulated host.

mod kernel;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use rustix::fs::{MemfdFlags, memfd_create};

use super::{Channels, Shape, fd_path};
use crate::error::{Error, Result};
use crate::simulator::board::{HostPmu, Perfmon, Processor};
use crate::simulator::cpu::LabCpu;

/// Request to the monitor (`cpu/bochs/console.cc`) for the first CPU's registers.
pub const REGISTERS: &str = "?";
/// Instructions in a second of virtual time.
const INSTRUCTIONS_PER_SECOND: u32 = 1_000_000_000;
/// 1 January 2026.
const START_OF_CLOCK: u32 = 1_767_225_600;

/// Returns the size of a block of memory, of which the memory has to be a multiple: if possible, the largest that Bochs
/// takes. It registers each block when it starts, and searches the list of all for each.
fn block_kib(memory_mib: u32) -> u32 {
    const LARGEST_MIB: u32 = 8;
    const USUAL_KIB: u32 = 128;
    if memory_mib.is_multiple_of(LARGEST_MIB) { LARGEST_MIB << 10 } else { USUAL_KIB }
}

/// Returns the command that boots a kernel, and files that it must inherit.
pub fn command(
    cpu: &LabCpu,
    kernel: &Path,
    initrd: &File,
    shape: Shape,
    channels: &Channels,
) -> Result<(Command, Vec<File>)> {
    let images =
        kernel::images(kernel, initrd, &Processor::Intel.command_line(), u64::from(shape.memory_mib) << 20)?;
    let path = |file: &File| fd_path(file.as_raw_fd());
    let bios = cpu.firmware.join("BIOS-bochs-latest");
    let mut lines = vec![
        "display_library: nogui".to_owned(),
        format!("romimage: file={}, options=fastboot", bios.display()),
        // Bochs wants a video BIOS. The BIOS calls any ROM there, as it calls option ROMs.
        format!("vgaromimage: file={}", path(&images.rom)),
        format!("optromimage1: file={}, address=0xd0000", path(&images.rom)),
        format!("memory: guest={0}, host={0}, block_size={1}", shape.memory_mib, block_kib(shape.memory_mib)),
        // Linux finds out which registers exist by reading them, which has to fail for those that do not.
        format!(
            "cpu: model=corei7_skylake_x, count={}, ips={INSTRUCTIONS_PER_SECOND}, reset_on_triple_fault=0, \
             ignore_bad_msrs=0",
            shape.processors
        ),
        format!("clock: sync=none, time0={START_OF_CLOCK}"),
        "pci: enabled=1, chipset=i440fx".to_owned(),
        "vga: extension=none".to_owned(),
        format!("com1: enabled=1, mode=file, dev={}", fd_path(channels.console)),
        "ata0: enabled=0".to_owned(),
        "ata1: enabled=0".to_owned(),
        "parport1: enabled=0".to_owned(),
        "speaker: enabled=0".to_owned(),
        // What ends Bochs is shown where the host's own last words are.
        format!("log: {}", fd_path(channels.console)),
        "panic: action=fatal".to_owned(),
        "error: action=ignore".to_owned(),
        "info: action=ignore".to_owned(),
    ];
    for (number, (image, address)) in (1..).zip(images.in_memory(initrd)) {
        lines.push(format!("optramimage{number}: file={}, address={address:#x}", path(image)));
    }
    let configuration = memory_file("bochsrc", (lines.join("\n") + "\n").as_bytes())?;

    let mut command = Command::new(&cpu.program);
    command.args(["-q", "-f", &path(&configuration)]);
    let version = match shape.pmu {
        HostPmu::Intel(version) => version,
        HostPmu::PerfCtrCore | HostPmu::PerfMonV2 => Perfmon::default(),
    };
    command.env("LAB_PERFMON", version.number().to_string());
    command.env("LAB_SILICON", shape.silicon.to_string().trim_start_matches(','));
    let mut ports = vec![
        format!("1={}", channels.stdout),
        format!("2={}", channels.stderr),
        format!("3={}", channels.control),
        format!("4={}", channels.files),
        format!("monitor={}", channels.monitor),
    ];
    ports.extend(channels.input.map(|input| format!("5={input}")));
    command.env("LAB_CHANNELS", ports.join(","));
    // Before Bochs has read its configuration, it prints what it does.
    command.stderr(std::process::Stdio::null());
    let mut files = images.into_files();
    files.push(configuration);
    Ok((command, files))
}

/// Returns a file without a name, with this content.
fn memory_file(name: &str, content: &[u8]) -> Result<File> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC);
    let mut file = File::from(file.map_err(|error| Error::system("create a file in memory")(error.into()))?);
    file.write_all(content).map_err(Error::system("write to memory"))?;
    Ok(file)
}
