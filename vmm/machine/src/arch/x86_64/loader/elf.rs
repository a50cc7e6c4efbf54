//! Reads the ELF header and the program headers of 32- and 64-bit kernels.

use std::io::{Read, Seek};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::segment::Segment;
use crate::loader::bytes::{u16_at, u32_at, u64_at};
use crate::loader::error::Problem;
use crate::loader::file::read_range;
use crate::loader::foreign;

const LONGEST_HEADER: u64 = 64;
const ET_EXEC: u16 = 2;
const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;

/// Class of an ELF file, on which the layout of its headers depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    Bits32,
    Bits64,
}

/// Entry point and segments of an ELF file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Elf {
    pub class: Class,
    /// Address of the first instruction.
    pub entry: u64,
    /// Segments to load; at least one.
    pub segments: Vec<Segment>,
}

/// Returns true if `head` is the beginning of an ELF file.
pub fn is_elf(head: &[u8]) -> bool {
    head.starts_with(b"\x7fELF")
}

impl Elf {
    /// Reads the headers of an executable for x86.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<Self, Problem> {
        let head = read_range(file, 0..len.min(LONGEST_HEADER))?;
        let truncated = || Problem::Truncated { what: "ELF header", needs: LONGEST_HEADER, has: len };
        let class = check_kind(&head).ok_or_else(truncated)??;
        let header = Header::parse(class, &head).ok_or_else(truncated)?;

        let table = header.table(class)?;
        check_in_file("program headers", table.end, len)?;
        let table = read_range(file, table)?;
        let mut segments = Vec::new();
        for entry in table.chunks_exact(class.program_header_size()) {
            let header = ProgramHeader::parse(class, entry).ok_or_else(truncated)?;
            if header.kind == PT_LOAD && header.memory_len != 0 {
                segments.push(header.segment(len)?);
            }
        }
        if segments.is_empty() {
            return Err(Problem::Damaged("it has no segment to load"));
        }
        Ok(Self { class, entry: header.entry, segments })
    }

    /// Returns the end of the last segment in the file. The debug information after it is often ten times as large.
    pub fn file_end(&self) -> u64 {
        self.segments.iter().map(|s| s.file.end as u64).max().unwrap_or(0)
    }
}

impl Class {
    fn program_header_size(self) -> usize {
        match self {
            Self::Bits32 => 32,
            Self::Bits64 => 56,
        }
    }
}

/// Returns the class of an executable for x86, and an error for other ELF files. Returns `None` if the header is
/// truncated.
fn check_kind(head: &[u8]) -> Option<Result<Class, Problem>> {
    let (class, order) = (*head.get(4)?, *head.get(5)?);
    let half = |at| {
        let value = u16_at(head, at)?;
        // Files of the other byte order are read too, so that the error can name their architecture.
        Some(if order == 2 { value.swap_bytes() } else { value })
    };
    let (kind, machine) = (half(16)?, half(18)?);
    if !matches!(machine, EM_386 | EM_X86_64) || order != 1 {
        return Some(Err(super::built_for(foreign::elf_machine(machine))));
    }
    Some(match (kind, class) {
        (ET_EXEC, 1) => Ok(Class::Bits32),
        (ET_EXEC, 2) => Ok(Class::Bits64),
        (1, _) => Err(Problem::OtherElf("a relocatable object that has not been linked")),
        (3, _) => Err(Problem::OtherElf("a shared object or position-independent program")),
        (4, _) => Err(Problem::OtherElf("a core dump")),
        _ => Err(Problem::Damaged("its ELF header is of no known type")),
    })
}

struct Header {
    entry: u64,
    table: u64,
    entry_size: u16,
    entries: u16,
}

impl Header {
    fn parse(class: Class, head: &[u8]) -> Option<Self> {
        Some(match class {
            Class::Bits32 => Self {
                entry: u32_at(head, 24)?.into(),
                table: u32_at(head, 28)?.into(),
                entry_size: u16_at(head, 42)?,
                entries: u16_at(head, 44)?,
            },
            Class::Bits64 => Self {
                entry: u64_at(head, 24)?,
                table: u64_at(head, 32)?,
                entry_size: u16_at(head, 54)?,
                entries: u16_at(head, 56)?,
            },
        })
    }

    /// Returns the range of the program headers in the file.
    fn table(&self, class: Class) -> Result<Range<u64>, Problem> {
        if self.entries != 0 && usize::from(self.entry_size) != class.program_header_size() {
            return Err(Problem::Damaged("its program headers have an impossible size"));
        }
        let size = u64::from(self.entries) * u64::from(self.entry_size);
        let end = self.table.checked_add(size).ok_or(Problem::Damaged("its program headers are nowhere"))?;
        Ok(self.table..end)
    }
}

struct ProgramHeader {
    kind: u32,
    offset: u64,
    virtual_address: u64,
    physical_address: u64,
    file_len: u64,
    memory_len: u64,
}

impl ProgramHeader {
    fn parse(class: Class, entry: &[u8]) -> Option<Self> {
        let kind = u32_at(entry, 0)?;
        Some(match class {
            Class::Bits32 => Self {
                kind,
                offset: u32_at(entry, 4)?.into(),
                virtual_address: u32_at(entry, 8)?.into(),
                physical_address: u32_at(entry, 12)?.into(),
                file_len: u32_at(entry, 16)?.into(),
                memory_len: u32_at(entry, 20)?.into(),
            },
            Class::Bits64 => Self {
                kind,
                offset: u64_at(entry, 8)?,
                virtual_address: u64_at(entry, 16)?,
                physical_address: u64_at(entry, 24)?,
                file_len: u64_at(entry, 32)?,
                memory_len: u64_at(entry, 40)?,
            },
        })
    }

    fn segment(&self, file_len: u64) -> Result<Segment, Problem> {
        const NOWHERE: Problem = Problem::Damaged("it has a segment that lies nowhere");
        if self.file_len > self.memory_len {
            return Err(Problem::Damaged("it has a segment that is larger in the file than in memory"));
        }
        let memory_end = self.physical_address.checked_add(self.memory_len).ok_or(NOWHERE)?;
        let file_end = self.offset.checked_add(self.file_len).ok_or(NOWHERE)?;
        check_in_file("code and data", file_end, file_len)?;
        let offset = |at| usize::try_from(at).map_err(|_| NOWHERE);
        Ok(Segment {
            memory: self.physical_address..memory_end,
            // The offset of a segment without bytes in the file may be invalid.
            file: if self.file_len == 0 { 0..0 } else { offset(self.offset)?..offset(file_end)? },
            virtual_address: self.virtual_address,
        })
    }
}

/// Returns an error that names `what` if the file is shorter than `end`.
pub fn check_in_file(what: &'static str, end: u64, len: u64) -> Result<(), Problem> {
    if end > len { Err(Problem::Truncated { what, needs: end, has: len }) } else { Ok(()) }
}
