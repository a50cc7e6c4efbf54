//! Builds the simulated hosts: Debian's kernel with KVM, and an initramfs with busybox, perf, and Debian's own QEMU.
//! The latter is the peer with which Tally is compared.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{self, PathBuf};

use acpi_tables::Aml;
use acpi_tables::aml::{Device, Interrupt, Memory32Fixed, Name, Path, ResourceTemplate, Scope, ZERO};
use acpi_tables::sdt::Sdt;
use guest_images::cache::{Cache, Key};
use guest_images::cpio::Archive;
use guest_images::image::Unpacked;
use guest_images::packages::Repository;
use guest_images::{Arch, Progress, Release, Suite, kernel, modules, stamp};

use crate::error::{Error, Result};
use crate::simulator::board::Processor;

const INIT: &str = include_str!("../../host/init");
const RECIPE: &str = "3";

/// The parts of a host of one architecture, except its kernel.
struct ImageParts {
    /// The release of the packages.
    suite: Suite,
    packages: &'static [&'static str],
    programs: &'static [&'static str],
    firmware: &'static [&'static str],
    /// Kernel modules that the host's init loads with their dependencies, in this order.
    modules: &'static [&'static str],
    /// A table that Linux adds to the firmware's ACPI tables.
    acpi_table: Option<fn() -> Vec<u8>>,
}

const AMD: ImageParts = ImageParts {
    suite: Suite::Bookworm,
    packages: &[
        "busybox-static",
        "libcap2-bin",
        "linux-perf",
        "qemu-system-x86",
        "qemu-system-data",
        "seabios",
    ],
    programs: &["sbin/setcap", "usr/bin/perf", "usr/bin/qemu-system-x86_64"],
    // Firmware with which the peer boots kernels and multiboot images on its machines `pc` and `microvm`.
    firmware: &[
        "usr/share/seabios/bios-256k.bin",
        "usr/share/seabios/bios-microvm.bin",
        "usr/share/qemu/qboot.rom",
        "usr/share/qemu/kvmvapic.bin",
        "usr/share/qemu/linuxboot_dma.bin",
        "usr/share/qemu/multiboot_dma.bin",
        "usr/share/qemu/pvh.bin",
        "usr/share/qemu/multiboot.bin",
    ],
    // The last two are for the memory in which a saved host finds its files.
    modules: &["virtio_pci", "virtio_console", "kvm-amd", "nfit", "nd_pmem"],
    acpi_table: None,
};

/// The console is not on PCI, as Bochs' own devices are; see `cpu/bochs/console.cc`.
const INTEL: ImageParts = ImageParts {
    modules: &["virtio_mmio", "virtio_console", "kvm-intel"],
    acpi_table: Some(console_table),
    ..AMD
};

/// Trixie is the first release for RISC-V.
const RISCV64: ImageParts = ImageParts {
    suite: Suite::Trixie,
    packages: &["busybox-static", "linux-perf", "qemu-system-riscv"],
    programs: &["usr/bin/perf", "usr/bin/qemu-system-riscv64"],
    // The peer starts a guest with its kernel, without firmware.
    firmware: &[],
    modules: &["virtio_pci", "virtio_console", "kvm"],
    acpi_table: None,
};

/// Returns the default release of a host: Debian's stable one. On RISC-V that is the newest, as the kernel before it
/// cannot inject a counter's overflow interrupt into a guest.
pub fn default_host(arch: Arch) -> Release {
    let suite = match arch {
        Arch::X86_64 => Suite::Trixie,
        Arch::Riscv64 => Suite::Sid,
    };
    Release { suite, arch }
}

/// Kernel and initramfs that the lab CPU boots.
#[derive(Debug, Clone)]
pub struct HostImage {
    /// The unmodified kernel.
    pub kernel: PathBuf,
    /// An uncompressed initramfs, to which more archives can be appended.
    pub initrd: PathBuf,
}

/// Returns the host with the kernel of a release, and builds it if needed. The release of the host's programs does not
/// depend on that of the kernel.
pub fn build(
    cache: &Cache,
    release: Release,
    processor: Processor,
    progress: &mut Progress,
) -> Result<HostImage> {
    let (parts, name) = match processor {
        Processor::Amd => (&AMD, "lab-host"),
        Processor::Intel => (&INTEL, "lab-host-intel"),
        Processor::Riscv64 => (&RISCV64, "lab-host"),
    };
    let kernel = kernel(cache, release, progress)?;
    let mut key = Key::new(&format!("{name}-{}", release.label())).with(RECIPE).with(INIT);
    key = key.with(parts.suite.name()).with(stamp(&kernel.image)?);
    let ImageParts { packages, programs, firmware, modules, .. } = parts;
    key = packages.iter().chain(*programs).chain(*firmware).chain(*modules).fold(key, Key::with);
    let table = parts.acpi_table.map(|table| table());
    key = table.iter().fold(key, Key::with);
    let programs = Release { suite: parts.suite, ..release };
    let entry = cache.entry(&key, progress, |progress, entry| {
        pack(cache, parts, programs, &kernel.modules, entry, progress)
    })?;
    Ok(HostImage { kernel: kernel.image, initrd: entry.join("initrd") })
}

