//! A guest whose kernel has the stub, and one whose register accesses all exit. Both run on a scripted host.

use std::arch::asm;
use std::convert::Infallible;
use std::ptr;
use std::rc::Rc;
use std::time::Duration;

use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use vpmu::model::amd::Version;
use vpmu::model::intel::Shape;
use vpmu::shared_page::{LvtNote, Page, Registers};
use vpmu::source::script::Script;
use vpmu::x86::{Vendor, X2APIC_LVTPC};
use vpmu::{Access, Cause, Injected, Outcome, Platform, VirtualPmu};
use vpmu_retarget::x86::stub::{Original, Originals, PageLocation, Stub, Value};

pub const SELECT: u32 = 0xc001_0200;
pub const COUNTER: u32 = 0xc001_0201;
pub const STATUS: u32 = 0xc000_0300;
pub const CONTROL: u32 = 0xc000_0301;
pub const STATUS_CLEAR: u32 = 0xc000_0302;

/// A guest's kernel: its functions with the stub in front of them, and its memory.
pub struct StubbedKernel {
    pub memory: *mut u8,
    pub stub: Stub,
    pub value: Value,
    pub page: Rc<Page>,
}

pub const MEMORY: usize = 4096;
/// What the kernel's own functions leave in R11 here, instead of accessing a register.
pub const LEFT: u32 = 0x1ef7;

impl StubbedKernel {
    pub fn new(registers: &Registers, value: Value) -> Self {
        // SAFETY: new memory at an address of the system's choice.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                MEMORY,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let memory = memory.cast::<u8>();
        let at = memory as u64;
        // mov r11d, LEFT; ret
        let [a, b, c, d] = LEFT.to_le_bytes();
        let function = [0x41, 0xbb, a, b, c, d, 0xc3];
        let original = Original { entry: at, exit: at + function.len() as u64 - 1 };
        let originals = Originals { read: original, write: original, value, read_counter: original };
        let page = Rc::<Page>::default();
        let pages = PageLocation { first: ptr::from_ref(&*page) as u64, count: 1 };
        let code_at = at + 64;
        let mut stub = Stub::new(code_at, registers, &originals, pages);
        be_cpu_0(&mut stub.code);
        assert!(64 + stub.code.len() <= MEMORY);
        // SAFETY: it fits, as was seen.
        let code = unsafe { memory.add(64) };
        // SAFETY: so does this.
        unsafe { ptr::copy_nonoverlapping(function.as_ptr(), memory, function.len()) };
        // SAFETY: and this.
        unsafe { ptr::copy_nonoverlapping(stub.code.as_ptr(), code, stub.code.len()) };
        Self { memory, stub, value, page }
    }

    /// What a function returns, unless the guest has to leave.
    pub fn call(&self, function: u64, number: u32, value: u64) -> Option<u64> {
        let (second, third) = match self.value {
            Value::Whole => (value, 0xdead),
            // What is above the halves is anything.
            Value::Halves => (value & 0xffff_ffff | 0xbad << 32, value >> 32 | 0xbad << 32),
        };
        let (mut result, mut left): (u64, u64) = (0x5eed, 0);
        // SAFETY: the function is machine code in memory that lives as long as `self`, needs only its return address on
        // the stack, and touches the page and no register that functions have to keep.
        unsafe {
            asm!(
                "call {function}",
                function = in(reg) function,
                inout("rax") result,
                inout("rdi") u64::from(number) => _,
                inout("rsi") second => _,
                inout("rdx") third => _,
                inout("r11") left,
                out("rcx") _, out("r8") _, out("r9") _, out("r10") _,
            );
        }
        (left != u64::from(LEFT)).then_some(result)
    }
}

impl Drop for StubbedKernel {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nobody has a share in it.
        unsafe { libc::munmap(self.memory.cast(), MEMORY) };
    }
}

