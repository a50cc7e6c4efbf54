//! The peer: the distribution's QEMU on the simulated host, with KVM's own virtual PMU.

use std::ffi::OsStr;

use guest_images::command;

/// A machine of the peer on an x86-64 host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// Its default PC.
    Default,
    /// The small one, made for quick boots.
    Microvm,
}

impl Machine {
    /// Its name on the peer's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "pc",
            Self::Microvm => "microvm",
        }
    }
}

const COMMON: &str = "qemu-system-x86_64 -L /usr/share/seabios -L /usr/share/qemu -nodefaults -no-user-config \
                      -no-reboot -display none -serial stdio -accel kvm -cpu host,pmu=on,+perfctr-core";

/// The shell command that boots the default guest and runs `arguments` in it; see [`crate::Scenario::guest`].
/// What they print comes out on standard output, and then `tally: status N`.
pub fn linux(machine: Machine, arguments: &[impl AsRef<OsStr>]) -> String {
    linux_of(machine, "guest/kernel", arguments)
}

/// A folder of the host's that guests can mount, in the way of the peer: 9p.
#[derive(Debug, Clone, Copy)]
pub struct Folder<'a> {
    /// A kernel that knows 9p, which the distribution's for clouds do not.
    pub kernel: &'a str,
    /// Where the folder is.
    pub path: &'a str,
    /// What guests know it by.
    pub tag: &'a str,
}

/// The same with a folder that may be read, which the command has to mount.
pub fn linux_with_folder(machine: Machine, folder: &Folder, arguments: &[impl AsRef<OsStr>]) -> String {
    let bus = match machine {
        Machine::Default => "pci",
        Machine::Microvm => "device",
    };
    let Folder { kernel, path, tag } = folder;
    format!(
        "{} -fsdev local,id=folder,path={path},security_model=none,readonly=on \
         -device virtio-9p-{bus},fsdev=folder,mount_tag={tag}",
        linux_of(machine, kernel, arguments)
    )
}

/// The same as [`linux`] on the RISC-V host. KVM gives a guest overflow interrupts only with an AIA.
pub fn linux_on_riscv(arguments: &[impl AsRef<OsStr>]) -> String {
    format!(
        "qemu-system-riscv64 -nodefaults -no-user-config -no-reboot -display none -serial stdio -accel kvm -cpu host \
         -machine virt,aia=aplic-imsic {}",
        boots("guest/kernel", arguments)
    )
}

fn linux_of(machine: Machine, kernel: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    format!("{COMMON} -machine {} {}", machine.name(), boots(kernel, arguments))
}

/// What every machine is told of its guest.
fn boots(kernel: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    format!(
        "-m 512 -kernel {kernel} -initrd guest/initrd -append 'console=ttyS0 quiet nokaslr tally.run={}' </dev/null",
        command::encode(arguments)
    )
}

/// The command that boots the default guest's kernel and initrd with this command line; a write to port 0xf4 ends it.
pub fn to_debug_exit(machine: Machine, command_line: &str) -> String {
    format!(
        "{COMMON} -machine {} -m 512 -kernel guest/kernel -initrd guest/initrd \
         -device isa-debug-exit,iobase=0xf4,iosize=4 -append '{command_line}'",
        machine.name()
    )
}

/// The shell command that starts a machine with nothing but a firmware image, which ends it through port 0xf4.
pub fn firmware(image: &str) -> String {
    format!(
        "{COMMON} -machine pc -m 64 -device isa-debug-exit,iobase=0xf4,iosize=1 -bios ./{image} </dev/null"
    )
}
