//! One instruction: how long it is, and where the processor goes after it.

use std::iter;

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic, OpKind};

use super::Section;

/// What the processor takes bytes for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// 32-bit protected mode.
    Bits32,
    /// Long mode.
    Bits64,
}

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Where it begins.
    pub start: u64,
    /// Where the next begins.
    pub end: u64,
    /// Whether it is RDPMC.
    pub is_rdpmc: bool,
    /// Where it may go by itself.
    pub target: Target,
    /// Whether the one behind it may come next.
    pub falls_through: bool,
}

/// Where an instruction may go by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Nowhere, or nobody knows.
    None,
    /// There, in the same mode.
    Near(u64),
    /// There, in the mode of another code segment.
    Far(u64),
}

impl Instruction {
    /// Decodes what is there, unless that is no instruction.
    pub fn decode(section: &Section, mode: Mode, start: u64) -> Option<Self> {
        Self::stream(section, mode, start).next()
    }

    /// Decodes what lies there end to end, up to what is no instruction.
    pub fn stream<'a>(section: &'a Section, mode: Mode, start: u64) -> impl Iterator<Item = Self> + use<'a> {
        let bits = match mode {
            Mode::Bits32 => 32,
            Mode::Bits64 => 64,
        };
        let mut decoder = Decoder::with_ip(bits, section.from(start), start, DecoderOptions::NONE);
        let mut found = iced_x86::Instruction::new();
        iter::from_fn(move || {
            decoder.decode_out(&mut found);
            (!found.is_invalid()).then(|| Self::new(&found))
        })
    }

    fn new(found: &iced_x86::Instruction) -> Self {
        let target = match found.op0_kind() {
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                Target::Near(found.near_branch_target())
            }
            OpKind::FarBranch16 => Target::Far(found.far_branch16().into()),
            OpKind::FarBranch32 => Target::Far(found.far_branch32().into()),
            _ => Target::None,
        };
        Self {
            start: found.ip(),
            end: found.next_ip(),
            is_rdpmc: found.code() == Code::Rdpmc,
            target,
            falls_through: !ends(found.mnemonic()),
        }
    }

    /// Whether it takes up this byte.
    pub fn covers(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// Whether what is behind such an instruction need not be one.
fn ends(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Jmp
            | Mnemonic::Ret
            | Mnemonic::Retf
            | Mnemonic::Iret
            | Mnemonic::Iretd
            | Mnemonic::Iretq
            | Mnemonic::Sysret
            | Mnemonic::Sysretq
            | Mnemonic::Sysexit
            | Mnemonic::Sysexitq
            | Mnemonic::Ud0
            | Mnemonic::Ud1
            | Mnemonic::Ud2
    )
}
