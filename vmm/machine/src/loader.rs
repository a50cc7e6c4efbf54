//! From a kernel file to a guest that is ready to run: what the file is, and where everything goes.
//!
//! A kernel is read once, whole and unpacked, and then loaded. Between the two its code can still be changed, which is
//! why a packed kernel is unpacked here and not by the stub that it brings along. Which files are kernels is each
//! processor's own ([`crate::architecture::Architecture::read_kernel`]).

pub mod bytes;
pub mod error;
pub mod file;
pub mod foreign;
pub mod kernel;
pub mod unpack;

/// The most bytes of a kernel that Tally reads or unpacks.
///
/// Linux maps itself into 512 MiB (`KERNEL_IMAGE_SIZE`) unless it moves itself about; Debian's takes a tenth of that.
const LARGEST: u64 = 512 << 20;
