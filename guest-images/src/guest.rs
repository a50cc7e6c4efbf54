//! Builds the default guest: an unmodified kernel of the distribution, and an initrd that runs one command.

use std::env;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cache::{Cache, Key};
use crate::cpio::Archive;
use crate::error::{Error, Result};
use crate::image::{Unpacked, only_folder};
use crate::packages::Repository;
use crate::payloads::OwnPrograms;
use crate::progress::Progress;
use crate::release::{Arch, Release, Suite};
use crate::{lz4, modules, versions};

const INIT: &str = include_str!("../guest/init");
const NETWORK: &str = include_str!("../guest/network");
const DECODE: &str = include_str!("../guest/decode.sh");
/// Packages of the distribution that the initrd is built from.
const PACKAGES: [&str; 3] = ["busybox-static", "linux-perf", "ncurses-base"];
/// Terminal types whose terminfo descriptions are in the initrd.
const TERMINALS: [&str; 6] = ["l/linux", "v/vt100", "v/vt220", "x/xterm", "x/xterm-256color", "s/screen"];
/// Part of the cache keys. Must change when the code here changes what is built from the same inputs.
const PROGRAMS_RECIPE: &str = "3";
/// The same for the first archive of the initrd, [`front`].
const FRONT_RECIPE: &str = "4";

