//! The peer with which Tally is compared: the distribution's QEMU on the simulated host, with KVM's own virtual PMU.

use std::ffi::OsStr;

use guest_images::command;

/// A machine type of the peer on an x86-64 host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineType {
    /// The default PC.
    Default,
    /// `microvm`, which has few devices and boots quickly.
    Microvm,
}

impl MachineType {
    /// Returns the machine's name for `-machine`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "pc",
            Self::Microvm => "microvm",
        }
    }

    /// Returns the end of the names of its virtio devices.
    fn virtio_bus(self) -> &'static str {
        match self {
            Self::Default => "pci",
            Self::Microvm => "device",
        }
    }
}

const COMMON: &str = "qemu-system-x86_64 -L /usr/share/seabios -L /usr/share/qemu -nodefaults -no-user-config \
                      -no-reboot -display none -serial stdio -accel kvm -cpu host,pmu=on,+perfctr-core";

/// Returns the shell command that boots the default guest and runs the command `arguments` in it; see
/// [`crate::Scenario::guest`]. The command's output is printed on standard output, followed by `tally: status N`.
pub fn linux(machine: MachineType, arguments: &[impl AsRef<OsStr>]) -> String {
    linux_of(machine, "guest/kernel", arguments)
}

/// How the peer shares a directory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// By 9p, with its own server.
    NineP,
    /// By virtio-fs, with the server that listens on a socket.
    Virtiofsd,
}

/// A directory of the host that the peer shares with a guest.
#[derive(Debug, Clone, Copy)]
pub struct Folder<'a> {
    /// A kernel that can mount it. The distribution's cloud kernels do not have 9p.
    pub kernel: &'a str,
    /// Path of the directory, or of virtiofsd's socket.
    pub path: &'a str,
    /// The mount tag.
    pub tag: &'a str,
    pub by: Sharing,
}

/// Returns the command of [`linux`] with a directory, which the guest's command has to mount.
pub fn linux_with_folder(machine: MachineType, folder: &Folder, arguments: &[impl AsRef<OsStr>]) -> String {
    let bus = machine.virtio_bus();
    let Folder { kernel, path, tag, by } = folder;
    let options = match by {
        Sharing::NineP => format!(
            "-fsdev local,id=folder,path={path},security_model=none \
             -device virtio-9p-{bus},fsdev=folder,mount_tag={tag}"
        ),
        // Its largest queue.
        Sharing::Virtiofsd => format!(
            "-object memory-backend-memfd,id=memory,size=512M,share=on -machine memory-backend=memory \
             -chardev socket,id=folder,path={path} \
             -device vhost-user-fs-{bus},chardev=folder,tag={tag},queue-size=1024"
        ),
    };
    format!("{} {options}", linux_of(machine, kernel, arguments))
}

/// A network of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// Its own, without rights. The ports 80 and 99 of the guest are 8080 and 8099 on this host.
    User,
    /// The tap device `tap0`.
    Tap,
}

impl Net {
    /// Returns the name of the network for `-netdev`.
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Tap => "tap",
        }
    }
}

/// Returns the command of [`linux`] with a network, which the guest's command has to set up.
pub fn linux_with_network(machine: MachineType, net: Net, arguments: &[impl AsRef<OsStr>]) -> String {
    let options = match net {
        Net::User => ",hostfwd=tcp:127.0.0.1:8080-:80,hostfwd=tcp:127.0.0.1:8099-:99",
        Net::Tap => ",ifname=tap0,script=no,downscript=no",
    };
    let (kind, bus) = (net.name(), machine.virtio_bus());
    format!(
        "{} -netdev {kind},id=net{options} -device virtio-net-{bus},netdev=net",
        linux(machine, arguments)
    )
}

/// Returns the command of [`linux`] for the RISC-V host. KVM injects overflow interrupts only with an AIA.
pub fn linux_on_riscv(arguments: &[impl AsRef<OsStr>]) -> String {
    format!(
        "qemu-system-riscv64 -nodefaults -no-user-config -no-reboot -display none -serial stdio -accel kvm -cpu host \
         -machine virt,aia=aplic-imsic {}",
        guest_options("guest/kernel", arguments)
    )
}

fn linux_of(machine: MachineType, kernel: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    format!("{COMMON} -machine {} {}", machine.name(), guest_options(kernel, arguments))
}

/// Returns the options for the guest, which all machines have in common.
fn guest_options(kernel: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    format!(
        "-m 512 -kernel {kernel} -initrd guest/initrd -append 'console=ttyS0 cryptomgr.notests quiet nokaslr tally.run={}' </dev/null",
        command::encode(arguments)
    )
}

/// Returns the command that boots the default guest's kernel and initrd with this command line. A write to port 0xf4
/// ends the machine.
pub fn to_debug_exit(machine: MachineType, command_line: &str) -> String {
    format!(
        "{COMMON} -machine {} -m 512 -kernel guest/kernel -initrd guest/initrd \
         -device isa-debug-exit,iobase=0xf4,iosize=4 -append '{command_line}'",
        machine.name()
    )
}

/// Returns the shell command that starts a machine with only a firmware image, which ends the machine by a write to
/// port 0xf4.
pub fn firmware(image: &str) -> String {
    format!(
        "{COMMON} -machine pc -m 64 -device isa-debug-exit,iobase=0xf4,iosize=1 -bios ./{image} </dev/null"
    )
}
