//! Those for x86-64, and what runs on the bare machine, which only this kind has.

/// A bare-metal program: a 32-bit multiboot image that does what the words of its command line say, in their order, and
/// then ends the machine by writing 0 to the debug-exit port 0xf4. Numbers are decimal, or hexadecimal after `0x`.
/// Output goes to COM1. It uses no SSE and runs on KVMs that interpret.
///
/// | word | what it does, and prints |
/// |---|---|
/// | `hello` | `Hello from the guest` (also done when there is no command line) |
/// | `machine` | what the loader passed: magic, flags, memory sizes, command line, modules with a sum of their bytes, memory map |
/// | `exit=N` | writes N to port 0xf4 |
/// | `echo`, `echo-irq` | echoes COM1, polling it until a `q`; or by its interrupt, without end |
/// | `timer=N` | waits for N interrupts of the local APIC's timer: `timer N` |
/// | `smp=N` | starts the other processors, at most 16 in all, and waits for N: `processors N` |
/// | `rdmsr=I`, `wrmsr=I,HIGH:LOW`, `rdpmc=I` | `rdmsr I VALUE`, `wrmsr I ok`, `rdpmc I VALUE`, or `... fault` for a #GP |
/// | `cpuid=LEAF,SUBLEAF` | `cpuid LEAF EAX EBX ECX EDX` |
/// | `in=PORT,SIZE`, `out=PORT,VALUE,SIZE` | port I/O of 1, 2 or 4 bytes: `in PORT VALUE` |
/// | `peek=ADDRESS`, `poke=ADDRESS,VALUE` | 32-bit memory access: `peek ADDRESS VALUE` |
/// | `jump=ADDRESS` | continues there |
/// | `loop=N` | a loop of exactly 2 × N instructions |
/// | `x2apic` | switches the local APICs to the mode in which their registers are MSRs |
/// | `spin`, `halt` | loops, or sleeps with interrupts off, for ever |
/// | `reset`, `triple` | asks the i8042 for a reset; faults thrice |
///
/// Words for the PMU, AMD's or Intel's, whichever CPUID tells of. They select as either has it, and count fixed counters
/// behind the general ones: these take the modes and the interrupt from a select, and ignore its event. Every processor that
/// `smp` has started does what the last five say:
///
/// | word | what it does, and prints |
/// |---|---|
/// | `count=HIGH:LOW,N,COUNTER` | selects what HIGH:LOW says while `loop=N` runs: `count N VALUE`, more by what is around the loop |
/// | `count-user=HIGH:LOW,N,COUNTER` | the same in user mode, where exactly 2 × N + 1 instructions run |
/// | `pmi=HOW,N,PERIOD,COUNTERS,HIGH:LOW,OTHERS,HIGH:LOW` | N overflows, PERIOD instructions apart, of a loop in user mode; see below |
/// | `fuzz-msrs=SEED,N` | writes nonsense to every PMU register of either vendor, 76 patterns each and N at random: `fuzz-msrs WRITES writes, FAULTS faults, N surprises`, and before it `surprise REGISTER WRITTEN READ` for what is not as documented, RDPMC included |
/// | `flood=PERIOD,N` | all counters overflow after every PERIOD instructions, or 1 to 16 if it is 0, the handler's too, for ever or for N interrupts: `flood over` |
/// | `rearm=N` | has a counter overflow for ever or N times, with the interrupt masked: `rearm over` |
/// | `reprogram=SEED,N` | selects random events in random counters, for ever or N times: `reprogram N changes, M interrupts` |
///
/// `pmi` has overflows delivered as HOW says: `nmi`; `once`, the same with a handler that leaves closed what Intel's
/// interrupts close behind them, the vector table's entry and global control; `fixed`, an ordinary interrupt; `masked` in
/// the local vector table; with the local APIC off, by its spurious-interrupt register (`svr-off`) or by its base
/// register (`apic-off`); with interrupts off (`cli`). COUNTERS is a set, counter 0 unless given; HIGH:LOW selects,
/// instructions in user mode unless given; those of the set OTHERS have the last. It prints `pmi N interrupts, M
/// overflows, at A..B, value C..D, status S, left L, entry E, K late`: what the handler found (how far behind the loop's
/// begin it was called, in bytes, what the counters showed, global status as a set of counters), what nobody looked after
/// in the end (the same of global status, or of the counters past zero without it), the vector table's entry, and how
/// many interrupts came once the APIC was opened again.
///
/// An exception or an interrupt of the PMU that no word expects prints `exception VECTOR at EIP` or `PMU interrupt at EIP`
/// and writes 0x7f to port 0xf4, and so does a fault of a register that a word for the PMU needs.
pub const BARE_METAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload"));

/// `outb PORT VALUE` for Linux guests, whose kernel has no `/dev/port`.
pub const OUTB: Option<&[u8]> = Some(include_bytes!(concat!(env!("OUT_DIR"), "/outb")));

/// `loop` for Linux guests: it executes [`super::LOOP_INSTRUCTIONS`] and ends.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// How many of them are branches, as Linux counts them: its system call is none.
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
