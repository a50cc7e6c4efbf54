//! The programs for x86-64, and the bare-metal payload, which exists only for this architecture.

/// The bare-metal payload: a 32-bit multiboot image that executes the words of its command line in order, and then ends
/// the virtual machine by writing 0 to the debug-exit port 0xf4. Numbers are decimal, or hexadecimal after `0x`. Output
/// goes to COM1. It uses no SSE, so that it also runs on a KVM that emulates instructions in software.
///
/// | word | action and output |
/// |---|---|
/// | `hello` | `Hello from the guest` (also done when there is no command line) |
/// | `machine` | prints the multiboot information: magic, flags, memory sizes, command line, modules with a sum of their bytes, memory map |
/// | `exit=N` | writes N to port 0xf4 |
/// | `echo`, `echo-irq` | echoes COM1: by polling until a `q`, or with interrupts, for ever |
/// | `timer=N` | waits for N interrupts of the local APIC's timer: `timer N` |
/// | `smp=N` | starts the other processors, at most 16 in all, and waits until N are online: `processors N` |
/// | `rdmsr=I`, `wrmsr=I,HIGH:LOW`, `rdpmc=I` | `rdmsr I VALUE`, `wrmsr I ok`, `rdpmc I VALUE`, or `... fault` for a #GP |
/// | `cpuid=LEAF,SUBLEAF` | `cpuid LEAF EAX EBX ECX EDX` |
/// | `in=PORT,SIZE`, `out=PORT,VALUE,SIZE` | port I/O of 1, 2 or 4 bytes: `in PORT VALUE` |
/// | `peek=ADDRESS`, `poke=ADDRESS,VALUE` | 32-bit memory access: `peek ADDRESS VALUE` |
/// | `jump=ADDRESS` | continues there |
/// | `loop=N` | a loop of exactly 2 × N instructions |
/// | `x2apic` | switches the local APICs to x2APIC mode |
/// | `spin`, `halt` | loops, or halts with interrupts disabled, for ever |
/// | `reset`, `triple` | requests a reset from the i8042; causes a triple fault |
///
/// The following words use the PMU. They work with AMD's and with Intel's PMU, which they detect with CPUID. HIGH:LOW
/// are the two halves of an event select. Counter numbers of fixed counters follow those of the general ones. Fixed
/// counters use only the modes and the interrupt bit of a select. The last five words run on every processor that `smp`
/// has started.
///
/// | word | action and output |
/// |---|---|
/// | `count=HIGH:LOW,N,COUNTER` | counts during `loop=N`: `count N VALUE`, which includes some instructions around the loop |
/// | `count-user=HIGH:LOW,N,COUNTER` | the same in user mode, where exactly 2 × N + 1 instructions run |
/// | `pmi=HOW,N,PERIOD,COUNTERS,HIGH:LOW,OTHERS,HIGH:LOW` | N overflows, PERIOD instructions apart, of a loop in user mode; see below |
/// | `late=` the same | the same, but prints by how much the interrupts of counter 0 came late, in what it counts: `late N LEAST MEDIAN P99 MOST` |
/// | `fuzz-msrs=SEED,N` | writes 76 patterns to every PMU register of either vendor, and N random values: `fuzz-msrs WRITES writes, FAULTS faults, N surprises`, preceded by `surprise REGISTER WRITTEN READ` for each result that differs from the manual, RDPMC included |
/// | `flood=PERIOD,N` | lets all counters overflow every PERIOD instructions (random periods from 1 to 16 if PERIOD is 0), also in the handler, for ever or for N interrupts: `flood over` |
/// | `rearm=N` | lets a counter overflow for ever or N times, with the interrupt masked: `rearm over` |
/// | `reprogram=SEED,N` | selects random events in random counters, for ever or N times: `reprogram N changes, M interrupts` |
///
/// HOW determines how `pmi` configures the delivery of overflows:
///
/// - `nmi`: as an NMI
/// - `once`: as an NMI, with a handler that does not undo what an interrupt of Intel's PMU disables: the LVT entry and
///   global control
/// - `fixed`: as an ordinary interrupt
/// - `masked`: as an NMI that is masked in the LVT
/// - `svr-off`, `apic-off`: as an NMI, with the local APIC disabled in the spurious-interrupt vector register or in the
///   base MSR
/// - `cli`: as an ordinary interrupt, with interrupts disabled
///
/// COUNTERS is a set, by default counter 0. The first HIGH:LOW is the select, by default instructions in user mode. The
/// counters in the set OTHERS have the second HIGH:LOW as their select. The word prints `pmi N interrupts, M overflows,
/// at A..B, value C..D, status S, left L, entry E, K late`:
///
/// - `at`: the range of the interrupted addresses, as offsets from the start of the loop
/// - `value`: the range of the counters' values in the handler
/// - `status`: the counters in global status that the handler has seen
/// - `left`: the counters with an unhandled overflow at the end, from global status, or from the values without such a
///   register
/// - `entry`: the LVT entry at the end
/// - `late`: the number of interrupts after the APIC was enabled again
///
/// An unexpected exception or PMU interrupt prints `exception VECTOR at EIP` or `PMU interrupt at EIP` and writes 0x7f
/// to port 0xf4. So does a fault of a register access by a word for the PMU, which prints the register.
pub const BARE_METAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload"));

/// `outb PORT VALUE` for Linux guests, because Debian's kernels for virtual machines have no `/dev/port`.
pub const OUTB: Option<&[u8]> = Some(include_bytes!(concat!(env!("OUT_DIR"), "/outb")));
/// The header of event-based branches, for C.
pub const EBB_HEADER: Option<&[u8]> = Some(include_bytes!("../../ebb/include/tally-ebb.h"));

/// `loop` for Linux guests. It executes [`super::LOOP_INSTRUCTIONS`] and exits.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// Number of branches among them. SYSCALL counts as a branch.
pub const LOOP_BRANCHES: u64 = 10_000_001;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_a_multiboot_image() {
        assert_eq!(BARE_METAL[..5], *b"\x7fELF\x01");
        let header = BARE_METAL[..BARE_METAL.len().min(8192)]
            .windows(4)
            .position(|word| word == 0x1bad_b002_u32.to_le_bytes());
        assert_eq!(header.map(|offset| offset % 4), Some(0));
    }
}