/// Makes the code run as on CPU 0, whose number it would ask for by a segment that only Linux sets up: MOV ECX; LSL;
/// JNE becomes XOR ECX, ECX and NOPs.
pub fn be_cpu_0(code: &mut [u8]) {
    const NOP: u8 = 0x90;
    const XOR_ECX_ECX: [u8; 2] = [0x31, 0xc9];
    let instructions: Vec<_> = Decoder::with_ip(64, code, 0, DecoderOptions::NONE).iter().collect();
    let asks = instructions.windows(3).filter(|window| window[1].mnemonic() == Mnemonic::Lsl);
    let offset = |ip: u64| usize::try_from(ip).expect("the code is short");
    let ranges: Vec<_> = asks.map(|window| offset(window[0].ip())..offset(window[2].next_ip())).collect();
    assert_eq!(ranges.len(), 7, "each of the ways through the code asks once");
    for range in ranges {
        let instructions = &mut code[range];
        instructions.fill(NOP);
        instructions[..XOR_ECX_ECX.len()].copy_from_slice(&XOR_ECX_ECX);
    }
}

/// An LVT entry for an NMI, and its mask.
pub const NMI: u64 = 0x400;
pub const MASKED: u64 = 1 << 16;

/// A vCPU that handles its interrupts at once.
pub struct Vcpu {
    pub interrupts: usize,
    /// The guest's kernel uses another vCPU's page.
    pub has_another_page: bool,
    /// The value that the kernel has noted for its LVT entry, as of the last interrupt.
    pub noted: Option<u64>,
    /// The LVT entry as KVM has it.
    pub lvt_entry: u64,
    /// The delivery of an interrupt masks the entry.
    masks: bool,
}

impl Vcpu {
    fn new(masks: bool) -> Self {
        Self { interrupts: 0, has_another_page: false, noted: None, lvt_entry: NMI, masks }
    }
}

impl Platform for Vcpu {
    type Error = Infallible;

    fn inject(&mut self, lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        self.noted = lvt_note.and_then(|note| note.written);
        if self.lvt_entry & MASKED != 0 || lvt_note.is_some_and(|note| note.is_masked()) {
            return Ok(Injected::Pending);
        }
        self.interrupts += 1;
        if self.masks && !lvt_note.is_some_and(|note| note.mask(self.lvt_entry)) {
            self.lvt_entry |= MASKED;
        }
        Ok(Injected::AtNextEntry)
    }

    fn uses_shared_page(&mut self) -> bool {
        !self.has_another_page
    }
}

/// A guest without a shared page, and whoever runs it.
pub struct Plain {
    pub pmu: VirtualPmu<Script>,
    pub host: Script,
    pub vcpu: Vcpu,
    pub exits: usize,
}

impl Plain {
    pub fn amd(counters: usize) -> Self {
        let host = Script::default();
        let pmu = VirtualPmu::amd(Version::V2(counters), Vendor::Amd, host.clone());
        Self { pmu, host, vcpu: Vcpu::new(false), exits: 0 }
    }

    pub fn intel(shape: Shape) -> Self {
        let host = Script::default();
        let pmu = VirtualPmu::intel(shape, Vendor::Intel, host.clone());
        Self { pmu, host, vcpu: Vcpu::new(true), exits: 0 }
    }

    pub fn exit(&mut self, cause: Cause) {
        self.exits += 1;
        let Ok(_) = self.pmu.after_exit(cause, &mut self.vcpu);
    }

    pub fn access(&mut self, access: Access) -> Outcome {
        let outcome = self.pmu.access(access);
        self.exit(Cause::Guest);
        outcome
    }
}

/// A guest with a shared page: its kernel, and whoever runs it.
pub struct Guest {
    pub kernel: StubbedKernel,
    pub plain: Plain,
}

impl Guest {
    pub fn new(registers: &Registers, value: Value, mut plain: Plain) -> Self {
        let kernel = StubbedKernel::new(registers, value);
        plain.pmu.share_page(Box::new(Rc::clone(&kernel.page)));
        Self { kernel, plain }
    }

    pub fn amd(counters: usize, value: Value) -> Self {
        let registers = Version::V2(counters).page_registers().unwrap();
        Self::new(&registers, value, Plain::amd(counters))
    }

