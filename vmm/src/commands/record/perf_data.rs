//! Writes samples of a guest as a file that perf reads (`tools/perf/Documentation/perf.data-file-format.txt` in Linux).
//!
//! To perf they are samples of a machine of its own: the guest's kernel is the kernel, its processes are the processes,
//! and a vCPU is a CPU. The file is complete after each round of samples, so that nothing is lost if it ends early.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::os::unix::fs::FileExt;

use tally_machine::{Mapping, Module, Sample, Task};
use vpmu::event::Filter;

use crate::protocol::recording::SampleRate;

/// What is written about the samples of a file.
#[derive(Debug, Clone)]
pub struct Description {
    /// The event's `type` and `config`.
    pub kind: u32,
    pub config: u64,
    pub rate: SampleRate,
    pub filter: Filter,
    /// The samples have callers.
    pub chains: bool,
    /// The kernel's build id, if it is known.
    pub build_id: Option<[u8; 20]>,
    /// The kernel's first and last address, if they are known.
    pub kernel: Option<(u64, u64)>,
    /// The modules that the kernel had at the beginning.
    pub modules: Vec<Module>,
}

/// Sizes of the file's header, of `perf_event_attr` (`PERF_ATTR_SIZE_VER5`), and of what is in front of the data.
const HEADER: usize = 104;
const ATTRIBUTES: usize = 112;
const IDS: usize = 16;
const DATA: u64 = (HEADER + ATTRIBUTES + IDS) as u64;
/// Where the header has the size of the data, and which features are behind these.
const DATA_SIZE: u64 = 48;
const FEATURES: u64 = 72;

/// Types of records.
const MMAP: u32 = 1;
const LOST: u32 = 2;
const COMM: u32 = 3;
const SAMPLE: u32 = 9;
const MMAP2: u32 = 10;
const FINISHED_ROUND: u32 = 68;

/// Where a record's address is.
const KERNEL: u16 = 1;
const USER: u16 = 2;
/// The build id's record has its size.
const HAS_SIZE: u16 = 1 << 15;
/// A mapping's record has the file's build id in place of its numbers.
const HAS_BUILD_ID: u16 = 1 << 14;
/// Name of memory without a file. perf would look on this host for a map of its own name for that (`//anon`).
const NO_FILE: &str = "[anon]";
/// Protection and flags of what a program executes: it is read and executed, and private.
const CODE: [u32; 2] = [5, 2];

/// Marks in a chain: what follows is in the kernel, or in the program.
const IN_KERNEL: u64 = (-128_i64).cast_unsigned();
const IN_USER: u64 = (-512_i64).cast_unsigned();
/// The process of the kernel's records.
const NO_PROCESS: u32 = u32::MAX;
/// Where the numbers of processes begin whose own are not known: Linux has none of these.
const NO_NUMBER: u32 = 1 << 30;
/// Maximum number of threads, and of page tables, that are remembered: a guest can make up any number.
const MAX_KNOWN: usize = 1 << 16;

/// Writes a file.
pub struct Writer<'a> {
    file: &'a mut File,
    description: Description,
    /// Size of the data in front of the first sample, of all data that was written, and number of samples in it.
    front: u64,
    size: u64,
    samples: u64,
    /// Names of the threads, as they were written last.
    names: HashMap<(u32, u32), String>,
    /// Numbers of page tables whose process is not known.
    tables: HashMap<u64, u32>,
    /// Modules that were loaded since the beginning.
    loaded: Vec<Module>,
}

impl<'a> Writer<'a> {
    /// Begins an empty file.
    pub fn create(file: &'a mut File, description: &Description) -> io::Result<Self> {
        let mut begin = b"PERFILE2".to_vec();
        let attribute = (ATTRIBUTES + IDS) as u64;
        for word in [HEADER as u64, attribute, HEADER as u64, attribute, DATA] {
            begin.extend(word.to_le_bytes());
        }
        begin.resize(HEADER, 0);
        begin.extend(attributes(description));
        begin.resize(HEADER + ATTRIBUTES + IDS, 0);
        file.write_all(&begin)?;
        let mut writer = Self {
            file,
            description: description.clone(),
            front: 0,
            size: 0,
            samples: 0,
            names: HashMap::new(),
            tables: HashMap::new(),
            loaded: Vec::new(),
        };
        if let Some((start, end)) = description.kernel {
            let mut records = Records::default();
            records.add_kernel_mapping([start, end - start, start], "[kernel.kallsyms]_text");
            records.add_modules(&description.modules);
            writer.append(&records)?;
            writer.front = writer.size;
        }
        Ok(writer)
    }

