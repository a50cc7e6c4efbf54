//! The guest's memory in a file: saved there without what the guest never touched, and mapped from there so that pages
//! are read when they are needed, and copied when they are written.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, VolatileSlice};

use super::GuestRam;

const PAGE: usize = 4096;
/// Number of pages of which the kernel is asked at a time.
const CHUNK: usize = 4096;
/// Maximum size of a part of the memory that is written at once.
pub const PART: usize = 64 << 10;
/// Bits of an entry of `/proc/self/pagemap`: the page is in memory, or was swapped out.
const IN_MEMORY: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// Which pages of this process exist (`/proc/self/pagemap`).
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens the map. It does not tell where in the host's memory the pages are: that is for a process with
    /// `CAP_SYS_ADMIN`, and a thread that was taken over may read the map.
    pub fn open() -> io::Result<Self> {
        without_admin(|| File::open("/proc/self/pagemap")).map(Self)
    }

    /// Returns for each of some pages, of which the first has this address, whether it exists.
    fn exist(&self, address: usize, count: usize) -> io::Result<Vec<bool>> {
        let mut entries = vec![0; count * 8];
        self.0.read_exact_at(&mut entries, (address / PAGE * 8) as u64)?;
        let (entries, _) = entries.as_chunks();
        Ok(entries.iter().map(|entry| u64::from_ne_bytes(*entry) & (IN_MEMORY | SWAPPED) != 0).collect())
    }
}

/// Does some work on this thread while `CAP_SYS_ADMIN` has no effect.
fn without_admin<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = capabilities(None)?;
    if !own.effective.contains(CapabilitySet::SYS_ADMIN) {
        return work();
    }
    let effective = own.effective - CapabilitySet::SYS_ADMIN;
    set_capabilities(None, CapabilitySets { effective, ..own })?;
    let result = work();
    set_capabilities(None, own)?;
    result
}

impl GuestRam {
    /// Maps what a file has of this RAM's content over it. The rest stays as in a guest that boots, with large pages
    /// where the host has some. The file stays as it is.
    pub(super) fn map_from(&mut self, file: &File) -> io::Result<()> {
        if file.metadata()?.len() != self.size {
            return Err(io::Error::other("the saved memory has another size"));
        }
        let mut extents = VecDeque::from(extents(file, self.size)?);
        let mut start = 0;
        for region in self.mapped.iter() {
            let end = start + region.len();
            while let Some(part) = take_below(&mut extents, end) {
                let len = usize::try_from(part.end - part.start).map_err(io::Error::other)?;
                let at = MemoryRegionAddress(part.start - start);
                let slice = region.get_slice(at, len).map_err(io::Error::other)?;
                map_over(&slice, file, part.start)?;
                self.from_file.push(part);
            }
            start = end;
        }
        Ok(())
    }

    /// Writes the RAM to an empty file. Pages of zeroes become holes. No vCPU may run meanwhile.
    pub fn save(&self, pages: &PageMap, file: &File) -> io::Result<()> {
        file.set_len(self.size())?;
        self.for_each_part(pages, |offset, bytes| file.write_all_at(bytes, offset))
    }

    /// Calls `write` with all parts of the RAM that are not zero: whole pages, at most [`PART`] bytes, and where they
    /// belong in a file of the RAM. No vCPU may run meanwhile.
    pub fn for_each_part(
        &self,
        pages: &PageMap,
        mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut part = Part { start: 0, bytes: Vec::with_capacity(PART) };
        let mut start = 0;
        for region in self.mapped.iter() {
            let len = usize::try_from(region.len()).expect("it is mapped");
            let mut page = [0; PAGE];
            for first in (0..len / PAGE).step_by(CHUNK) {
                let count = CHUNK.min(len / PAGE - first);
                let address = region.as_ptr() as usize + first * PAGE;
                let exist = pages.exist(address, count)?;
                for (number, exists) in (first..).zip(exist) {
                    let at = (number * PAGE) as u64;
                    if !exists && !self.is_from_file(start + at) {
                        continue;
                    }
                    region.read_slice(&mut page, MemoryRegionAddress(at)).map_err(io::Error::other)?;
                    if page != [0; PAGE] {
                        part.add(start + at, &page, &mut write)?;
                    }
                }
            }
            start += region.len();
        }
        part.flush(&mut write)
    }

    fn is_from_file(&self, at: u64) -> bool {
        let behind = self.from_file.partition_point(|part| part.end <= at);
        self.from_file.get(behind).is_some_and(|part| part.contains(&at))
    }
}

/// Pages in a row that are not zero.
struct Part {
    start: u64,
    bytes: Vec<u8>,
}

impl Part {
    fn add(
        &mut self,
        at: u64,
        page: &[u8],
        write: &mut impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.start + self.bytes.len() as u64 != at || self.bytes.len() == PART {
            self.flush(write)?;
            self.start = at;
        }
        self.bytes.extend(page);
        Ok(())
    }

    fn flush(&mut self, write: &mut impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
        if !self.bytes.is_empty() {
            write(self.start, &self.bytes)?;
            self.bytes.clear();
        }
        Ok(())
    }
}

/// Returns where a file has data, in whole pages. Short holes count as data, so that there are few mappings.
pub fn extents(file: &File, len: u64) -> io::Result<Vec<Range<u64>>> {
    const SHORT: u64 = 64 << 10;
    let mut extents: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < len {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // There is nothing more.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(len);
        let page = PAGE as u64;
        let (start, end) = (start / page * page, end.next_multiple_of(page).min(len));
        match extents.last_mut() {
            Some(last) if start <= last.end + SHORT => last.end = end,
            _ => extents.push(start..end),
        }
        at = end;
    }
    Ok(extents)
}

