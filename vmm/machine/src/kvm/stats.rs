//! What KVM itself counts for a vCPU, above all why it left the guest (`KVM_GET_STATS_FD`, Linux 5.14). Such a file
//! describes itself: a header, a list of what there is, and the values. Anybody may read it while the vCPU runs.

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

/// The statistics of one vCPU.
#[derive(Debug)]
pub struct KvmStats {
    file: File,
    /// Each one's name and where its value is.
    places: Vec<(String, u64)>,
}

impl KvmStats {
    /// Those of a vCPU that does not run yet: KVM has one that runs wait. None if this KVM has none.
    pub fn of(vcpu: &VcpuFd) -> Option<Self> {
        // SAFETY: takes no pointer.
        let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is new and nobody else has it.
        let file = unsafe { File::from_raw_fd(fd) };
        let places = places(&file).ok()?;
        Some(Self { file, places })
    }

    /// What was counted up to now, by KVM's names.
    pub fn read(&self) -> io::Result<BTreeMap<String, u64>> {
        self.places.iter().map(|(name, place)| Ok((name.clone(), number(&self.file, *place)?))).collect()
    }
}

/// Where the values are of what is counted, and is a number. Times, tables and states are left out.
fn places(file: &File) -> io::Result<Vec<(String, u64)>> {
    const NAME_SIZE: u64 = 4;
    const COUNT: u64 = 8;
    const LIST: u64 = 16;
    const DATA: u64 = 20;
    /// Of an entry of the list, without its name: its flags, an exponent, its size, its place, and that of its table.
    const ENTRY: u64 = 16;
    let at = |place| half(file, place).map(u64::from);
    let (name_size, count, list, data) = (at(NAME_SIZE)?, at(COUNT)?, at(LIST)?, at(DATA)?);
    let mut places = Vec::new();
    for number in 0..count {
        let entry = list + number * (ENTRY + name_size);
        let (flags, place) = (half(file, entry)?, at(entry + 8)?);
        if flags & KVM_STATS_TYPE_MASK == KVM_STATS_TYPE_CUMULATIVE
            && flags & KVM_STATS_UNIT_MASK == KVM_STATS_UNIT_NONE
        {
            places.push((text(file, entry + ENTRY, name_size)?, data + place));
        }
    }
    Ok(places)
}

fn half(file: &File, place: u64) -> io::Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, place)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn number(file: &File, place: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, place)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn text(file: &File, place: u64, size: u64) -> io::Result<String> {
    const LONGEST: u64 = 256;
    let mut bytes = vec![0; usize::try_from(size.min(LONGEST)).expect("it is short")];
    file.read_exact_at(&mut bytes, place)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A file as KVM has it, of these statistics: flags, name, value.
    fn file(statistics: &[(u32, &str, u64)]) -> File {
        const NAME: usize = 8;
        let count = u32::try_from(statistics.len()).unwrap();
        let (list, data) = (24, 24 + count * (16 + 8));
        let mut bytes: Vec<u8> =
            [0, 8, count, 0, list, data].iter().flat_map(|half| half.to_ne_bytes()).collect();
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
    fn what_is_counted_is_found_by_its_name() {
        let (peak, seconds) = (2, 0x20);
        let file = file(&[(0, "exits", 7), (peak, "depth", 3), (seconds, "wait", 4), (0, "io_exits", 5)]);
        let places = places(&file).unwrap();
        let stats = KvmStats { file, places }.read().unwrap();
        assert_eq!(stats, BTreeMap::from([("exits".into(), 7), ("io_exits".into(), 5)]));
    }

    #[test]
    fn a_file_that_ends_too_early_is_refused() {
        let file = file(&[(0, "exits", 7)]);
        file.set_len(30).unwrap();
        assert!(places(&file).is_err());
    }
}
