//! A kernel image: its sections and symbols.

/// First byte of the opcodes of RDPMC and RDMSR.
pub const ESCAPE: u8 = 0x0f;
/// Second byte of RDPMC.
pub const RDPMC: u8 = 0x33;

/// A kernel image.
pub struct Image<'a> {
    /// The sections, by address.
    pub sections: Vec<Section<'a>>,
    /// The symbols, if there are any.
    pub symbols: Vec<Symbol<'a>>,
    /// The kind of kernel.
    pub kind: Kind,
}

impl<'a> Image<'a> {
    /// Returns the sections with code.
    pub(crate) fn code(&self) -> impl Iterator<Item = &Section<'a>> {
        self.sections.iter().filter(|section| section.content == Content::Code)
    }

    /// Returns the section with the code at this address.
    pub(crate) fn code_at(&self, address: u64) -> Option<&Section<'a>> {
        self.code().find(|section| section.contains(address))
    }
}

/// Kind of a kernel, which says in which modes its code runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A Linux kernel: 64-bit code, most of it made by a compiler.
    Linux,
    /// A kernel that starts in 32-bit mode and may switch to 64-bit mode.
    BareMetal {
        /// Address of the first instruction.
        entry: u64,
    },
}

/// A section of an image.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// The name, or an empty string.
    pub name: &'a str,
    /// The address at run time.
    pub address: u64,
    /// The content.
    pub bytes: &'a [u8],
    /// Whether the section can be executed.
    pub content: Content,
}

/// What a section or a symbol holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Instructions, perhaps with data between them.
    Code,
    /// Data that is never executed.
    Data,
}

/// A symbol: a function or an object.
#[derive(Debug, Clone, Copy)]
pub struct Symbol<'a> {
    /// The name.
    pub name: &'a str,
    /// The address at run time.
    pub address: u64,
    /// The length in bytes; 0 if it is not known.
    pub len: u64,
    /// Whether the symbol is a function or an object.
    pub content: Content,
}

impl Symbol<'_> {
    pub(crate) fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|offset| offset < self.len)
    }
}

impl<'a> Section<'a> {
    /// Creates a section. Returns `None` for a section at the end of the address space, where addresses would overflow.
    /// No kernel has one there.
    pub fn new(name: &'a str, address: u64, bytes: &'a [u8], content: Content) -> Option<Self> {
        const ROOM_BEHIND: u64 = 4096;
        address.checked_add(bytes.len() as u64)?.checked_add(ROOM_BEHIND)?;
        Some(Self { name, address, bytes, content })
    }

    /// Returns the addresses at which the two bytes of RDPMC occur.
    pub(crate) fn occurrences(&self) -> impl Iterator<Item = u64> + Clone {
        const CHUNK: usize = 64;
        // This is fast: the second byte is the rarer one, and the compiler vectorizes the search of a whole chunk.
        let has_one = |chunk: &[u8]| chunk.iter().fold(0, |any, byte| any | u8::from(*byte == RDPMC)) != 0;
        let chunks = self.bytes.chunks(CHUNK).zip((0..).step_by(CHUNK));
        let seconds = chunks.filter(move |(chunk, _)| has_one(chunk)).flat_map(|(chunk, at)| {
            (at..).zip(chunk).filter(|(_, byte)| **byte == RDPMC).map(|(offset, _)| offset)
        });
        let firsts = seconds.filter_map(|offset: usize| offset.checked_sub(1));
        firsts.filter(|offset| self.bytes[*offset] == ESCAPE).map(|offset| self.address + offset as u64)
    }

    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes.len() as u64)
    }

    pub(crate) fn contains(&self, address: u64) -> bool {
        (self.address..self.end()).contains(&address)
    }

    /// Returns the bytes from an address on.
    pub(crate) fn from(&self, address: u64) -> &[u8] {
        let offset = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        offset.and_then(|offset| self.bytes.get(offset..)).unwrap_or_default()
    }
}
