//! Builds the images that Tally boots: the default guest and bare-metal payloads.
//!
//! The default guest consists of the distribution's unmodified kernel and an initrd. The initrd contains the
//! distribution's busybox and `perf`, a shell script, and the agent that runs commands (the package `guest-agent`). The
//! distribution's packages are downloaded and unpacked, but not installed. The result is kept in a
//! [cache](cache::Cache) outside of the work tree, so that only the first call takes long.
//!
//! The modules are public because the lab builds its host image with them.

pub mod cache;
pub mod child;
pub mod command;
pub mod container;
pub mod cpio;
mod decompress;
pub mod distribution;
mod error;
pub mod guest;
pub mod host;
mod http;
pub mod image;
mod kernel_source;
mod lz4;
pub mod modules;
pub mod packages;
mod patched_kvm;
pub mod payloads;
pub mod progress;
mod release;
mod root;
mod small_kernel;
pub mod sources;
mod tool;
pub mod untrusted;
pub mod versions;

pub use archive_keys::date;
pub use error::{Error, Result};
pub use guest::{Guest, UnpackedKernel, default_guest, guest, guest_of, kernel, stamp};
pub use kernel_source::kernel_needs;
pub use patched_kvm::{PatchedKvm, patched_kvm};
pub use progress::Progress;
pub use release::{Arch, Release, Suite};
pub use small_kernel::{SmallKernel, small_kernel};
pub use tool::run as run_tool;
