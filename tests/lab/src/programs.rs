//! Programs of known length, compiled with this crate, to compare counts with.

/// A Linux program: a loop of 100 million `dec` and `jnz`, and four more instructions around it.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// How many instructions [`LOOP`] executes in user mode.
pub const LOOP_INSTRUCTIONS: u64 = 200_000_004;
/// How many of them are conditional branches. One of these is predicted wrongly, the last.
pub const LOOP_CONDITIONAL_BRANCHES: u64 = 100_000_000;
/// How many of them are branches of any kind: the system call that ends it is one.
pub const LOOP_BRANCHES: u64 = LOOP_CONDITIONAL_BRANCHES + 1;

/// A firmware image that is all of a guest. It loops in user mode and ends with a write to port 0xf4.
pub const GUEST_LOOP_ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-loop.rom"));
/// How many instructions [`GUEST_LOOP_ROM`] executes in user mode.
pub const GUEST_LOOP_INSTRUCTIONS: u64 = 100_000_002;

/// A firmware image that leaves its guest in many ways, and writes to port 0xf4 how often it came back where it should.
pub const GUEST_EXITS_ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-exits.rom"));
/// How many CPUID instructions [`GUEST_EXITS_ROM`] executes.
pub const GUEST_EXITS_CPUID: u64 = 4;
/// How many RDMSR and WRMSR instructions.
pub const GUEST_EXITS_MSR: u64 = 5;
/// How many WBINVD instructions.
pub const GUEST_EXITS_WBINVD: u64 = 2;
/// How many software interrupts, each of which a missing page of the stack stops half-way.
pub const GUEST_EXITS_INTERRUPTS: u64 = 4;
/// How many of these KVM then injects: INT3 and INTO. It lets the guest execute INT n again.
pub const GUEST_EXITS_INJECTED: u64 = 2;

/// The programs of `cpu/programs.S`, which end soon and whose counts `cpu/README.md` lists.
pub const KNOWN: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/programs.rs"));
