//! Decoding of x86 instructions: their lengths, and where the processor goes after them.

use std::iter;

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic, OpKind};

use super::image::Section;
use super::work::Work;

/// Mode of the processor, which decides how bytes are decoded.
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
    /// Address of its first byte.
    pub start: u64,
    /// Address after its last byte.
    pub end: u64,
    /// The instruction is RDPMC.
    pub is_rdpmc: bool,
    /// Target of its branch, if it is one.
    pub target: Target,
    /// The instruction after it may be executed next.
    pub falls_through: bool,
}

/// Target of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The instruction does not branch, or branches to an address that is not part of it.
    None,
    /// An address in the same mode.
    Near(u64),
    /// An address in another code segment, perhaps in another mode.
    Far(u64),
}

impl Instruction {
    /// Decodes the instruction at an address. Returns `None` if the bytes are no instruction.
    pub fn decode(section: &Section, mode: Mode, start: u64, work: &Work) -> Option<Self> {
        Self::stream(section, mode, start, work).next()
    }

    /// Decodes consecutive instructions from an address on, up to bytes that are no instruction, or until no work is
    /// left. KVM's forced-emulation prefix, which test kernels put before an instruction, counts as an instruction of
    /// its own: UD2, then the letters "kvm".
    pub fn stream<'a>(
        section: &'a Section,
        mode: Mode,
        start: u64,
        work: &'a Work,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let bits = match mode {
            Mode::Bits32 => 32,
            Mode::Bits64 => 64,
        };
        let mut decoder = Decoder::with_ip(bits, section.from(start), start, DecoderOptions::NONE);
        let mut found = iced_x86::Instruction::new();
        iter::from_fn(move || {
            if !work.take(1) {
                return None;
            }
            decoder.decode_out(&mut found);
            let instruction = (!found.is_invalid()).then(|| Self::new(&found))?;
            let is_prefix = found.code() == Code::Ud2 && section.from(instruction.end).starts_with(b"kvm");
            if !is_prefix {
                return Some(instruction);
            }
            let end = instruction.end + 3;
            decoder.set_position(decoder.position() + 3).ok()?;
            decoder.set_ip(end);
            Some(Self { end, falls_through: true, ..instruction })
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

    /// Returns whether the byte at an address belongs to the instruction.
    pub fn covers(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// Returns whether the instruction after such an instruction is never executed next.
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
