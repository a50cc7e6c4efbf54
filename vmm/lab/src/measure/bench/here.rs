//! The benchmark on this machine itself, which needs a PMU and KVM. Times are real here, and differ from run to run.

use std::env;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use guest_images::{Guest, Progress, Suite, host};
use perf_event_open_sys as sys;
use sys::bindings::{PERF_COUNT_HW_INSTRUCTIONS, PERF_TYPE_HARDWARE, perf_event_attr};

use super::figures::Figures;
use super::plan::Column;
use super::script::Plan;
use super::{CommonFiles, Programs, script_failed};
use crate::error::{Error, Result};
use crate::scenario::{guest, with_programs};

/// The kernel's limit for the time that samples take, in percent.
const LIMIT: &str = "/proc/sys/kernel/perf_cpu_time_max_percent";

/// Returns the reason why the benchmark cannot run on this machine, if there is one. Nothing is built or booted for
/// that.
pub fn obstacle(columns: &[Column]) -> Option<String> {
    if let Err(error) = count_instructions() {
        return Some(match error.raw_os_error() {
            Some(libc::ENOENT | libc::EOPNOTSUPP) => "there is no PMU that counts instructions".to_owned(),
            _ => format!("the PMU cannot be used ({error})"),
        });
    }
    if !in_path("perf") {
        return Some("there is no `perf` (on Debian in the package linux-perf)".to_owned());
    }
    if let Err(error) = File::options().write(true).open(LIMIT) {
        return Some(format!("cannot write {LIMIT} ({error}); run it as root"));
    }
    if columns.contains(&Column::Mediated) {
        return Some("`mediated` is available in the lab only, as it reloads KVM".to_owned());
    }
    if columns.iter().any(|column| *column != Column::Host) { host::obstacle() } else { None }
}

/// Returns true if the distribution's QEMU is installed.
pub fn has_qemu() -> bool {
    in_path("qemu-system-x86_64")
}

/// Runs the benchmark on this machine.
pub fn measure(plan: &Plan, programs: &Programs, progress: &mut Progress) -> Result<Figures> {
    let files = CommonFiles::new(plan, programs)?;
    let folder = tempfile::tempdir().map_err(Error::system("create a temporary directory"))?;
    let folder = folder.path();
    let Guest { kernel, initrd, .. } = guest(Suite::default(), progress)?;
    let initrd = with_programs(&initrd, &files.borrowed())?;
    let guest = folder.join("guest");
    fs::create_dir(&guest).map_err(Error::file("create", &guest))?;
    link(&kernel, &guest.join("kernel"))?;
    link(&programs.tally, &folder.join("tally"))?;
    write(&guest.join("initrd"), &initrd)?;
    for (name, content) in files.borrowed() {
        write(&folder.join(name), content)?;
    }
    progress.step("measuring on this machine");
    let output = Command::new("sh")
        .args(["-c", &plan.main_script()])
        .current_dir(folder)
        .env("TALLY_GUEST", &guest)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::system("run sh"))?;
    if !output.status.success() {
        return Err(script_failed());
    }
    Figures::read(plan, &String::from_utf8_lossy(&output.stdout))
}

fn link(to: &Path, path: &Path) -> Result<()> {
    symlink(to, path).map_err(Error::file("create", path))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    let written =
        fs::write(path, content).and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)));
    written.map_err(Error::file("write", path))
}

fn in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Opens a counter of this process's instructions.
pub fn count_instructions() -> io::Result<File> {
    let mut attr = instructions();
    attr.set_exclude_kernel(1);
    open(attr)
}

/// Opens an event of this thread that overflows at every `period` instructions that the kernel executes for it. Nobody
/// takes the samples.
pub fn interrupt_the_kernel(period: u64) -> io::Result<File> {
    let mut attr = instructions();
    attr.set_exclude_user(1);
    attr.__bindgen_anon_1.sample_period = period;
    open(attr)
}

fn instructions() -> perf_event_attr {
    perf_event_attr {
        size: u32::try_from(size_of::<perf_event_attr>()).expect("the structure is small"),
        type_: PERF_TYPE_HARDWARE,
        config: PERF_COUNT_HW_INSTRUCTIONS.into(),
        ..Default::default()
    }
}

/// Opens an event of this thread.
fn open(mut attr: perf_event_attr) -> io::Result<File> {
    // SAFETY: `attr` is initialised and its size is correct. The call writes to no memory of this process.
    let fd = unsafe { sys::perf_event_open(&raw mut attr, 0, -1, -1, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this file descriptor, and nothing else owns it.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
}
