//! Programs with known counts, compiled together with this crate.

/// A Linux program: a loop of 100 million rounds of `dec` and `jnz`, and four more instructions around it.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// Number of instructions that [`LOOP`] executes in user mode.
pub const LOOP_INSTRUCTIONS: u64 = 200_000_004;
/// Number of conditional branches among them. Only the last one is mispredicted.
pub const LOOP_CONDITIONAL_BRANCHES: u64 = 100_000_000;
/// Number of branches of any kind among them. The system call that ends the program is one.
pub const LOOP_BRANCHES: u64 = LOOP_CONDITIONAL_BRANCHES + 1;

/// Shell command before several `perf record`: replaces the kernel's list of symbols by one of its functions only. perf
/// reads the whole list whenever it begins to record, and the kernel takes half a second of virtual time to print it.
pub const LIST_FUNCTIONS_ONLY: &str =
    "grep -i ' [tw] ' /proc/kallsyms >functions && mount --bind functions /proc/kallsyms\n";

/// Shell command on the Intel host, or in its guests: keeps perf from reading its table of the processor's own events,
/// which takes a quarter of a second of virtual time whenever perf starts. The names in that table cannot be used then.
pub const NO_TABLE_OF_EVENTS: &str = "export PERF_CPUID=GenuineIntel-6-0-0\n";

/// Word on the command line of a program that sets marks on an Intel host. A guest's CPUID may be the other vendor's.
pub const ON_INTEL: &str = "vmcall";

/// A firmware image that is the whole guest. It loops in user mode, and ends the machine by a write to port 0xf4.
pub const GUEST_LOOP_ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-loop.rom"));
/// Number of instructions that [`GUEST_LOOP_ROM`] executes in user mode.
pub const GUEST_LOOP_INSTRUCTIONS: u64 = 100_000_002;

/// A firmware image that causes exits of several kinds. It writes to port 0xf4 how many times the guest continued at
/// the right instruction after an exit.
pub const GUEST_EXITS_ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-exits.rom"));
/// Number of CPUID instructions that [`GUEST_EXITS_ROM`] executes.
pub const GUEST_EXITS_CPUID: u64 = 4;
/// Number of RDMSR and WRMSR instructions.
pub const GUEST_EXITS_MSR: u64 = 5;
/// Number of WBINVD instructions.
pub const GUEST_EXITS_WBINVD: u64 = 2;
/// Number of software interrupts. A missing page of the stack interrupts the delivery of each.
pub const GUEST_EXITS_INTERRUPTS: u64 = 4;
/// Number of these interrupts that KVM then injects: INT3 and INTO. It lets the guest execute INT n again.
pub const GUEST_EXITS_INJECTED: u64 = 2;

/// The programs of `cpu/programs.S`. They run for a short time; `cpu/README.md` lists their counts.
pub const KNOWN: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/programs.rs"));
