//! Compiles KVM's modules with changes, for the kernel of a distribution as it is: for figures only.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::guest::{self, UnpackedKernel};
use crate::kernel_source::KernelSource;
use crate::modules;
use crate::progress::Progress;
use crate::release::Suite;
use crate::tool;

/// Part of the cache key. Must change when the code here changes what is built.
const RECIPE: &str = "1";
/// A program that the kernel's configuration asks for its version. Modules alone are compiled without it; but a kernel
/// that it has described has structures that are larger.
const PAHOLE: &str = "#!/bin/sh\necho v1.30\n";
/// The modules, from the folder of KVM's source.
const MODULES: [&str; 2] = ["kvm.ko", "kvm-amd.ko"];

/// The modules, in the order in which they have to be loaded.
#[derive(Debug, Clone)]
pub struct PatchedKvm {
    pub modules: [PathBuf; MODULES.len()],
}

/// Compiles KVM for a release's kernel, unless it is in the cache. This takes some minutes and, temporarily, 2 GB of
/// disk space. The modules fit that kernel only.
pub fn patched_kvm(cache: &Cache, suite: Suite, patch: &str, progress: &mut Progress) -> Result<PatchedKvm> {
    let kernel = release_of(&guest::kernel(cache, suite, progress)?, suite)?;
    let key = Key::new("patched-kvm").with(RECIPE).with(&kernel).with(patch);
    let entry = cache.entry(&key, progress, |progress, entry| {
        let work = entry.join("work");
        compile(cache, suite, (&kernel, patch), &work, progress)?;
        for module in MODULES {
            let from = work.join(module);
            fs::rename(&from, entry.join(module)).map_err(Error::io("find", &from))?;
        }
        fs::remove_dir_all(&work).map_err(Error::io("remove", &work))
    })?;
    Ok(PatchedKvm { modules: MODULES.map(|module| entry.join(module)) })
}

/// Returns what a kernel calls itself, such as `6.12.9-amd64`, which its modules have to name.
fn release_of(kernel: &UnpackedKernel, suite: Suite) -> Result<String> {
    const FIELD: &[u8] = b"vermagic=";
    let missing = || Error::NotInPackages { suite: suite.name(), what: "the version of KVM".to_owned() };
    let kvm = modules::content(modules::all(&kernel.modules)?.get("kvm").ok_or_else(missing)?)?;
    let field = kvm.windows(FIELD.len()).position(|bytes| bytes == FIELD).ok_or_else(missing)?;
    let value = kvm[field + FIELD.len()..].split(|&byte| byte == b' ').next().unwrap_or_default();
    String::from_utf8(value.to_vec()).map_err(|_| missing())
}

/// Compiles the modules into the folder `work`.
fn compile(
    cache: &Cache,
    suite: Suite,
    (release, patch): (&str, &str),
    work: &Path,
    progress: &mut Progress,
) -> Result<()> {
    let series: Vec<_> = release.split('.').take(2).collect();
    let (source, headers) =
        (format!("linux-source-{}", series.join(".")), format!("linux-headers-{release}"));
    let kernel = KernelSource::unpack(cache, suite, &source, &[&headers], work, progress)?;

    progress.long_step("compiling KVM's modules");
    // The kernel's configuration, and the versions of all that it has for modules.
    for file in [".config", "Module.symvers"] {
        let from = work.join("usr/src").join(&headers).join(file);
        fs::copy(&from, kernel.objects.join(file)).map_err(Error::io("read", &from))?;
    }
    let (diff, pahole) = (work.join("patch"), work.join("pahole"));
    fs::write(&diff, patch).map_err(Error::io("write", &diff))?;
    fs::write(&pahole, PAHOLE).map_err(Error::io("write", &pahole))?;
    fs::set_permissions(&pahole, Permissions::from_mode(0o755)).map_err(Error::io("write", &pahole))?;
    let patch = ["--strip=1", "--silent", "--forward", "--input"];
    tool::run(Command::new("patch").current_dir(&kernel.source).args(patch).arg(&diff), "patch")?;
    let make = |target: &[&str]| {
        let mut make = kernel.make();
        make.arg(format!("PAHOLE={}", pahole.display())).arg(format!("KERNELRELEASE={release}"));
        tool::run(make.args(target), "make").map(drop)
    };
    make(&["olddefconfig"])?;
    make(&["modules_prepare"])?;
    let kvm = kernel.source.join("arch/x86/kvm");
    make(&[&format!("M={}", kvm.display()), "modules"])?;
    for module in MODULES {
        let mut strip = Command::new("objcopy");
        strip.arg("--strip-debug").arg(kvm.join(module)).arg(work.join(module));
        tool::run(&mut strip, "binutils")?;
    }
    Ok(())
}
