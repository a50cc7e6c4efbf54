//! How a program on RISC-V tells the host what it is about to do: by an instruction that it may not execute, of a number in ten of
//! its bits.
//!
//! KVM gives a guest's back to the guest, where it is a signal; a probe has seen it. A program of the host's own makes a system call
//! with the instruction, which another probe sees.

/// `csrrwi`, to a register that is the hypervisor's alone (`hgatp`).
const INSTRUCTION: u32 = 0x6800_5073;
/// Where there is room in it: the register that gets the old value, and the new value.
const ROOM: [u32; 2] = [7, 15];
const BITS: u32 = 0x1f;

/// Defines the event `kprobes:mark` on the simulated host, for guests' programs, and `kprobes:own_mark` for its own.
pub(super) const PROBES: &str = "\
mount -t tracefs none /sys/kernel/tracing 2>/dev/null
echo 'p:mark kvm_riscv_vcpu_trap_redirect instruction=+16(%a1):x32' >/sys/kernel/tracing/kprobe_events
echo 'p:own_mark security_task_prctl instruction=%a0:x32' >>/sys/kernel/tracing/kprobe_events
";

/// The instruction that says the low ten bits of a number.
fn instruction(code: u32) -> u32 {
    INSTRUCTION | (code & BITS) << ROOM[0] | (code >> 5 & BITS) << ROOM[1]
}

/// These bits, if it is such an instruction.
pub(super) fn said(instruction: u32) -> Option<u32> {
    let [low, high] = ROOM.map(|at| instruction >> at & BITS);
    let code = high << 5 | low;
    (self::instruction(code) == instruction).then_some(code)
}

/// Says the low ten bits of a number to the host.
#[cfg(target_arch = "riscv64")]
pub fn tell_host(code: u32) {
    use std::sync::LazyLock;

    /// A page for instructions.
    static PAGE: LazyLock<usize> = LazyLock::new(|| {
        // SAFETY: `sigaction` is a structure of numbers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = go_on as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the action is initialised, and its function is a signal's.
        unsafe { libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) };
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which replaces none.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED, "there is memory for a page");
        page as usize
    });
    const RETURN: u32 = 0x8067;

    let instruction = instruction(code);
    // SAFETY: there is no such request, so nothing is done.
    unsafe { libc::prctl(instruction.cast_signed()) };
    // SAFETY: the page is this function's alone, and stays.
    unsafe { (*PAGE as *mut [u32; 2]).write([instruction, RETURN]) };
    // SAFETY: what is called there changes no register but that of the return address: the first instruction is skipped.
    unsafe { std::arch::asm!("fence.i", "jalr {}", in(reg) *PAGE, out("ra") _) };
}

/// Skips the instruction that is not to be executed.
#[cfg(target_arch = "riscv64")]
extern "C" fn go_on(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a signal's function its context, whose first register is where the program goes on.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.__gregs[0] += 4 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_says_what_it_was_made_of() {
        for code in [0, 0x116, 0x362, 0x3ff] {
            assert_eq!(said(instruction(code)), Some(code));
        }
        assert_eq!(said(0x1050_0073), None, "WFI");
    }
}
