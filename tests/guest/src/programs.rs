//! Test programs with known counts and samples. The comments in their sources in `programs/` derive the numbers.

/// Executes SYSCALL in compatibility mode (32-bit code under a 64-bit kernel).
pub const COMPAT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/compat"));

/// Forks, and the child executes `./loop`.
pub const FAMILY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/family"));
/// Number of instructions that parent and child execute in user mode, without those of `./loop`.
pub const FAMILY_INSTRUCTIONS: u64 = 60_000_023;
/// Number of these instructions that the parent executes.
pub const FAMILY_PARENT_INSTRUCTIONS: u64 = 40_000_015;

/// Executes a loop between two pauses.
pub const INTERVAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/interval"));
/// Number of instructions that [`INTERVAL`] executes in user mode.
pub const INTERVAL_INSTRUCTIONS: u64 = 100_000_022;
/// Number of these instructions that are branches.
pub const INTERVAL_BRANCHES: u64 = 50_000_005;
/// Number of instructions that [`INTERVAL`] executes from one pause to the other.
pub const BETWEEN_PAUSES: u64 = 100_000_010;
/// Number of branches among them.
pub const BRANCHES_BETWEEN_PAUSES: u64 = 50_000_002;

/// Functions with frame pointers that call each other and the kernel. `heavy` takes three times as long as `light`.
pub const LAYERS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/layers"));
/// Its build id. No other of these programs has one.
pub const LAYERS_BUILD_ID: &str = env!("LAYERS_BUILD_ID");
/// Number of instructions that `heavy` executes, in millions.
pub const HEAVY_MILLIONS: u64 = 150;
/// Number of instructions that `light` executes, in millions.
pub const LIGHT_MILLIONS: u64 = 50;

/// Moves itself from CPU to CPU.
pub const MIGRATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/migrate"));
/// Number of instructions that [`MIGRATE`] executes in user mode.
pub const MIGRATE_INSTRUCTIONS: u64 = 20_013_004;
/// Number of these instructions on CPUs 1, 2 and 3. On CPU 1 the program ends instead of preparing the next move.
pub const MIGRATE_INSTRUCTIONS_BY_CPU: [(&str, u64); 3] =
    [("CPU1", 250 * 20_013 - 7), ("CPU2", 250 * 20_013), ("CPU3", 250 * 20_013)];

/// Two functions that execute 70 and 30 percent of the instructions.
pub const SPLIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/split"));
/// Number of instructions that [`SPLIT`] executes in user mode.
pub const SPLIT_INSTRUCTIONS: u64 = 100_001_010;
/// Sampling period at which the samples hit each of the 1000 instructions of a round once.
pub const SPLIT_PERIOD: u64 = 100_001;

/// Executes a loop on CPUs 1 to 15 at once. Must be started on CPU 0.
pub const SPREAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/spread"));
/// Returns the number of instructions that [`SPREAD`] executes in user mode on one of the CPUs 1 to 15.
pub const fn spread_instructions(cpu: u64) -> u64 {
    20_000 * cpu + 4
}

/// A loop of [`TRACK_LENGTH`] instructions, each at an address of its own.
pub const TRACK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/track"));
/// Number of instructions that [`TRACK`] executes in user mode.
pub const TRACK_INSTRUCTIONS: u64 = 1_000_002_687;
/// Number of instructions in one round of its loop.
pub const TRACK_LENGTH: u64 = 9973;

/// Spends its time in the kernel, mostly with interrupts off.
pub const YIELD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/yield"));
/// Number of instructions that [`YIELD`] executes in user mode.
pub const YIELD_INSTRUCTIONS: u64 = 400_004;
