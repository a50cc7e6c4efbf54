//! Builds what Tally boots: the default guest and bare-metal payloads.
//!
//! The default guest is the distribution's own kernel, untouched, and an initrd made of the distribution's busybox and
//! `perf`, one small shell script, and the agent that runs commands in it (the package `guest-agent`). Its packages are downloaded and unpacked, never installed, and the result is kept
//! in a [cache](cache::Cache) outside the work tree, so that only the first call takes time.
//!
//! The parts are public because the lab builds its host image from the same ones.

pub mod cache;
pub mod child;
pub mod command;
pub mod cpio;
pub mod emulator;
mod error;
pub mod guest;
pub mod host;
pub mod image;
mod lz4;
pub mod modules;
pub mod packages;
pub mod payloads;
pub mod progress;
mod release;
mod small_kernel;
pub mod sources;
mod tool;

pub use error::Error;
pub use guest::{Guest, Kernel, default_guest, guest, guest_of, kernel, stamp};
pub use progress::Progress;
pub use release::{Arch, Release, Suite};
pub use small_kernel::{SmallKernel, small_kernel};
pub use tool::run as run_tool;

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, Error>;
