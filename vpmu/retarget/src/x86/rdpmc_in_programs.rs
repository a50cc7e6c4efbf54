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
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
    use proptest::prelude::*;
    use vpmu::x86::NOT_PERMITTED;

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

    /// How the code ends.
    #[derive(Debug, PartialEq, Eq)]
    enum End {
        /// In the kernel's own handler of general-protection exceptions.
        Own,
        /// In its handler of debug exceptions.
        Debug,
        /// In the program.
        Program,
    }

    /// A processor that knows the instructions of the code and no other: SWAPGS, say, or a system call.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Cpu {
        rax: u64,
        rcx: u64,
        rdx: u64,
        rsp: u64,
        cr2: u64,
        dr6: u64,
        /// Words below and in the processor's frame. Nothing else can be accessed.
        stack: Vec<u64>,
        zero: bool,
        carry: bool,
        negative: bool,
        /// Number of questions to the VMM.
        asked: usize,
    }

    /// Address of the stack, and its word at which the frame begins, with the error code.
    const STACK: u64 = 0xffff_fe00_0000_1000;
    const FRAME: usize = 3;

    impl Cpu {
        /// Returns a processor that has put this frame on the stack: error code, RIP, CS, RFLAGS, RSP, SS.
        fn faulted(frame: [u64; 6], [a, c, d]: [u64; 3]) -> Self {
            let at = STACK + 8 * FRAME as u64;
            let stack = [&[0; FRAME][..], &frame].concat();
            Self {
                rax: a,
                rcx: c,
                rdx: d,
                rsp: at,
                cr2: 0,
                dr6: 0xffff_0ff0,
                stack,
                zero: false,
                carry: false,
                negative: false,
                asked: 0,
            }
        }

        /// Returns a register, and a mask of its bits.
        fn register(&mut self, register: Register) -> (&mut u64, u64) {
            let low = u64::from(u32::MAX);
            match register {
                Register::RAX => (&mut self.rax, u64::MAX),
                Register::RCX => (&mut self.rcx, u64::MAX),
                Register::RDX => (&mut self.rdx, u64::MAX),
                Register::RSP => (&mut self.rsp, u64::MAX),
                Register::EAX => (&mut self.rax, low),
                Register::ECX => (&mut self.rcx, low),
                Register::EDX => (&mut self.rdx, low),
                Register::CR2 => (&mut self.cr2, u64::MAX),
                Register::DR6 => (&mut self.dr6, u64::MAX),
                other => panic!("{other:?} is not the code's to use"),
            }
        }

        fn word(&mut self, address: u64) -> &mut u64 {
            let offset = usize::try_from(address.wrapping_sub(STACK)).expect("it is an address on the stack");
            assert!(offset.is_multiple_of(8), "{address:#x}");
            self.stack.get_mut(offset / 8).expect("only the frame and three words below it are accessed")
        }

        /// Returns an operand's place, and a mask of its bits.
        fn place(&mut self, of: &Instruction, operand: u32) -> (&mut u64, u64) {
            if of.op_kind(operand) == OpKind::Memory {
                let mask = if of.memory_size().size() == 4 { u32::MAX.into() } else { u64::MAX };
                let address = self.rsp.wrapping_add(of.memory_displacement64());
                return (self.word(address), mask);
            }
            self.register(of.op_register(operand))
        }

        fn value(&mut self, of: &Instruction, operand: u32) -> u64 {
            match of.op_kind(operand) {
                OpKind::Register | OpKind::Memory => {
                    let (place, mask) = self.place(of, operand);
                    *place & mask
                }
                _ => of.immediate(operand),
            }
        }

        /// Stores a result, which in a register of 32 bits clears the upper half.
        fn set(&mut self, of: &Instruction, value: u64) {
            let (place, mask) = self.place(of, 0);
            *place = value & mask;
            (self.zero, self.negative) = (value & mask == 0, value & mask & (mask ^ mask >> 1) != 0);
        }

        /// Runs the code. The VMM answers with this value.
        fn run(&mut self, code: &[u8], at: u64, answer: u64) -> End {
            let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
            loop {
                let one = decoder.decode();
                let (first, second) = match one.op_count() {
                    0 => (0, 0),
                    1 if one.op0_kind() == OpKind::NearBranch64 => (0, 0),
                    1 => (self.value(&one, 0), 0),
                    _ if one.mnemonic() == Mnemonic::Lea => (0, 0),
                    _ => (self.value(&one, 0), self.value(&one, 1)),
                };
                let jumps = match one.mnemonic() {
                    Mnemonic::Jmp => true,
                    Mnemonic::Je => self.zero,
                    Mnemonic::Jne => !self.zero,
                    Mnemonic::Jae => !self.carry,
                    Mnemonic::Jb => self.carry,
                    Mnemonic::Js => self.negative,
                    _ => false,
                };
                match one.mnemonic() {
                    Mnemonic::Jmp
                    | Mnemonic::Je
                    | Mnemonic::Jne
                    | Mnemonic::Jae
                    | Mnemonic::Jb
                    | Mnemonic::Js => match one.near_branch_target() {
                        _ if !jumps => {}
                        to if to == OWN.general_protection => return End::Own,
                        to if to == OWN.debug => return End::Debug,
                        to => {
                            decoder
                                .set_position(usize::try_from(to - at).expect("in the code"))
                                .expect("there");
                            decoder.set_ip(to);
                        }
                    },
                    Mnemonic::Endbr64 => {}
                    Mnemonic::Cmp => {
                        let mask = if one.memory_size().size() == 4 { u32::MAX.into() } else { u64::MAX };
                        let second = second & mask;
                        (self.zero, self.carry) = (first == second, first < second);
                    }
                    Mnemonic::Test => {
                        let both = first & second;
                        (self.zero, self.negative) = (both == 0, both & 1 << 31 != 0);
                    }
                    Mnemonic::Push => {
                        self.rsp -= 8;
                        *self.word(self.rsp) = first;
                    }
                    Mnemonic::Pop => {
                        let word = *self.word(self.rsp);
                        self.rsp += 8;
                        *self.register(one.op0_register()).0 = word;
                    }
                    Mnemonic::Mov => *self.place(&one, 0).0 = second,
                    Mnemonic::Shr => self.set(&one, first >> second),
                    Mnemonic::Or => self.set(&one, first | second),
                    Mnemonic::And => self.set(&one, first & second),
                    Mnemonic::Add => self.set(&one, first.wrapping_add(second)),
                    Mnemonic::Lea => self.rsp = self.rsp.wrapping_add(one.memory_displacement64()),
                    Mnemonic::Bt | Mnemonic::Btr => {
                        self.carry = first >> second & 1 != 0;
                        if one.mnemonic() == Mnemonic::Btr {
                            let (place, _) = self.place(&one, 0);
                            *place &= !(1 << second);
                        }
                    }
                    Mnemonic::Rdmsr => {
                        assert!(
                            PROGRAM_MSRS.contains(&u32::try_from(self.rcx).expect("32 bits")),
                            "{:#x}",
                            self.rcx
                        );
                        (self.rax, self.rdx) = (answer & 0xffff_ffff, answer >> 32);
                        self.asked += 1;
                    }
                    Mnemonic::Iretq => return End::Program,
                    other => panic!("{other:?} is not among what the code may do"),
                }
            }
        }
    }

    /// Frames of faults: those of programs and of the kernel, among them at an IRETQ or behind a SWAPGS, and any
    /// others.
    fn frame() -> impl Strategy<Value = [u64; 6]> {
        let code = prop_oneof![
            Just(u64::from(CODE)),
            Just(u64::from(CODE_32)),
            Just(0x10),
            any::<u16>().prop_map(u64::from)
        ];
        let data = prop_oneof![4 => Just(u64::from(DATA)), 1 => any::<u16>().prop_map(u64::from)];
        let error = prop_oneof![4 => Just(0), 1 => any::<u16>().prop_map(u64::from)];
        let at = prop_oneof![0..1_u64 << 47, 0xffff_fff0..=0xffff_ffff_u64, any::<u64>()];
        (error, at, code, any::<u32>(), any::<u64>(), data)
            .prop_map(|(error, at, cs, flags, stack, ss)| [error, at, cs, flags.into(), stack, ss])
    }

    proptest! {
        #[test]
        fn whatever_faults_the_kernels_handler_finds_it_as_it_was_or_the_program_goes_on(
            frame in frame(),
            registers in any::<[u64; 3]>(),
            number in prop_oneof![0..16_u64, 0x4000_0000..0x4000_0010_u64, any::<u64>()],
            answer in prop_oneof![0..1_u64 << 48, Just(NOT_PERMITTED)],
        ) {
            let at = OWN.general_protection + 0x1000;
            let code = code(at, OWN);
            let [a, _, d] = registers;
            let before = Cpu::faulted(frame, [a, number, d]);
            let mut cpu = before.clone();
            let end = cpu.run(&code, at, answer);
            let [error, instruction, cs, flags, ..] = frame;
            if cs & 3 != 3 {
                prop_assert_eq!((&end, cpu.asked), (&End::Own, 0), "a fault of the kernel's is its own");
            }
            prop_assert!(cpu.asked <= 1);
            // What is below the stack pointer is nobody's: in the end also the error code.
            let kept = |cpu: &Cpu| cpu.stack[FRAME..].to_vec();
            if end == End::Own {
                prop_assert_eq!([cpu.rax, cpu.rcx, cpu.rdx, cpu.rsp, cpu.dr6], [a, number, d, before.rsp, before.dr6]);
                prop_assert_eq!(kept(&cpu), kept(&before));
                return Ok(());
            }
            prop_assert_eq!((error, cpu.asked), (0, 1));
            prop_assert!(answer != NOT_PERMITTED && [CODE, CODE_32].map(u64::from).contains(&cs));
            prop_assert_eq!([cpu.rax, cpu.rcx, cpu.rdx], [answer & 0xffff_ffff, number, answer >> 32]);
            // Behind the error code, as IRETQ and a debug exception have it.
            prop_assert_eq!(cpu.rsp, before.rsp + 8);
            let mut expected = kept(&before);
            expected[1] = instruction.wrapping_add(2);
            expected[3] = flags & !(1 << RESUME);
            prop_assert_eq!(&kept(&cpu)[1..], &expected[1..]);
            let is_stepped = flags & 1 << TRAP != 0;
            prop_assert_eq!(end, if is_stepped { End::Debug } else { End::Program });
            prop_assert_eq!(cpu.dr6, before.dr6 | if is_stepped { u64::from(SINGLE_STEP) } else { 0 });
        }
    }
}