/// Takes the first of these extents, or its part below `end`. Returns `None` if it begins there or behind. A file may
/// have as many extents as it has pages.
fn take_below(extents: &mut VecDeque<Range<u64>>, end: u64) -> Option<Range<u64>> {
    let extent = extents.front_mut().filter(|extent| extent.start < end)?;
    let part = extent.start..extent.end.min(end);
    extent.start = part.end;
    if extent.start == extent.end {
        extents.pop_front();
    }
    Some(part)
}

/// Maps a part of a file over memory, so that a page is copied when it is written.
fn map_over(memory: &VolatileSlice, file: &File, offset: u64) -> io::Result<()> {
    let at = memory.ptr_guard_mut().as_ptr();
    let offset = offset.try_into().map_err(io::Error::other)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the memory is part of a mapping of whole pages that lives on, with the same protection, and is accessed
    // as volatile only.
    let mapped = unsafe { libc::mmap(at.cast(), memory.len(), protection, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use vm_memory::GuestAddress;

    use super::*;

    fn ranges(size: u64) -> Vec<(u64, u64)> {
        vec![(0, 1 << 20), (4 << 30, size - (1 << 20))]
    }

    #[test]
    fn the_map_does_not_tell_where_pages_are_in_the_hosts_memory() {
        const FRAME: u64 = (1 << 55) - 1;
        let before = capabilities(None).unwrap();
        let map = PageMap::open().unwrap();
        assert_eq!(capabilities(None).unwrap(), before);
        let page = Box::new([1_u8; PAGE]);
        let mut entry = [0; 8];
        map.0.read_exact_at(&mut entry, (page.as_ptr().addr() / PAGE * 8) as u64).unwrap();
        let entry = u64::from_ne_bytes(entry);
        assert_eq!((entry & IN_MEMORY, entry & FRAME), (IN_MEMORY, 0));
    }

    #[test]
    fn saved_memory_is_mapped_again_and_what_was_never_touched_takes_no_space() {
        let size = "64M".parse().unwrap();
        let ram = GuestRam::new(&size, ranges).unwrap();
        let places = [0, 4095, (1 << 20) - 1, 4 << 30, (4 << 30) + (63 << 20) - 1];
        for (value, at) in (1..).zip(places) {
            ram.mapped.write_obj::<u8>(value, GuestAddress(at)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        ram.save(&PageMap::open().unwrap(), &file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 64 << 20);
        assert!(file.metadata().unwrap().blocks() <= 64, "four pages: {}", file.metadata().unwrap().blocks());

        let restored = GuestRam::restored(&size, ranges, &file).unwrap();
        for (value, at) in (1..).zip(places) {
            assert_eq!(restored.mapped.read_obj::<u8>(GuestAddress(at)).unwrap(), value);
        }
        let mapped = restored.mapped_from_file();
        let host = |at| restored.mapped.get_host_address(GuestAddress(at)).unwrap() as usize;
        for at in places {
            assert_eq!(mapped.iter().filter(|part| part.contains(&host(at))).count(), 1, "{at:#x}");
        }
        assert!(!mapped.iter().any(|part| part.contains(&host(512 << 10))), "it was never touched");
        // What one guest writes is in neither the file nor another guest, but in what is saved of it.
        restored.mapped.write_obj::<u8>(99, GuestAddress(0)).unwrap();
        let other = GuestRam::restored(&size, ranges, &file).unwrap();
        assert_eq!(other.mapped.read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
        let again = tempfile::tempfile().unwrap();
        restored.save(&PageMap::open().unwrap(), &again).unwrap();
        let again = GuestRam::restored(&size, ranges, &again).unwrap();
        assert_eq!(again.mapped.read_obj::<u8>(GuestAddress(0)).unwrap(), 99);
        assert_eq!(again.mapped.read_obj::<u8>(GuestAddress(4095)).unwrap(), 2);
    }

    #[test]
    fn a_file_may_have_as_many_extents_as_its_author_likes() {
        // With work that grows with the square of their number, this would take hours.
        const EXTENTS: u64 = 2_000_000;
        let mut extents: VecDeque<_> = (0..EXTENTS).map(|number| 4 * number..4 * number + 2).collect();
        let end_of_first = 2 * EXTENTS + 1;
        let below = |extents: &mut _, end| -> Vec<_> {
            std::iter::from_fn(|| take_below(extents, end)).collect::<Vec<Range<u64>>>()
        };
        let first = below(&mut extents, end_of_first);
        assert_eq!(first.last(), Some(&(2 * EXTENTS..end_of_first)), "the region ends in the extent");
        let second = below(&mut extents, u64::MAX);
        assert_eq!(second.first(), Some(&(end_of_first..end_of_first + 1)));
        assert_eq!(first.len() + second.len(), usize::try_from(EXTENTS).unwrap() + 1);
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len((64 << 20) + 4096).unwrap();
        let said = GuestRam::restored(&"64M".parse().unwrap(), ranges, &file).unwrap_err().to_string();
        assert!(said.contains("another size"), "{said}");
        file.set_len(32 << 20).unwrap();
        GuestRam::restored(&"64M".parse().unwrap(), ranges, &file).unwrap_err();
    }
}
