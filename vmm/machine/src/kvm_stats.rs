//! KVM's own statistics of a vCPU, such as exits by reason (`KVM_GET_STATS_FD`, Linux 5.14). The statistics file has a
//! header (`struct kvm_stats_header`), descriptors (`struct kvm_stats_desc`), and the values. Any thread may read it
//! while the vCPU runs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_MASK, KVM_STATS_UNIT_MASK, KVM_STATS_UNIT_NONE,
};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(KVM_GET_STATS_FD, kvm_bindings::KVMIO, 0xce);

/// KVM's statistics of one vCPU.
#[derive(Debug)]
pub struct KvmStats {
    file: File,
    /// Names of the statistics, and offsets of their values in the file.
    offsets: Vec<(String, u64)>,
}

impl KvmStats {
    /// Opens the statistics of a vCPU. Must be called before the vCPU runs, because KVM blocks the call while the vCPU
    /// runs. Returns `None` if this KVM has no statistics.
    pub fn of(vcpu: &VcpuFd) -> Option<Self> {
        // SAFETY: the ioctl has no argument.
        let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the file descriptor is new, so nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        let offsets = offsets(&file).ok()?;
        Some(Self { file, offsets })
    }

    /// Returns what reads the statistic of this name.
    pub fn counter(self, name: &str) -> Option<impl Fn() -> Option<u64> + 'static> {
        let offset = self.offsets.iter().find(|(one, _)| one == name)?.1;
        Some(move || read_u64(&self.file, offset).ok())
    }

    /// Reads the current values. Returns them by KVM's names.
    pub fn read(&self) -> io::Result<BTreeMap<String, u64>> {
        self.offsets.iter().map(|(name, offset)| Ok((name.clone(), read_u64(&self.file, *offset)?))).collect()
    }
}

/// Reads the names of all cumulative event counts, and the offsets of their values. Times, histograms and states are
/// left out.
fn offsets(file: &File) -> io::Result<Vec<(String, u64)>> {
    const NAME_SIZE: u64 = 4;
    const COUNT: u64 = 8;
    const DESCRIPTORS: u64 = 16;
    const DATA: u64 = 20;
    /// Size of a descriptor without the name behind it: flags, exponent, size, offset, bucket size.
    const DESCRIPTOR: u64 = 16;
    let at = |offset| read_u32(file, offset).map(u64::from);
    let (name_size, count, descriptors, data) = (at(NAME_SIZE)?, at(COUNT)?, at(DESCRIPTORS)?, at(DATA)?);
    let mut offsets = Vec::new();
    for number in 0..count {
        let descriptor = descriptors + number * (DESCRIPTOR + name_size);
        let (flags, offset) = (read_u32(file, descriptor)?, at(descriptor + 8)?);
        if flags & KVM_STATS_TYPE_MASK == KVM_STATS_TYPE_CUMULATIVE
            && flags & KVM_STATS_UNIT_MASK == KVM_STATS_UNIT_NONE
        {
            offsets.push((read_name(file, descriptor + DESCRIPTOR, name_size)?, data + offset));
        }
    }
    Ok(offsets)
}

fn read_u32(file: &File, offset: u64) -> io::Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn read_u64(file: &File, offset: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn read_name(file: &File, offset: u64, size: u64) -> io::Result<String> {
    const LONGEST: u64 = 256;
    let mut bytes = vec![0; usize::try_from(size.min(LONGEST)).expect("it is short")];
    file.read_exact_at(&mut bytes, offset)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns a file in KVM's format with these statistics: flags, name, value.
    fn file(statistics: &[(u32, &str, u64)]) -> File {
        const NAME: usize = 8;
        let count = u32::try_from(statistics.len()).unwrap();
        let (list, data) = (24, 24 + count * (16 + 8));
        let mut bytes: Vec<u8> =
            [0, 8, count, 0, list, data].iter().flat_map(|word| word.to_ne_bytes()).collect();
        for (number, (flags, name, _)) in (0..).zip(statistics) {
            bytes.extend(flags.to_ne_bytes());
            bytes.extend([0; 2]);
            bytes.extend(1_u16.to_ne_bytes());
            bytes.extend(u32::to_ne_bytes(number * 8));
            bytes.extend([0; 4]);
            bytes.extend(name.bytes().chain([0; NAME]).take(NAME));
        }
        bytes.extend(statistics.iter().flat_map(|(_, _, value)| value.to_ne_bytes()));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn event_counts_are_read_by_name() {
        let (peak, seconds) = (2, 0x20);
        let file = file(&[(0, "exits", 7), (peak, "depth", 3), (seconds, "wait", 4), (0, "io_exits", 5)]);
        let offsets = offsets(&file).unwrap();
        let stats = KvmStats { file, offsets };
        assert_eq!(stats.read().unwrap(), BTreeMap::from([("exits".into(), 7), ("io_exits".into(), 5)]));
        assert_eq!(stats.counter("io_exits").and_then(|read| read()), Some(5));
    }

    #[test]
    fn a_truncated_file_is_refused() {
        let file = file(&[(0, "exits", 7)]);
        file.set_len(30).unwrap();
        assert!(offsets(&file).is_err());
    }
}
