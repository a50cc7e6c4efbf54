//! Marks on RISC-V: a program executes an illegal instruction, ten bits of which are the mark's number.
//!
//! The guest's instruction traps to KVM, which redirects the trap to the guest, where it becomes a signal. A kprobe in
//! KVM records the instruction. A program on the host itself makes a system call with the instruction as an argument,
//! which another kprobe records.

/// `csrrwi` of `hgatp`, a register that a user program must not access.
const INSTRUCTION: u32 = 0x6800_5073;
/// Lowest bits of the instruction's two fields for the number: the destination register, and the immediate.
const FIELDS: [u32; 2] = [7, 15];
/// Mask of a field of five bits.
const FIELD_MASK: u32 = 0x1f;

/// Commands that define two events on the simulated host: `kprobes:mark` for guests' programs, and `kprobes:own_mark`
/// for programs on the host.
pub(super) const PROBES: &str = "\
mount -t tracefs none /sys/kernel/tracing 2>/dev/null
echo 'p:mark kvm_riscv_vcpu_trap_redirect instruction=+16(%a1):x32' >/sys/kernel/tracing/kprobe_events
echo 'p:own_mark security_task_prctl instruction=%a0:x32' >>/sys/kernel/tracing/kprobe_events
";

/// Returns the instruction that encodes the low ten bits of a number.
fn instruction(code: u32) -> u32 {
    INSTRUCTION | (code & FIELD_MASK) << FIELDS[0] | (code >> 5 & FIELD_MASK) << FIELDS[1]
}

/// Returns the ten bits that an instruction encodes, or `None` for other instructions.
pub(super) fn decode(instruction: u32) -> Option<u32> {
    let [low, high] = FIELDS.map(|at| instruction >> at & FIELD_MASK);
    let code = high << 5 | low;
    (self::instruction(code) == instruction).then_some(code)
}

/// Sends the low ten bits of a number to the host.
#[cfg(target_arch = "riscv64")]
pub fn tell_host(code: u32) {
    use std::sync::LazyLock;

    /// A page for the generated code.
    static PAGE: LazyLock<usize> = LazyLock::new(|| {
        // SAFETY: `sigaction` is a structure of numbers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = skip_instruction as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the action is initialised, and its function is a signal handler.
        unsafe { libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) };
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses a free range of addresses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED, "there is memory for a page");
        page as usize
    });
    const RETURN: u32 = 0x8067;

    let instruction = instruction(code);
    // SAFETY: no option of `prctl` has this number, so the call only returns an error.
    unsafe { libc::prctl(instruction.cast_signed()) };
    // SAFETY: only this function uses the page, and the page is never unmapped.
    unsafe { (*PAGE as *mut [u32; 2]).write([instruction, RETURN]) };
    // SAFETY: the code changes no register except the return address, as the signal handler skips the first
    // instruction.
    unsafe { std::arch::asm!("fence.i", "jalr {}", in(reg) *PAGE, out("ra") _) };
}

/// Handles the signal of the illegal instruction by skipping it.
#[cfg(target_arch = "riscv64")]
extern "C" fn skip_instruction(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context, whose first register is the program counter.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.__gregs[0] += 4 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_decoded_as_it_was_encoded() {
        for code in [0, 0x116, 0x362, 0x3ff] {
            assert_eq!(decode(instruction(code)), Some(code));
        }
        assert_eq!(decode(0x1050_0073), None, "WFI");
    }
}
