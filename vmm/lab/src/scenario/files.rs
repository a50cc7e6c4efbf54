//! What a host finds in `/lab` and `/scenario`: the files of a run, and the commands that start its script.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use guest_images::cpio::Archive;
use guest_images::stamp;

use super::Scenario;
use crate::error::{Error, Result};
use crate::shell::quoted;

/// Content of a file on the host.
#[derive(Debug, Clone)]
pub enum Content {
    File(PathBuf),
    Program(Vec<u8>),
}

/// The channels that a run has besides those for standard output and error.
#[derive(Debug, Clone, Copy, Default)]
pub struct Channels {
    /// The channel for standard input.
    pub input: bool,
    /// The channel for what the script leaves in `$OUT`.
    pub out: bool,
}

/// Switches the NMI watchdog off, where the host has one.
const FREE_WATCHDOG: &str =
    "[ ! -e /proc/sys/kernel/nmi_watchdog ] || echo 0 >/proc/sys/kernel/nmi_watchdog\n";
/// Unpacks the archive of files. The initrd cannot have these files, because the host's init mounts file systems over
/// some of its directories.
const UNPACK: &str = "tar -x -p -f /lab/unpacked.tar -C / && rm /lab/unpacked.tar || exit 125\n";
/// Copies the input from its virtio-serial port to a FIFO, which the script can use as its standard input. A port whose
/// host side is not connected reads as end of file, and the host side is connected a moment after the port appears.
const TAKE_INPUT: &str = "\
until grep -q 'host_connected: 1' /sys/kernel/debug/virtio-ports/vport0p5 2>/dev/null; do
    sleep 0.001
done
mkfifo /lab/input
dd if=/dev/vport0p5 of=/lab/input bs=64k 2>/dev/null &
";

impl Scenario {
    /// Returns an archive with the files of this run. A host that was not prepared also has the preparation's files.
    pub(super) fn archive(&self, channels: Channels, is_prepared: bool) -> Result<Vec<u8>> {
        let mut archive = self.begun_archive(channels)?;
        if let Some(preparation) = self.preparation.as_ref().filter(|_| !is_prepared) {
            preparation.add_files(&mut archive)?;
        }
        Ok(archive.finish())
    }

    /// Returns an archive with which a host prepares itself by this scenario.
    pub(super) fn preparing_archive(&self) -> Result<Vec<u8>> {
        let mut archive = self.begun_archive(Channels::default())?;
        archive.file("lab/prepare", 0o644, b"");
        Ok(archive.finish())
    }

    /// Returns everything that the effect of this scenario on a host depends on.
    pub(super) fn inputs(&self) -> Result<Vec<Cow<'_, [u8]>>> {
        let mut inputs = vec![Cow::Borrowed(&self.script[..]), self.run_command(Channels::default()).into()];
        for (name, content) in &self.files {
            inputs.push(name.as_bytes().into());
            inputs.push(match content {
                Content::File(path) => stamp(path)?.into_bytes().into(),
                Content::Program(bytes) => bytes.into(),
            });
        }
        Ok(inputs)
    }

    fn begun_archive(&self, channels: Channels) -> Result<Archive> {
        let mut archive = Archive::new();
        archive.file("lab/script", 0o755, &self.script);
        archive.file("lab/run", 0o644, &self.run_command(channels));
        if channels.out {
            archive.file("lab/keep-out", 0o644, b"");
        }
        if !self.unpacked.is_empty() {
            archive.file("lab/unpacked.tar", 0o644, &self.unpacked);
        }
        self.add_files(&mut archive)?;
        Ok(archive)
    }

    fn add_files(&self, archive: &mut Archive) -> Result<()> {
        for (name, content) in &self.files {
            let name = format!("scenario/{name}");
            match content {
                Content::File(path) => archive.copy(&name, path)?,
                Content::Program(bytes) => archive.file(&name, 0o755, bytes),
            }
        }
        Ok(())
    }

    /// Returns the shell commands that the host's init runs: they prepare files and input, and start the script.
    fn run_command(&self, channels: Channels) -> Vec<u8> {
        let mut text = Vec::new();
        if self.frees_watchdog {
            text.extend_from_slice(FREE_WATCHDOG.as_bytes());
        }
        if !self.unpacked.is_empty() {
            text.extend_from_slice(UNPACK.as_bytes());
        }
        if channels.input {
            text.extend_from_slice(TAKE_INPUT.as_bytes());
        }
        for (name, value) in &self.variables {
            text.extend_from_slice(format!("export {name}=").as_bytes());
            text.extend(quoted(value.as_ref()));
            text.push(b'\n');
        }
        let interpreter: &[u8] = if self.script.starts_with(b"#!") { b"" } else { b"sh " };
        text.extend_from_slice(b"exec ");
        text.extend_from_slice(interpreter);
        text.extend_from_slice(b"/lab/script");
        for argument in &self.arguments {
            text.push(b' ');
            text.extend(quoted(argument));
        }
        if channels.input {
            text.extend_from_slice(b" </lab/input");
        }
        text.push(b'\n');
        text
    }
}

/// Returns a memory file (`memfd`) with an archive, after another one from a file if there is one. It has `size` bytes,
/// or as many as are needed.
pub fn in_memory(first: Option<&Path>, archive: &[u8], size: Option<u64>) -> Result<File> {
    let file = rustix::fs::memfd_create("initrd", rustix::fs::MemfdFlags::CLOEXEC).map_err(io::Error::from);
    let mut file = File::from(file.map_err(Error::system("create a file in memory"))?);
    if let Some(first) = first {
        let mut from = File::open(first).map_err(Error::file("open", first))?;
        io::copy(&mut from, &mut file).map_err(Error::file("copy", first))?;
    }
    file.write_all(archive).map_err(Error::system("write to memory"))?;
    if let Some(size) = size {
        file.set_len(size).map_err(Error::system("extend a file in memory"))?;
    }
    file.rewind().map_err(Error::system("rewind a file"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_reach_the_script_as_they_are() {
        let scenario = Scenario::new("").arguments(["a b", "it's", ""]).variable("X", "$y");
        let command = String::from_utf8(scenario.run_command(Channels::default())).unwrap();
        assert_eq!(command, "export X='$y'\nexec sh /lab/script 'a b' 'it'\\''s' ''\n");
    }

    #[test]
    fn a_script_that_needs_all_counters_frees_the_watchdogs() {
        let command = Scenario::with_all_counters("").run_command(Channels::default());
        assert!(command.starts_with(FREE_WATCHDOG.as_bytes()));
    }

    #[test]
    fn a_script_may_name_its_interpreter() {
        let command = Scenario::new("#!/bin/busybox awk -f\n").run_command(Channels::default());
        assert_eq!(command, b"exec /lab/script\n");
    }
}
