//! What the program prints and does on hosts of one architecture only: a module for each, with the same items.
//!
//! | item | what it is |
//! |---|---|
//! | `calls` | system calls that the sandbox allows |
//! | `help` | help texts that differ |
//! | `host` | facts about the processor and its kernels |

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub use self::riscv64::{calls, help, host};
#[cfg(target_arch = "x86_64")]
pub use self::x86_64::{calls, help, host};

/// Returns what `/proc/cpuinfo` has for a key of the first processor.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}