fn pack(
    cache: &Cache,
    parts: &ImageParts,
    programs: Release,
    modules: &path::Path,
    entry: &path::Path,
    progress: &mut Progress,
) -> Result<()> {
    let unpacked = entry.join("unpacked");
    let repository = Repository::open(cache, programs, progress)?;
    let mut packages = repository.resolve(parts.packages)?;
    packages.retain(|package| package.is_library() || parts.packages.contains(&package.name.as_str()));
    repository.unpack(&packages, &unpacked, progress)?;

    progress.step("packing the simulated host");
    let files = Unpacked::new(&unpacked, programs);
    let mut archive = Archive::new();
    archive.device("dev/console", 5, 1);
    for folder in ["proc", "sys", "tmp", "run", "root", "etc", "lab", "scenario"] {
        archive.folder(folder);
    }
    if let Some(table) = parts.acpi_table {
        // Linux, Documentation/admin-guide/acpi/ssdt-overlays.rst: it looks for such files before it unpacks anything.
        archive.file("kernel/firmware/acpi/console.aml", 0o644, &table());
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\n");
    files.add_busybox(&mut archive)?;
    files.add_programs(&mut archive, parts.programs)?;
    for file in parts.firmware {
        archive.copy(file, &files.find(&[file])?)?;
    }
    add_modules(&mut archive, modules, parts.modules)?;
    let initrd = entry.join("initrd");
    // The initramfs is not compressed, as the simulated processor would have to decompress it at every boot.
    fs::write(&initrd, archive.finish()).map_err(Error::file("write", &initrd))?;
    fs::remove_dir_all(&unpacked).map_err(Error::file("remove", unpacked))
}

/// Returns an ACPI table with the virtio console, whose registers and interrupt are those of `cpu/bochs/console.cc`.
fn console_table() -> Vec<u8> {
    const REGISTERS: u32 = 0xfeb0_0000;
    const SIZE: u32 = 0x200;
    const INTERRUPT: u32 = 7;
    let registers = Memory32Fixed::new(true, REGISTERS, SIZE);
    let interrupt = Interrupt::new(true, true, false, false, INTERRUPT);
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let (id, number, resources) = (
        Name::new(Path::new("_HID"), &"LNRO0005"),
        Name::new(Path::new("_UID"), &ZERO),
        Name::new(Path::new("_CRS"), &resources),
    );
    let device = Device::new(Path::new("VCON"), vec![&id, &number, &resources]);
    let mut body = Vec::new();
    Scope::new(Path::new("_SB_"), vec![&device]).to_aml_bytes(&mut body);
    let mut table = Sdt::new(*b"SSDT", 36, 2, *b"TALLY ", *b"TALLYLAB", 1);
    table.append_slice(&body);
    table.as_slice().to_vec()
}

/// Adds the modules, their dependencies, and a file with the order in which to load them.
fn add_modules(archive: &mut Archive, folder: &path::Path, wanted: &[&str]) -> Result<()> {
    let files = modules::all(folder)?;
    let mut order = String::new();
    let mut added = HashSet::new();
    for module in wanted {
        add_module(archive, &files, module, &mut added, &mut order)?;
    }
    archive.file("lib/modules/order", 0o644, order.as_bytes());
    Ok(())
}

fn add_module(
    archive: &mut Archive,
    files: &BTreeMap<String, PathBuf>,
    name: &str,
    added: &mut HashSet<String>,
    order: &mut String,
) -> Result<()> {
    let name = name.replace('-', "_");
    if !added.insert(name.clone()) {
        return Ok(());
    }
    // A module that is built into the kernel has no file.
    let Some(path) = files.get(&name) else { return Ok(()) };
    let content = module_content(path)?;
    for dependency in dependencies(&content) {
        add_module(archive, files, &dependency, added, order)?;
    }
    archive.file(&format!("lib/modules/{name}.ko"), 0o644, &content);
    order.push_str(&name);
    order.push_str(".ko\n");
    Ok(())
}

/// Returns a module without its signature. Checking the signature is most of the work of loading a module. An unsigned
/// module taints the kernel, which has no other effect.
fn module_content(path: &path::Path) -> Result<Vec<u8>> {
    let mut content = modules::content(path)?;
    let length = unsigned_length(&content);
    content.truncate(length);
    Ok(content)
}

/// Returns the length of a module without its signature. The signature is followed by a trailer, which ends with the
/// signature's length, and by a magic text (Linux, `include/linux/module_signature.h`).
fn unsigned_length(module: &[u8]) -> usize {
    const MAGIC: &[u8] = b"~Module signature appended~\n";
    const TRAILER: usize = 12;
    let signed = || {
        let trailer = module.strip_suffix(MAGIC)?;
        let length = u32::from_be_bytes(*trailer.last_chunk()?) as usize;
        trailer.len().checked_sub(TRAILER + length)
    };
    signed().unwrap_or(module.len())
}

/// Returns the names after `depends=` in a module's `.modinfo` section.
fn dependencies(module: &[u8]) -> Vec<String> {
    const FIELD: &[u8] = b"\0depends=";
    let Some(start) = module.windows(FIELD.len()).position(|window| window == FIELD) else {
        return Vec::new();
    };
    let value = module[start + FIELD.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependencies_of_a_module_are_read_from_it() {
        let module = b"\x7fELF\0license=GPL\0depends=virtio_ring,virtio\0retpoline=Y\0";
        assert_eq!(dependencies(module), ["virtio_ring", "virtio"]);
        assert!(dependencies(b"\0depends=\0name=x\0").is_empty());
    }

    #[test]
    fn a_module_loses_its_signature_and_nothing_else() {
        let signed = b"\x7fELF module.SIGN\0\0\x02\0\0\0\0\0\0\0\0\x04~Module signature appended~\n";
        assert_eq!(unsigned_length(signed), b"\x7fELF module.".len());
        assert_eq!(unsigned_length(b"\x7fELF module."), b"\x7fELF module.".len());
    }
}
