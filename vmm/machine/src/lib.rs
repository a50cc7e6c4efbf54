//! Virtual machines on Linux' KVM whose guests have a working PMU: memory, vCPUs, boot, and the wiring of devices.
//!
//! The library has no command line and prints nothing. A program describes a machine ([`Config`]), builds it
//! ([`Machine`]), runs each vCPU on a thread of its own ([`Vcpu::run`]), and requests reports from the vCPUs
//! ([`VcpuHandles`]). Events of the guest's counters are passed to a [`Journal`]. Other messages are logged with the
//! crate `log` (see [`target`]).
//!
//! Everything that depends on the processor's architecture is in `arch`.

mod arch;
mod architecture;
mod entropy;
mod error;
mod exit;
mod kernel;
pub mod kvm;
mod kvm_error;
mod kvm_stats;
mod loader;
mod machine;
mod memory;
mod perf_events;
pub mod pmu;
mod recording;
mod saved_counters;
pub mod signals;
mod snapshot;
pub mod target;
mod teardown;
pub mod untrusted;
mod vcpu;
mod virtio;
mod vmgenid;

pub use arch::Fingerprint;
pub use error::MachineError;
pub use exit::Reason;
pub use kernel::{Kernel, SavedKernel};
pub use loader::error::LoadError;
pub use machine::{Config, EmptyMachine, Machine, Start};
pub use memory::{GuestRam, MemoryError, PART, PageMap, Size, extents};
pub use pmu::exit_signals::block_exit_signals;
pub use pmu::journal::Journal;
pub use recording::kallsyms::{Function, Symbols};
pub use recording::linux::{GuestLinux, KernelFunctions, build_id, modules, symbols};
pub use recording::modules::{MAX_MODULES, MAX_NAME as MAX_MODULE_NAME, Module, is_of_name};
pub use recording::sample::{Mapping, Sample, Task};
pub use recording::{Plan as SamplingPlan, RecordError};
pub use snapshot::{MachineState, PausedMachine, Saver};
pub use vcpu::exits::{Exits, Share};
pub use vcpu::mailbox::{Recording, VcpuHandles};
pub use vcpu::report::VcpuReport;
pub use vcpu::saved::SaveError;
pub use vcpu::{Vcpu, VcpuError};
pub use virtio::{DeviceServer, MAX_VIRTIO_DEVICES};

/// Parameters that every Linux kernel gets on its command line, whatever the user's options.
pub const KERNEL_PARAMETERS: &str = arch::Board::KERNEL_PARAMETERS;