    pub fn intel(shape: Shape, value: Value) -> Self {
        Self::new(&shape.page_registers().unwrap(), value, Plain::intel(shape))
    }

    /// Runs the guest without a handler. Returns the counts at which it was interrupted.
    pub fn runs_only(&mut self, counts: u64) -> Vec<u64> {
        self.runs(counts, |_| ())
    }
}

/// What a guest does can be done with a shared page, and without, where each register access exits.
pub trait Does {
    fn write(&mut self, register: u32, value: u64) -> Outcome;
    fn read(&mut self, register: u32) -> Outcome;
    fn read_counter(&mut self, counter: u32) -> Outcome;
    fn plain(&mut self) -> &mut Plain;

    /// Runs the guest, with this handler of its interrupts. Returns the counts at which it was interrupted.
    fn runs(&mut self, counts: u64, mut handler: impl FnMut(&mut Self)) -> Vec<u64> {
        let mut interrupts = Vec::new();
        let host = self.plain().host.clone();
        host.guest_runs(counts, |left| {
            let before = self.plain().vcpu.interrupts;
            self.plain().exit(Cause::Alarm);
            if self.plain().vcpu.interrupts > before {
                interrupts.push(counts - left);
                handler(self);
            }
        });
        interrupts
    }

    /// Returns all that the guest sees of it.
    fn does(&mut self, act: Act, handler: &[Act]) -> Vec<Outcome> {
        match act {
            Act::Write(register, value) => vec![self.write(register, value)],
            Act::Read(register) => vec![self.read(register)],
            Act::ReadCounter(counter) => vec![self.read_counter(counter)],
            Act::Runs(counts) => {
                let mut seen = Vec::new();
                let at = self.runs(counts, |this| {
                    this.plain().host.time_passes(Duration::from_micros(50));
                    // No program runs meanwhile.
                    for act in handler.iter().filter(|act| !matches!(act, Act::Runs(_))) {
                        seen.extend(this.does(*act, &[]));
                    }
                });
                seen.extend(at.into_iter().map(Outcome::Value));
                seen
            }
            Act::Leave => {
                self.plain().exit(Cause::Guest);
                Vec::new()
            }
        }
    }
}

impl Does for Plain {
    fn write(&mut self, register: u32, value: u64) -> Outcome {
        if register == X2APIC_LVTPC {
            // KVM keeps it, so this is no exit to the VMM.
            self.vcpu.lvt_entry = value;
            return Outcome::Handled;
        }
        self.access(Access::Write(register, value))
    }

    fn read(&mut self, register: u32) -> Outcome {
        if register == X2APIC_LVTPC {
            return Outcome::Value(self.vcpu.lvt_entry);
        }
        self.access(Access::Read(register))
    }

    fn read_counter(&mut self, counter: u32) -> Outcome {
        self.access(Access::Read(counter))
    }

    fn plain(&mut self) -> &mut Plain {
        self
    }
}

impl Does for Guest {
    fn write(&mut self, register: u32, value: u64) -> Outcome {
        match self.kernel.call(self.kernel.stub.write, register, value) {
            Some(_) => Outcome::Handled,
            None => self.plain.write(register, value),
        }
    }

    fn read(&mut self, register: u32) -> Outcome {
        let value = self.kernel.call(self.kernel.stub.read, register, 0);
        value.map_or_else(|| self.plain.read(register), Outcome::Value)
    }

    fn read_counter(&mut self, counter: u32) -> Outcome {
        let value = self.kernel.call(self.kernel.stub.read_counter, counter, 0);
        value.map_or_else(|| self.plain.read_counter(counter), Outcome::Value)
    }

    fn plain(&mut self) -> &mut Plain {
        &mut self.plain
    }
}

/// What a guest does.
#[derive(Debug, Clone, Copy)]
pub enum Act {
    Write(u32, u64),
    Read(u32),
    ReadCounter(u32),
    Runs(u64),
    /// Something else makes it leave.
    Leave,
}
