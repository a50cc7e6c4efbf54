//! Programs whose counts and samples are known by reading them; `programs/` has their sources, which say why.

/// Makes a system call by SYSCALL in 32-bit mode.
pub const COMPAT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/compat"));

/// Forks, and the child becomes `./loop`.
pub const FAMILY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/family"));
/// How many instructions parent and child execute in user mode, beside those of `./loop`.
pub const FAMILY_INSTRUCTIONS: u64 = 60_000_023;
/// How many of them the parent does.
pub const FAMILY_PARENT_INSTRUCTIONS: u64 = 40_000_015;

/// Works between two pauses.
pub const INTERVAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/interval"));
/// How many instructions [`INTERVAL`] executes in user mode.
pub const INTERVAL_INSTRUCTIONS: u64 = 100_000_022;
/// How many of them are branches.
pub const INTERVAL_BRANCHES: u64 = 50_000_005;
/// How many instructions are from one pause to the other.
pub const BETWEEN_PAUSES: u64 = 100_000_010;
/// How many of these are branches.
pub const BRANCHES_BETWEEN_PAUSES: u64 = 50_000_002;

/// Functions with frame pointers that call each other and the kernel: `heavy` works three times as long as `light`.
pub const LAYERS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/layers"));
/// How many million instructions `heavy` executes.
pub const HEAVY_MILLIONS: u64 = 150;
/// How many million instructions `light` executes.
pub const LIGHT_MILLIONS: u64 = 50;

/// Moves itself from CPU to CPU.
pub const MIGRATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/migrate"));
/// How many instructions [`MIGRATE`] executes in user mode.
pub const MIGRATE_INSTRUCTIONS: u64 = 20_013_004;
/// How many of them it executes on CPUs 1, 2 and 3. On CPU 1 its last round goes no further.
pub const MIGRATE_INSTRUCTIONS_BY_CPU: [(&str, u64); 3] =
    [("CPU1", 250 * 20_013 - 7), ("CPU2", 250 * 20_013), ("CPU3", 250 * 20_013)];

/// Two functions that share the work 70 to 30.
pub const SPLIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/split"));
/// How many instructions [`SPLIT`] executes in user mode.
pub const SPLIT_INSTRUCTIONS: u64 = 100_001_010;
/// The period whose samples find every one of the 1000 instructions of its round once.
pub const SPLIT_PERIOD: u64 = 100_001;

/// Works on CPUs 1 to 15 at once. To be started on CPU 0.
pub const SPREAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/spread"));
/// How many instructions [`SPREAD`] executes in user mode on that CPU of 1 to 15.
pub const fn spread_instructions(cpu: u64) -> u64 {
    20_000 * cpu + 4
}

/// A loop of [`TRACK_LENGTH`] instructions, each at an address of its own.
pub const TRACK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/track"));
/// How many instructions [`TRACK`] executes in user mode.
pub const TRACK_INSTRUCTIONS: u64 = 1_000_002_687;
/// How long its loop is.
pub const TRACK_LENGTH: u64 = 9973;

/// Spends its time in the kernel, most of that with interrupts off.
pub const YIELD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/yield"));
/// How many instructions [`YIELD`] executes in user mode.
pub const YIELD_INSTRUCTIONS: u64 = 400_004;