    /// Adds modules that have been loaded.
    pub fn add_modules(&mut self, modules: Vec<Module>) {
        self.loaded.extend(modules);
    }

    /// Puts the modules that have been loaded in front of all samples: perf reads the kernel's symbols at the first
    /// one, and keeps those of the modules that it knows then. If the disk is full, the file has no such modules.
    fn insert_modules(&mut self) -> io::Result<()> {
        const PART: u64 = 1 << 20;
        let mut records = Records::default();
        records.add_modules(&self.loaded);
        let (records, end) = (records.0, DATA + self.size);
        // First of all the disk must have room for more.
        if records.is_empty() || self.file.write_all_at(&vec![0; records.len()], end).is_err() {
            return self.file.set_len(end);
        }
        let (first, distance) = (DATA + self.front, records.len() as u64);
        let (mut part, mut behind) = (Vec::new(), end);
        while behind > first {
            let start = behind.saturating_sub(PART).max(first);
            part.resize(usize::try_from(behind - start).expect("it is small"), 0);
            self.file.read_exact_at(&mut part, start)?;
            self.file.write_all_at(&part, start + distance)?;
            behind = start;
        }
        self.file.write_all_at(&records, first)?;
        self.size += distance;
        self.file.write_all_at(&self.size.to_le_bytes(), DATA_SIZE)
    }

    /// Adds samples, in the order of their time. The last ones of a round are those after which none is older.
    pub fn add(&mut self, samples: &[Sample], lost: u64, ends_round: bool) -> io::Result<()> {
        let Some(latest) = samples.last() else { return Ok(()) };
        let mut records = Records::default();
        for sample in samples {
            self.add_sample(&mut records, sample);
        }
        if lost > 0 {
            records.add(LOST, 0, |record| {
                record.words(&[0, lost]);
                record.identity(0, 0, latest.time, 0);
            });
        }
        if ends_round {
            records.add(FINISHED_ROUND, 0, |_| {});
        }
        self.append(&records)
    }

    fn add_sample(&mut self, records: &mut Records, sample: &Sample) {
        let task = self.task(sample);
        let (process, thread) = (number(task.process), number(task.thread));
        let vcpu = u32::from(sample.vcpu);
        if self.names.get(&(process, thread)) != Some(&task.name) {
            if self.names.len() >= MAX_KNOWN {
                self.names.clear();
            }
            records.add(COMM, 0, |record| {
                record.pair(process, thread);
                record.text(&task.name);
                record.identity(process, thread, sample.time, vcpu);
            });
            self.names.insert((process, thread), task.name);
        }
        for mapping in &sample.mappings {
            records.add_mapping(mapping, thread, sample.time, vcpu);
        }
        records.add(SAMPLE, if sample.is_user { USER } else { KERNEL }, |record| {
            record.words(&[sample.instruction]);
            record.pair(process, thread);
            record.words(&[sample.time]);
            record.pair(vcpu, 0);
            record.words(&[sample.period]);
            if self.description.chains {
                record.chain(sample);
            }
        });
    }

    /// Returns the thread of a sample. If it is not known, each page table stands for a process.
    fn task(&mut self, sample: &Sample) -> Task {
        let unknown = || {
            let next = NO_NUMBER + u32::try_from(self.tables.len().min(MAX_KNOWN)).unwrap_or(0);
            let process = match self.tables.get(&sample.table) {
                Some(process) => *process,
                None if self.tables.len() >= MAX_KNOWN => next,
                None => *self.tables.entry(sample.table).or_insert(next),
            };
            Task { process, thread: process, name: format!("cr3-{:x}", sample.table) }
        };
        sample.task.clone().unwrap_or_else(unknown)
    }

    /// Appends records. If not all of them can be written, the file has those in front of the first that cannot.
    fn append(&mut self, records: &Records) -> io::Result<()> {
        let written = self.append_bytes(&records.0, records.iter());
        if written.is_ok() {
            return written;
        }
        records.iter().try_for_each(|record| self.append_bytes(record, [record].into_iter()))
    }

