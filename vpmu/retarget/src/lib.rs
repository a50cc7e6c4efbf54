//! Retargets a kernel's accesses to its performance counters, so that a virtual machine monitor can trap them.
//!
//! On KVM some of these accesses never reach the VMM's user space, so a VMM cannot emulate a PMU for an unmodified
//! kernel. This crate is for VMMs that load the guest's kernel themselves and can change its image before it runs.
//! - [`x86`] finds RDPMC instructions, which become RDMSR, and lets a Linux kernel access its PMU's MSRs on a page that
//!   it shares with the VMM, without leaving the guest.
//! - [`riscv`] changes SBI calls and CSR reads into SBI calls of the vendor range, and lets a Linux kernel make most of
//!   them on a shared page, without leaving the guest.
//!
//! Out of reach are kernel modules, kernels that the guest loads by kexec, and code that the guest generates (BPF).
//!
//! # Features
//! `x86`, on by default: [`x86`], with the decoder that it needs.

#![deny(missing_docs)]

pub mod riscv;
#[cfg(feature = "x86")]
pub mod x86;
