//! Programs of our own that run in guests, compiled when this crate is.

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
/// | `smp=N` | starts the other processors and waits for N in all: `processors N` |
/// | `rdmsr=I`, `wrmsr=I,HIGH:LOW`, `rdpmc=I` | `rdmsr I VALUE`, `wrmsr I ok`, `rdpmc I VALUE`, or `... fault` for a #GP |
/// | `cpuid=LEAF,SUBLEAF` | `cpuid LEAF EAX EBX ECX EDX` |
/// | `in=PORT,SIZE`, `out=PORT,VALUE,SIZE` | port I/O of 1, 2 or 4 bytes: `in PORT VALUE` |
/// | `peek=ADDRESS`, `poke=ADDRESS,VALUE` | 32-bit memory access: `peek ADDRESS VALUE` |
/// | `jump=ADDRESS` | continues there |
/// | `loop=N` | a loop of exactly 2 × N instructions |
/// | `spin`, `halt` | loops, or sleeps with interrupts off, for ever |
/// | `reset`, `triple` | asks the i8042 for a reset; faults thrice |
///
/// An exception that no word expects prints `exception VECTOR at EIP` and writes 0x7f to port 0xf4.
pub const BARE_METAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload"));

/// `outb PORT VALUE` for Linux guests, whose kernel has no `/dev/port`.
pub const OUTB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/outb"));

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