    /// Appends the bytes of whole records. If they cannot be written, the file stays as it was.
    fn append_bytes<'r>(&mut self, bytes: &[u8], records: impl Iterator<Item = &'r [u8]>) -> io::Result<()> {
        let size = self.size + bytes.len() as u64;
        let written = self.file.write_all_at(bytes, DATA + self.size);
        let written = written.and_then(|()| self.file.write_all_at(&size.to_le_bytes(), DATA_SIZE));
        if written.is_err() {
            self.file.set_len(DATA + self.size)?;
            return written;
        }
        self.size = size;
        self.samples += records.filter(|record| record.starts_with(&SAMPLE.to_le_bytes())).count() as u64;
        Ok(())
    }

    /// Returns the number of samples in the file.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Adds what is behind the data: the kernel's build id, without which perf could take the host's kernel for it. If
    /// the disk is full, the file has none, and all samples.
    pub fn finish(mut self) -> io::Result<()> {
        const BUILD_ID: u64 = 2;
        self.insert_modules()?;
        let Some(build_id) = self.description.build_id else { return Ok(()) };
        let mut section = Records::default();
        section.add(0, KERNEL | HAS_SIZE, |record| {
            record.0.extend(NO_PROCESS.to_le_bytes());
            record.0.extend(build_id);
            record.0.extend([20, 0, 0, 0]);
            record.text("[kernel.kallsyms]");
        });
        let at = DATA + self.size;
        let table = [at + 16, section.0.len() as u64].map(u64::to_le_bytes).concat();
        let written = self.file.write_all_at(&[table, section.0].concat(), at);
        if written.is_err() {
            return self.file.set_len(at);
        }
        self.file.write_all_at(&(1_u64 << BUILD_ID).to_le_bytes(), FEATURES)
    }
}

/// Returns a number as perf takes it: not negative.
fn number(number: u32) -> u32 {
    number & (u32::MAX >> 1)
}

/// Returns `perf_event_attr`.
fn attributes(description: &Description) -> Vec<u8> {
    const IP: u64 = 1;
    const TID: u64 = 1 << 1;
    const TIME: u64 = 1 << 2;
    const CHAIN: u64 = 1 << 5;
    const CPU: u64 = 1 << 7;
    const PERIOD: u64 = 1 << 8;
    /// Flags: what is excluded; `comm`, `mmap`, `freq`, `sample_id_all`, `use_clockid`.
    const NO_USER: u64 = 1 << 4;
    const NO_KERNEL: u64 = 1 << 5;
    const NO_HYPERVISOR: u64 = 1 << 6;
    const RECORDS: u64 = 1 << 8 | 1 << 9;
    const IS_FREQUENCY: u64 = 1 << 10;
    const SAME_FIELDS: u64 = 1 << 18;
    const HAS_CLOCK: u64 = 1 << 25;
    const CLOCK_ID: u64 = 92;
    let Description { kind, config, rate, filter, chains, .. } = *description;
    let (rate, frequency) = match rate {
        SampleRate::Period(period) => (period, 0),
        SampleRate::Frequency(frequency) => (frequency, IS_FREQUENCY),
    };
    let levels = match filter {
        Filter::User => NO_KERNEL,
        Filter::Kernel => NO_USER,
        Filter::All => 0,
    };
    let fields = IP | TID | TIME | CPU | PERIOD | if chains { CHAIN } else { 0 };
    let flags = levels | NO_HYPERVISOR | RECORDS | frequency | SAME_FIELDS | HAS_CLOCK;
    let kind_and_size = u64::from(kind) | (ATTRIBUTES as u64) << 32;
    let mut bytes: Vec<u8> =
        [kind_and_size, config, rate, fields, 0, flags].into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.resize(ATTRIBUTES, 0);
    let clock = usize::try_from(CLOCK_ID).expect("it is small");
    bytes[clock..clock + 4].copy_from_slice(&libc::CLOCK_MONOTONIC.to_le_bytes());
    bytes
}

/// Records, one behind the other.
#[derive(Debug, Default)]
struct Records(Vec<u8>);

impl Records {
    /// Adds a record with a content.
    fn add(&mut self, kind: u32, place: u16, content: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.0.extend(kind.to_le_bytes());
        self.0.extend(place.to_le_bytes());
        self.0.extend([0, 0]);
        content(self);
        let size = u16::try_from(self.0.len() - start).expect("no record is that long");
        self.0[start + 6..start + 8].copy_from_slice(&size.to_le_bytes());
    }

