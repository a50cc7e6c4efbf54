//! RDPMC in the programs of a Linux guest.
//!
//! KVM lets a program's RDPMC fault (#GP) and tells nobody. So the kernel's interrupt descriptor table is made to lead
//! to the code of this module. It executes RDMSR of one of [`PROGRAM_MSRS`], with the address of the program's
//! instruction in CR2, to ask the VMM whether an RDPMC caused the fault. The VMM answers with the counter's value, or
//! with [`vpmu::x86::NOT_PERMITTED`]: then the kernel's own handler goes on as if nothing had been there, as it does
//! for faults of the kernel and for faults that cannot come from RDPMC.
//!
//! The code reads no memory but its stack, on which the processor has put its frame, because a page of the program may
//! be gone. It also runs with the page tables of the program (page-table isolation), which map only the kernel's entry
//! code ([`room`]), and on the small stack for entries. It runs with interrupts off. An NMI's handler restores CR2.

use std::ops::Range;

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, cr2, dr6, dword_ptr, eax, ecx, edx, qword_ptr, rax, rcx, rdx, rsp};
use vpmu::x86::{PROGRAM_FIXED, PROGRAM_MSRS, RDPMC_FIXED};

use super::filling;
use super::image::Image;

/// The kernel's own handlers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handlers {
    /// The handler of general-protection exceptions.
    pub general_protection: u64,
    /// The handler of debug exceptions, for a program that is executed step by step.
    pub debug: u64,
}

/// Linux' segments of programs: 64-bit code (`__USER_CS`), 32-bit code (`__USER32_CS`), data (`__USER_DS`).
const CODE: u32 = 0x33;
const CODE_32: u32 = 0x23;
const DATA: u32 = 0x2b;

/// Offsets in the processor's frame, from the error code on (SDM volume 3, section 6.14.2).
const ERROR: i32 = 0;
const RIP: i32 = 8;
const CS: i32 = 16;
const RFLAGS: i32 = 24;
const SS: i32 = 40;

/// Length of the registers that the code saves on the stack while it asks the VMM.
const SAVED: i32 = 3 * 8;

/// Bits of RFLAGS: the program is executed step by step; a breakpoint at the next instruction is ignored.
const TRAP: u32 = 8;
const RESUME: u32 = 16;
/// Bit of DR6: the exception is due to [`TRAP`].
const SINGLE_STEP: u32 = 1 << 14;

/// Length of RDPMC.
const LEN: i32 = 2;

/// By how much [`code`] can be longer at another address: jumps to the kernel's own handlers, of which there are seven,
/// have two bytes or up to six.
pub const MAX_GROWTH: usize = 7 * 4;

/// Returns the code for the address `at`, which replaces [`Handlers::general_protection`]. Its length can differ
/// between addresses, by [`MAX_GROWTH`].
pub fn code(at: u64, handlers: Handlers) -> Vec<u8> {
    assemble(at, handlers).expect("all operands can be encoded, and all labels are set")
}

/// Finds space for `len` bytes of this code in the filling near the kernel's own handler: in the same 2 MiB, which page
/// tables of programs map as a whole because all entry code is there (`pti_clone_entry_text`).
pub fn room(image: &Image, len: usize, handlers: Handlers) -> Option<u64> {
    const LARGE_PAGE: u64 = 2 << 20;
    let begin = handlers.general_protection & !(LARGE_PAGE - 1);
    filling::room(image, len, &Range { start: begin, end: begin.checked_add(LARGE_PAGE)? })
}

