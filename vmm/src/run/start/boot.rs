//! The files that are booted, and the kernel's command line.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use guest_images::Progress;
use log::info;
use tally_machine::pmu::{Pmu, Processor};
use tally_machine::{KERNEL_PARAMETERS, Kernel};

use super::kernels::Kernels;
use super::tree;
use crate::cli::Run;
use crate::host::lab;

/// The files that are booted.
pub struct Files {
    pub kernel: Kernel,
    /// The initrd, or a multiboot kernel's modules.
    pub initrd: Option<PathBuf>,
    /// cpio archive prepended to the initrd: the modules that a user's kernel needs for Tally's devices.
    pub initrd_prefix: Vec<u8>,
}

/// Returns the kernel, patched, and the initrd that the options name; one that is not named is the default guest's.
pub fn files(options: &Run, kernels: Kernels) -> Result<Files> {
    let read = |path: &Path| kernels.read(path, |kernel| check(options, kernel));
    let path = options.kernel.as_deref().map(tree::image).transpose()?;
    let named = path.as_deref().map(read).transpose()?;
    let files = match named {
        Some(kernel) if options.initrd.is_some() || !kernel.is_linux() => {
            Files { kernel, initrd: options.initrd.clone(), initrd_prefix: Vec::new() }
        }
        _ => {
            let mut progress = Progress::stderr("tally").verbose(options.verbose > 0);
            let guest = guest_images::default_guest(&mut progress)?;
            let initrd_prefix = match (&named, &path) {
                (Some(kernel), Some(path)) => modules(kernel, path)?,
                _ => Vec::new(),
            };
            let kernel = named.map_or_else(|| read(&guest.kernel), Ok)?;
            Files { kernel, initrd: Some(options.initrd.clone().unwrap_or(guest.initrd)), initrd_prefix }
        }
    };
    info!("kernel: {}{}", files.kernel, origin(options.kernel.as_ref()));
    if let Some(initrd) = &files.initrd {
        info!("initrd: {}{}", initrd.display(), origin(options.initrd.as_ref()));
    }
    Ok(files)
}

/// Returns an error if this guest cannot run here.
fn check(options: &Run, kernel: &Kernel) -> Result<()> {
    if !options.command.is_empty() && !kernel.is_linux() {
        let name = options.kernel.as_deref().map_or_else(String::new, |path| path.display().to_string());
        let what = if options.root.is_some() { "--root" } else { "a COMMAND" };
        bail!("{what} needs the default guest, and {name} is no Linux kernel");
    }
    if kernel.is_linux()
        && let Some(obstacle) = guest_images::host::obstacle()
    {
        bail!("{obstacle}{}", lab::LAB_HINT);
    }
    Ok(())
}

/// Returns an archive of the modules with which a user's kernel drives Tally's devices. The modules are those of the
/// tree in which the kernel was built, if it is still there. Others are searched for where distributions install them:
/// first below the root directory whose `boot` contains the kernel, then below this host's root directory.
fn modules(kernel: &Kernel, path: &Path) -> Result<Vec<u8>> {
    if let Some(tree) = tree::with_modules(path) {
        info!("modules: those that were built in {}", tree.display());
        return Ok(guest_images::modules::archive_of_tree(&tree)?);
    }
    let Some(release) = kernel.release() else { return Ok(Vec::new()) };
    let boot = path.canonicalize().ok().and_then(|path| path.parent().map(Path::to_owned));
    let root = boot.as_deref().filter(|folder| folder.ends_with("boot")).and_then(Path::parent);
    let folder = [root.unwrap_or(Path::new("/")), Path::new("/")]
        .into_iter()
        .flat_map(|root| ["lib/modules", "usr/lib/modules"].map(|folder| root.join(folder).join(release)))
        .find(|folder| folder.is_dir());
    let Some(folder) = folder else {
        info!("modules: none for {release}; what is not built in is not there");
        return Ok(Vec::new());
    };
    info!("modules: {}", folder.display());
    Ok(guest_images::modules::archive(&folder)?)
}

/// Returns a remark for a file that no option names.
fn origin(named: Option<&PathBuf>) -> &'static str {
    if named.is_some() { "" } else { ", the default guest's" }
}

/// Returns true if the default guest's agent is needed, to run a command, to mount shares or to set up a network.
/// A root file system of the user's does this itself.
pub fn has_agent(options: &Run, kernel: &Kernel) -> bool {
    let is_given = !options.share.is_empty() || !options.disk.is_empty() || options.net.is_some();
    let has_root = options.append.split_whitespace().any(|word| word.starts_with("root="));
    kernel.is_linux() && (!options.command.is_empty() || is_given && options.initrd.is_none() && !has_root)
}

/// Returns the kernel's command line: words that Tally, the processor's identity and the default guest's init need, and
/// the user's.
pub fn command_line(options: &Run, kernel: &Kernel, pmu: Pmu, processor: Processor) -> String {
    let mut words = Vec::new();
    if kernel.is_linux() {
        words.push(KERNEL_PARAMETERS);
        // Tests of the kernel's ciphers, more than half of a boot of Debian's kernels. Others are built without them.
        words.push("cryptomgr.notests");
        if !options.command.is_empty() && options.verbose == 0 {
            // The console is not shown, but its last lines are if the guest dies: only important messages are wanted.
            words.push("quiet");
        }
        words.extend(pmu.kernel_parameters(processor));
        if pmu.needs_retargeting() && !kernel.lets_programs_read_counters() {
            // The instruction would fault, or read 0.
            words.push("tally.user-access=off");
        }
        if options.initrd.is_none() {
            // A tmpfs takes at most half of the memory, too little for the default guest's files in the smallest
            // guests.
            words.push("rootfstype=ramfs");
        }
        if has_agent(options, kernel) {
            // The agent has to know its task before it can be sent messages, to report a failure to the right place.
            words.push(if options.command.is_empty() { "tally.agent=shell" } else { "tally.agent=command" });
        }
        if options.root.is_some() {
            words.push("tally.root");
        }
    }
    words.push(&options.append);
    words.retain(|word| !word.is_empty());
    words.join(" ")
}