    /// Returns the bytes of each record.
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.0[..];
        iter::from_fn(move || {
            let size = u16::from_le_bytes(rest.get(6..8)?.try_into().expect("they are two"));
            let (record, later) = rest.split_at(usize::from(size));
            rest = later;
            Some(record)
        })
    }

    /// Adds a part of the kernel: its first address, its length, and where it begins in its file.
    fn add_kernel_mapping(&mut self, place: [u64; 3], name: &str) {
        self.add(MMAP, KERNEL, |record| {
            record.pair(NO_PROCESS, 0);
            record.words(&place);
            record.text(name);
            record.identity(NO_PROCESS, 0, 0, 0);
        });
    }

    fn add_modules(&mut self, modules: &[Module]) {
        for Module { name, start, len, .. } in modules {
            self.add_kernel_mapping([*start, *len, 0], &format!("[{name}]"));
        }
    }

    /// Adds what a process has mapped. By a file's build id perf refuses another file of the same path.
    fn add_mapping(&mut self, mapping: &Mapping, thread: u32, time: u64, vcpu: u32) {
        let process = number(mapping.process);
        let place = if mapping.build_id.is_some() { USER | HAS_BUILD_ID } else { USER };
        self.add(MMAP2, place, |record| {
            record.pair(process, thread);
            record.words(&[mapping.start, mapping.len, mapping.offset]);
            match mapping.build_id {
                Some(id) => {
                    record.0.extend([20, 0, 0, 0]);
                    record.0.extend(id);
                }
                // The device, and the file's number and generation.
                None => record.words(&[0; 3]),
            }
            record.pair(CODE[0], CODE[1]);
            record.text(if mapping.path.is_empty() { NO_FILE } else { &mapping.path });
            record.identity(process, thread, time, vcpu);
        });
    }

    fn words(&mut self, words: &[u64]) {
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    fn pair(&mut self, first: u32, second: u32) {
        self.0.extend([first, second].into_iter().flat_map(u32::to_le_bytes));
    }

    /// Adds a text with a zero behind it, up to a multiple of 8 bytes. It is no longer than a path may be.
    fn text(&mut self, text: &str) {
        const MAX: usize = 4095;
        let text = &text.as_bytes()[..text.len().min(MAX)];
        self.0.extend(text);
        let padded = (text.len() + 1).next_multiple_of(8);
        self.0.resize(self.0.len() + padded - text.len(), 0);
    }

    /// Adds the fields that all records have which are no samples.
    fn identity(&mut self, process: u32, thread: u32, time: u64, vcpu: u32) {
        self.pair(process, thread);
        self.words(&[time]);
        self.pair(vcpu, 0);
    }

    /// Adds a sample's chain, which begins with its instruction.
    fn chain(&mut self, sample: &Sample) {
        /// More than a VM of Tally's sends.
        const MAX: usize = 256;
        let (own, others) =
            if sample.is_user { (&sample.user, None) } else { (&sample.kernel, Some(&sample.user)) };
        let mut chain = vec![if sample.is_user { IN_USER } else { IN_KERNEL }, sample.instruction];
        chain.extend(own.iter().take(MAX));
        if let Some(user) = others.filter(|user| !user.is_empty()) {
            chain.push(IN_USER);
            chain.extend(user.iter().take(MAX));
        }
        self.words(&[chain.len() as u64]);
        self.words(&chain);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn description(chains: bool) -> Description {
        let rate = SampleRate::Period(1000);
        let (build_id, kernel) = (Some([7; 20]), Some((0xffff_ffff_8100_0000, u64::MAX)));
        let modules = vec![Module { name: "fuse".into(), start: 0xffff_ffff_c000_0000, len: 9, size: 99 }];
        Description { kind: 0, config: 1, rate, filter: Filter::All, chains, build_id, kernel, modules }
    }

    fn sample(time: u64, task: Option<Task>) -> Sample {
        let (vcpu, is_user, instruction, period, table) = (1, true, 0x40_1000, 1000, 0x1000 * time);
        let (kernel, user, mappings) = (Vec::new(), vec![0x40_2000], Vec::new());
        Sample { time, vcpu, is_user, instruction, period, table, task, kernel, user, mappings }
    }

    /// Creates a file that can be read and written.
    fn open(path: &std::path::Path) -> File {
        File::options().read(true).write(true).create_new(true).open(path).unwrap()
    }

    /// Returns type and size of each record of a file, and the words of the header.
    fn read(bytes: &[u8]) -> (Vec<(u32, u16)>, Vec<u64>) {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let header: Vec<u64> = (0..HEADER).step_by(8).map(word).collect();
        let (start, len) = (usize::try_from(header[5]).unwrap(), usize::try_from(header[6]).unwrap());
        let (mut at, mut records) = (start, Vec::new());
        while at < start + len {
            let first = word(at);
            let (kind, size) =
                (u32::try_from(first & 0xffff_ffff).unwrap(), u16::try_from(first >> 48).unwrap());
            records.push((kind, size));
            at += usize::from(size);
        }
        assert_eq!(at, start + len, "the last record is whole");
        (records, header)
    }

    #[test]
    fn a_file_is_complete_after_each_round() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let mut file = File::create(&path).unwrap();
        let mut writer = Writer::create(&mut file, &description(true)).unwrap();
        let task = Task { process: 7, thread: 8, name: "sh".into() };
        writer.add(&[sample(1, Some(task.clone())), sample(2, Some(task.clone()))], 0, true).unwrap();
        let (records, header) = read(&fs::read(&path).unwrap());
        let kinds: Vec<u32> = records.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [MMAP, MMAP, COMM, SAMPLE, SAMPLE, FINISHED_ROUND]);
        assert_eq!(header[9], 0, "no features yet");
        writer.add(&[sample(2, Some(task.clone()))], 0, false).unwrap();
        let kinds: Vec<u32> = read(&fs::read(&path).unwrap()).0.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds[6..], [SAMPLE], "older samples may follow");
        let renamed = Task { name: "true".into(), ..task };
        writer.add(&[sample(3, Some(renamed)), sample(4, None), sample(4, None)], 5, true).unwrap();
        assert_eq!(writer.samples(), 6);
        writer.finish().unwrap();
        let (records, header) = read(&fs::read(&path).unwrap());
        let kinds: Vec<u32> = records.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds[7..], [COMM, SAMPLE, COMM, SAMPLE, SAMPLE, LOST, FINISHED_ROUND]);
        assert_eq!(header[9], 4);
        let end = usize::try_from(header[5] + header[6]).unwrap();
        assert!(fs::read(&path).unwrap()[end + 16 + 12..].starts_with(&[7; 20]));
    }

    #[test]
    fn modules_that_were_loaded_meanwhile_are_in_front_of_all_samples() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let mut file = open(&path);
        let mut writer = Writer::create(&mut file, &description(false)).unwrap();
        let task = Task { process: 7, thread: 8, name: "sh".into() };
        // More than is moved at once.
        let samples: Vec<Sample> = (0..30_000).map(|time| sample(time, Some(task.clone()))).collect();
        writer.add(&samples, 0, true).unwrap();
        let before = fs::read(&path).unwrap();
        let late = Module { name: "late".into(), start: 0xffff_ffff_c100_0000, len: 9, size: 99 };
        writer.add_modules(vec![late.clone(), late]);
        writer.finish().unwrap();
        let after = fs::read(&path).unwrap();
        let (records, _) = read(&after);
        let kinds: Vec<u32> = records.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds[..6], [MMAP, MMAP, MMAP, MMAP, COMM, SAMPLE]);
        let sizes =
            |records: &[(u32, u16)]| records.iter().map(|(_, size)| usize::from(*size)).sum::<usize>();
        let data = usize::try_from(DATA).unwrap();
        let (front, inserted) = (data + sizes(&records[..2]), sizes(&records[2..4]));
        assert!(
            before.len() > 1 << 20 && after[front..][..inserted].windows(6).any(|name| name == b"[late]")
        );
        assert!(after[front + inserted..].starts_with(&before[front..]));
        assert_eq!(after[data..front], before[data..front]);
    }

    #[test]
    fn a_guests_numbers_are_no_numbers_of_the_kernels_records() {
        assert_eq!([number(7), number(u32::MAX)], [7, i32::MAX.cast_unsigned()]);
    }
}