fn assemble(at: u64, handlers: Handlers) -> Result<Vec<u8>, IcedError> {
    let own = handlers.general_protection;
    let mut a = CodeAssembler::new(64)?;
    let [mut program, mut refused, mut step] = std::array::from_fn(|_| a.create_label());
    a.endbr64()?;

    // A fault of a program, with its ordinary segments, whose error code is 0?
    a.cmp(dword_ptr(rsp + CS), CODE)?;
    a.je(program)?;
    a.cmp(dword_ptr(rsp + CS), CODE_32)?;
    a.jne(own)?;
    // IRETQ would fault if RIP were beyond the 32-bit segment.
    a.cmp(dword_ptr(rsp + RIP), -LEN)?;
    a.jae(own)?;
    a.set_label(&mut program)?;
    a.cmp(dword_ptr(rsp + SS), DATA)?;
    a.jne(own)?;
    a.cmp(dword_ptr(rsp + ERROR), 0)?;
    a.jne(own)?;
    // With the number of a counter?
    a.test(ecx, !(RDPMC_FIXED | (PROGRAM_FIXED - 1)))?;
    a.jne(own)?;

    a.push(rax)?;
    a.push(rdx)?;
    a.push(rcx)?;
    // Bit 30 of the number becomes the bit of fixed counters.
    a.mov(eax, ecx)?;
    a.shr(eax, RDPMC_FIXED.trailing_zeros() - PROGRAM_FIXED.trailing_zeros())?;
    a.or(ecx, eax)?;
    a.and(ecx, 2 * PROGRAM_FIXED - 1)?;
    a.add(ecx, *PROGRAM_MSRS.start())?;
    a.mov(rax, qword_ptr(rsp + (SAVED + RIP)))?;
    a.mov(cr2, rax)?;
    a.rdmsr()?;
    a.test(edx, edx)?;
    a.js(refused)?;

    // The program goes on behind its RDPMC, with the value in EDX:EAX.
    a.pop(rcx)?;
    a.add(rsp, SAVED - 8)?;
    a.add(qword_ptr(rsp + RIP), LEN)?;
    a.btr(dword_ptr(rsp + RFLAGS), RESUME)?;
    a.bt(dword_ptr(rsp + RFLAGS), TRAP)?;
    a.lea(rsp, rsp + 8)?;
    a.jc(step)?;
    a.iretq()?;

    // With the exception that follows a step.
    a.set_label(&mut step)?;
    a.push(rax)?;
    a.mov(rax, dr6)?;
    a.or(eax, SINGLE_STEP)?;
    a.mov(dr6, rax)?;
    a.pop(rax)?;
    a.jmp(handlers.debug)?;

    a.set_label(&mut refused)?;
    a.pop(rcx)?;
    a.pop(rdx)?;
    a.pop(rax)?;
    a.jmp(own)?;
    a.assemble(at)
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions, Mnemonic, OpKind, Register};

    use super::*;

    const OWN: Handlers =
        Handlers { general_protection: 0xffff_ffff_81c0_0b20, debug: 0xffff_ffff_81c0_0cd0 };

    #[test]
    fn the_code_leads_to_itself_and_to_the_kernels_handlers_and_writes_only_to_its_frame() {
        let at = OWN.general_protection + 0x1000;
        let code = code(at, OWN);
        let own = at..at + code.len() as u64;
        let mut resumes = 0;
        for instruction in &mut Decoder::with_ip(64, &code, at, DecoderOptions::NONE) {
            assert!(!instruction.is_invalid());
            if instruction.op0_kind() == OpKind::NearBranch64 {
                let to = instruction.near_branch_target();
                let is_known = to == OWN.general_protection || to == OWN.debug || own.contains(&to);
                assert!(is_known, "{to:#x}");
            }
            resumes += u32::from(instruction.mnemonic() == Mnemonic::Iretq);
            let memory = instruction.memory_base();
            assert!(memory == Register::None || memory == Register::RSP);
        }
        assert_eq!(resumes, 1);
    }

    #[test]
    fn the_code_grows_no_more_than_is_said() {
        let near = code(OWN.general_protection + 64, OWN).len();
        let far = code(OWN.general_protection + (1 << 20), OWN).len();
        assert!(near <= far && far <= near + MAX_GROWTH, "{near}, {far}");
    }
}
