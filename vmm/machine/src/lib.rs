//! A virtual machine on Linux' KVM whose guest has a working PMU: its memory, its vCPUs, how it boots, its devices' wiring.
//!
//! There is no command line in here, and nothing is printed: a program says what machine it wants ([`Config`]), has it
//! built ([`Machine`]), runs each of its vCPUs on a thread ([`Vcpu::run`]), and asks them how they do ([`Vcpus`]). What happens to
//! the guest's counters is told to a [`Journal`], and what else there is to say goes through the crate `log` ([`target`]).
//!
//! What differs from one kind of processor to another is behind the traits of `architecture.rs`.

mod arch;
mod architecture;
mod error;
mod exit;
mod kernel;
pub mod kvm;
mod kvm_error;
mod loader;
mod machine;
mod memory;
pub mod pmu;
pub mod signals;
pub mod target;
mod vcpu;
mod virtio;

pub use error::MachineError;
pub use exit::Reason;
pub use kernel::Kernel;
pub use loader::error::LoadError;
pub use machine::{Config, Machine};
pub use memory::{GuestRam, MemoryError, Size};
pub use pmu::alarm::hold_back as hold_back_signals;
pub use pmu::journal::Journal;
pub use vcpu::exits::{Exits, Share};
pub use vcpu::mailbox::Vcpus;
pub use vcpu::report::VcpuReport;
pub use vcpu::{Failure, Vcpu};
pub use virtio::MOST as MOST_VIRTIO_DEVICES;

/// What every Linux kernel has to be told of the machine.
pub const KERNEL_WORDS: &str = <arch::Arch as architecture::Architecture>::KERNEL_WORDS;
