//! The ring buffer that the kernel writes samples into, and the metadata page in front of it.

use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::{self, perf_event_mmap_page};

use crate::event::Counter;
use crate::failure::{Failure, equal};

const PAGE: usize = 4096;

/// A counter's mapped ring buffer, with its metadata page.
pub struct Ring {
    page: *mut perf_event_mmap_page,
    /// Size of the buffer, without the metadata page.
    pages: usize,
}

/// A record that the kernel wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Sample(Sample),
    /// Number of records that were lost because the buffer was full.
    Lost(u64),
    /// The type and the body of any other record.
    Other(u32, Vec<u8>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub ip: u64,
    pub task: i32,
    pub time: u64,
    pub period: u64,
    /// Fields of the sample beside [`crate::event::SAMPLE_FIELDS`].
    pub rest: Vec<u64>,
}

impl Ring {
    /// Maps a buffer of this many pages, which must be a power of two. With 0, only the metadata page is mapped.
    pub fn map(counter: &Counter, pages: usize) -> Result<Self, Failure> {
        let length = (pages + 1) * PAGE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free range of addresses.
        let page = unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, counter.fd(), 0) };
        if page == libc::MAP_FAILED {
            return Err(Failure::last("map a counter's ring buffer"));
        }
        Ok(Self { page: page.cast(), pages })
    }

    /// Returns the present content of the metadata page.
    pub fn page(&self) -> perf_event_mmap_page {
        // SAFETY: the page is mapped for as long as `self` lives. The read is volatile, as the kernel may change the
        // page.
        unsafe { ptr::read_volatile(self.page) }
    }

    /// Number of bytes that the kernel has written.
    fn head(&self) -> &AtomicU64 {
        self.number(offset_of!(perf_event_mmap_page, data_head))
    }

    /// Number of bytes that this program has read.
    fn tail(&self) -> &AtomicU64 {
        self.number(offset_of!(perf_event_mmap_page, data_tail))
    }

    fn number(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the number is an aligned field of the page, which is mapped for as long as `self` lives.
        unsafe { AtomicU64::from_ptr(self.page.wrapping_byte_add(offset).cast()) }
    }

    /// Removes all records from the buffer and returns them.
    pub fn records(&mut self) -> Vec<Record> {
        let (mut tail, head) = (self.tail().load(Ordering::Relaxed), self.head().load(Ordering::Acquire));
        let mut records = Vec::new();
        while tail < head {
            let header = u64::from_le_bytes(self.copy(tail, 8).try_into().expect("eight bytes"));
            let size = header >> 48;
            let kind = u32::try_from(header & 0xffff_ffff).expect("the value has 32 bits");
            let body = self.copy(tail + 8, usize::try_from(size).expect("the size has 16 bits") - 8);
            records.push(record(kind, body));
            tail += size;
        }
        self.tail().store(tail, Ordering::Release);
        records
    }

    /// Removes all records and returns them. All of them must be samples.
    pub fn samples(&mut self) -> Result<Vec<Sample>, Failure> {
        let mut samples = Vec::new();
        for record in self.records() {
            match record {
                Record::Sample(sample) => samples.push(sample),
                other => equal("among the samples", Some(other), None)?,
            }
        }
        Ok(samples)
    }

    fn copy(&self, from: u64, length: usize) -> Vec<u8> {
        let size = self.pages * PAGE;
        let from = usize::try_from(from).expect("addresses have 64 bits");
        (from..from + length)
            .map(|at| {
                // SAFETY: the offset is inside the buffer, which follows the metadata page.
                unsafe { ptr::read_volatile(self.page.cast::<u8>().wrapping_add(PAGE + at % size)) }
            })
            .collect()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and no borrow of it outlives `self`.
        unsafe { libc::munmap(self.page.cast(), (self.pages + 1) * PAGE) };
    }
}

fn record(kind: u32, body: Vec<u8>) -> Record {
    let words: Vec<u64> = body
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        .collect();
    match (kind, words.as_slice()) {
        (bindings::PERF_RECORD_SAMPLE, &[ip, tasks, time, period, ref rest @ ..]) => Record::Sample(Sample {
            ip,
            task: i32::try_from(tasks >> 32).expect("thread IDs are positive"),
            time,
            period,
            rest: rest.to_vec(),
        }),
        (bindings::PERF_RECORD_LOST, &[_, number]) => Record::Lost(number),
        _ => Record::Other(kind, body),
    }
}