/// A kernel and the initrd to boot it with.
#[derive(Debug, Clone)]
pub struct Guest {
    /// The kernel image: a bzImage, or the architecture's equivalent.
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

/// An unpacked kernel of the distribution.
#[derive(Debug, Clone)]
pub struct UnpackedKernel {
    /// The kernel image: a bzImage, or the architecture's equivalent.
    pub image: PathBuf,
    /// The directory of its modules, such as `/lib/modules/RELEASE`.
    pub modules: PathBuf,
}

/// Returns the default guest: the one in the directory `TALLY_GUEST` if that is set, or else one that is built from the
/// distribution's default release.
pub fn default_guest(progress: &mut Progress) -> Result<Guest> {
    if let Some(folder) = env::var_os("TALLY_GUEST").filter(|value| !value.is_empty()) {
        return guest_in(folder.into());
    }
    guest(&Cache::open()?, Suite::default(), progress)
}

fn guest_in(folder: PathBuf) -> Result<Guest> {
    let (kernel, initrd) = (folder.join("kernel"), folder.join("initrd"));
    for (path, file) in [(&kernel, "kernel"), (&initrd, "initrd")] {
        if !path.is_file() {
            return Err(Error::GuestFolder { folder, file });
        }
    }
    Ok(Guest { kernel, initrd })
}

/// Builds a guest with the kernel of a release, for the architecture that this crate is compiled for. Its programs are
/// always those of the default release.
pub fn guest(cache: &Cache, suite: Suite, progress: &mut Progress) -> Result<Guest> {
    guest_of(cache, suite, &OwnPrograms::default(), progress)
}

/// Builds a guest for the architecture of these programs.
pub fn guest_of(cache: &Cache, suite: Suite, own: &OwnPrograms, progress: &mut Progress) -> Result<Guest> {
    let release = Release { suite, arch: own.arch };
    let kernel = kernel(cache, release, progress)?;
    let programs = programs(cache, Release::of(own.arch), progress)?;
    let name = format!("guest-initrd-{}", release.label());
    let mut key = Key::new(&name).with(FRONT_RECIPE).with(stamp(&kernel.image)?);
    let files = [INIT.as_bytes(), NETWORK.as_bytes(), DECODE.as_bytes(), &*own.agent];
    for file in files.into_iter().chain(own.outb).chain(own.ebb_header).chain([own.known_loop]) {
        key = key.with(file);
    }
    let key = key.with(programs.file_name().unwrap_or_default().as_bytes());
    let entry = cache.entry(&key, progress, |progress, entry| {
        progress.step("putting the guest's initrd together");
        let mut initrd = lz4::compress(&front(own, &kernel.modules)?);
        let programs = programs.join("archive");
        initrd.extend(fs::read(&programs).map_err(Error::io("read", &programs))?);
        let path = entry.join("initrd");
        fs::write(&path, initrd).map_err(Error::io("write", path))
    })?;
    Ok(Guest { kernel: kernel.image, initrd: entry.join("initrd") })
}

/// Returns a string that identifies a version of a file without reading it: its size and modification time, in whole
/// seconds, as archives and container images keep no more of it.
pub fn stamp(path: &Path) -> Result<String> {
    let file = fs::metadata(path).map_err(Error::io("read", path))?;
    Ok(format!("{} {}", file.len(), file.mtime()))
}

/// Creates the initrd's first archive, with Tally's own programs and the kernel's modules. The initrd has it
/// compressed: the smallest guests have memory for little more than that.
fn front(own: &OwnPrograms, modules: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("lib/tally/agent", 0o755, &own.agent);
    archive.file("lib/tally/network", 0o755, NETWORK.as_bytes());
    archive.file("lib/tally/decode.sh", 0o644, DECODE.as_bytes());
    if let Some(outb) = own.outb {
        archive.file("lib/tally/outb", 0o755, outb);
    }
    archive.file("lib/tally/loop", 0o755, own.known_loop);
    if let Some(header) = own.ebb_header {
        archive.file("usr/include/tally-ebb.h", 0o644, header);
        archive.link("usr/bin/ebb-sample", "/lib/tally/agent");
    }
    modules::add(&mut archive, modules)?;
    Ok(archive.finish())
}

/// Returns the directory with the archive of the distribution's programs. That archive is built separately, because it
/// takes long to compress and is the same for all kernels.
fn programs(cache: &Cache, of: Release, progress: &mut Progress) -> Result<PathBuf> {
    let name = match of.arch {
        Arch::X86_64 => "guest-programs".to_owned(),
        Arch::Riscv64 => format!("guest-programs-{}", of.arch),
    };
    let key = PACKAGES.iter().fold(Key::new(&name).with(PROGRAMS_RECIPE), Key::with);
    cache.entry(&key, progress, |progress, entry| pack_programs(cache, of, entry, progress))
}

/// Unpacks the distribution's kernel for virtual machines.
pub fn kernel(cache: &Cache, of: impl Into<Release>, progress: &mut Progress) -> Result<UnpackedKernel> {
    let of = of.into();
    let entry = cache.entry(&versions::kernel_key(of), progress, |progress, entry| {
        let repository = Repository::open(cache, of, progress)?;
        let mut packages = repository.resolve(&[of.arch.kernel()])?;
        let version = versions::of_package(&packages, of.arch.kernel());
        // Older releases have one package. Newer ones have separate packages for the image and the modules.
        packages.retain(|package| {
            ["linux-image-", "linux-binary-", "linux-modules-"]
                .iter()
                .any(|prefix| package.name.starts_with(prefix))
        });
        let unpacked = entry.join("unpacked");
        repository.unpack(&packages, &unpacked, progress)?;
        let modules = [unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")]
            .iter()
            .find_map(|folder| only_folder(folder, ""))
            .ok_or_else(|| missing(of.suite, "the kernel's modules"))?;
        let release = modules.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Some kernels are self-extracting, others are not.
        let paths = [
            format!("boot/vmlinuz-{release}"),
            format!("boot/vmlinux-{release}"),
            format!("usr/lib/modules/{release}/vmlinuz"),
        ];
        let image = Unpacked::new(&unpacked, of).find(&paths.each_ref().map(|path| &**path))?;
        let rename = |from: &Path, to: PathBuf| fs::rename(from, &to).map_err(Error::io("create", to));
        rename(&image, entry.join("vmlinuz"))?;
        rename(&modules, entry.join("modules"))?;
        versions::record(entry, version)?;
        fs::remove_dir_all(&unpacked).map_err(Error::io("remove", &unpacked))
    })?;
    Ok(UnpackedKernel { image: entry.join("vmlinuz"), modules: entry.join("modules") })
}

fn pack_programs(cache: &Cache, of: Release, entry: &Path, progress: &mut Progress) -> Result<()> {
    let unpacked = entry.join("unpacked");
    let repository = Repository::open(cache, of, progress)?;
    let mut packages = repository.resolve(&PACKAGES)?;
    packages.retain(|package| package.is_library() || PACKAGES.contains(&package.name.as_str()));
    repository.unpack(&packages, &unpacked, progress)?;

    progress.step("packing the guest's programs");
    let files = Unpacked::new(&unpacked, of);
    let mut archive = Archive::new();
    // The kernel opens /dev/console for init before devtmpfs is mounted.
    archive.device("dev/console", 5, 1);
    for folder in ["proc", "sys", "tmp", "run", "root", "etc"] {
        archive.folder(folder);
    }
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\n");
    files.add_busybox(&mut archive)?;
    files.add_programs(&mut archive, &["usr/bin/perf"])?;
    // `perf report` prints a tip from this file, and an error without it.
    let tips = "usr/share/doc/linux-perf/tips.txt";
    archive.copy(tips, &files.find(&[tips])?)?;
    for terminal in TERMINALS {
        let path = format!("lib/terminfo/{terminal}");
        archive.copy(&path, &files.find(&[&path, &format!("usr/share/terminfo/{terminal}")])?)?;
    }
    let packed = entry.join("archive");
    fs::write(&packed, lz4::compress(&archive.finish())).map_err(Error::io("write", &packed))?;
    fs::remove_dir_all(&unpacked).map_err(Error::io("remove", &unpacked))
}

fn missing(suite: Suite, what: &str) -> Error {
    Error::NotInPackages { suite: suite.name(), what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_riscv_guest_has_no_program_for_io_ports() {
        let modules = tempfile::tempdir().unwrap();
        let archive = front(&OwnPrograms::riscv64(&b"agent"[..]), modules.path()).unwrap();
        // Names in the archive are NUL-terminated.
        let has = |name: &str| archive.windows(name.len()).any(|window| window == name.as_bytes());
        assert!(has("lib/tally/loop\0") && has("lib/tally/agent\0") && !has("lib/tally/outb\0"));
    }

    #[test]
    fn a_guest_in_a_directory_needs_both_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("kernel"), "").unwrap();
        let error = guest_in(folder.path().into()).unwrap_err();
        assert!(error.to_string().contains("no file `initrd`"), "{error}");
        fs::write(folder.path().join("initrd"), "").unwrap();
        assert_eq!(guest_in(folder.path().into()).unwrap().kernel, folder.path().join("kernel"));
    }
}
