//! Loads kernels: the parts that all architectures share.
//!
//! A kernel is read into Tally's memory, uncompressed, and later loaded into the guest's memory. In between its code
//! can be patched. This is why Tally decompresses a kernel itself, instead of letting the kernel's own stub do so in
//! the guest. Each architecture has kernel formats of its own ([`crate::arch::Format::read`]).

pub mod bytes;
pub mod error;
pub mod file;
pub mod foreign;
pub mod image;
pub mod kernel;
pub mod unpack;

/// Maximum size of a kernel that Tally reads or decompresses to.
///
/// Linux on x86 maps itself into at most 512 MiB (`KERNEL_IMAGE_SIZE` without KASLR). Debian's kernel needs a tenth
/// of that.
const LARGEST: u64 = 512 << 20;
