//! A virtual PMU for guests of a VMM, without the VMM.
//!
//! A guest's kernel programs its performance counters by registers: MSRs on x86, CSRs and SBI calls on RISC-V. A VMM
//! that traps these accesses in user space hands them to a [`VirtualPmu`], one per vCPU, and acts on the [`Outcome`].
//! After every exit it calls [`VirtualPmu::after_exit`], which finds overflows, injects interrupts by the VMM's
//! [`Platform`], and sets the next alarm.
//!
//! The crate knows neither KVM nor the host's perf events. Counting is done by a [`source::Source`]: the crate
//! `vpmu-perf` has one that opens perf events; [`source::script`] has one for tests, whose counts the test decides.
//!
//! # PMUs
//! | constructor | the guest sees |
//! |---|---|
//! | [`VirtualPmu::amd`] | the K7's four counters, `PerfCtrExtCore`'s six, or PerfMonV2 with global registers |
//! | [`VirtualPmu::intel`] | architectural performance monitoring, version 2 or 5, with fixed counters |
//! | [`VirtualPmu::riscv`] | the SBI's PMU extension, with or without overflow interrupts (Sscofpmf) |
//!
//! An AMD or Intel PMU can be shown on a host of the other vendor: a [`translation`] maps the events. What CPUID says
//! of a PMU is filled in by [`model::amd::Version::show`] and [`model::intel::Shape::show`].
//!
//! # Example
//! A guest samples every 10,000 instructions. The scripted source lets it run for 25,000.
//! ```
//! use std::convert::Infallible;
//!
//! use vpmu::model::amd::Version;
//! use vpmu::shared_page::LvtNote;
//! use vpmu::source::script::Script;
//! use vpmu::x86::Vendor;
//! use vpmu::{Access, Cause, Injected, Outcome, Platform, VirtualPmu};
//!
//! /// A vCPU; a real one would inject an interrupt with KVM.
//! struct Vcpu {
//!     interrupts: u32,
//! }
//!
//! impl Platform for Vcpu {
//!     type Error = Infallible;
//!
//!     fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
//!         self.interrupts += 1;
//!         Ok(Injected::AtNextEntry)
//!     }
//! }
//!
//! let host = Script::default();
//! let mut pmu = VirtualPmu::amd(Version::Core, Vendor::Amd, host.clone());
//! let mut vcpu = Vcpu { interrupts: 0 };
//!
//! // The guest writes PERF_CTR0 and PERF_CTL0: overflow after 10,000 retired instructions, with an interrupt.
//! for (register, value) in [(0xc001_0201, 10_000_u64.wrapping_neg()), (0xc001_0200, 0x53_00c0)] {
//!     assert_eq!(pmu.access(Access::Write(register, value)), Outcome::Handled);
//!     let Ok(_next) = pmu.after_exit(Cause::Guest, &mut vcpu);
//! }
//!
//! // An alarm of the source makes the vCPU leave the guest. A real guest's handler would write the counter anew.
//! host.guest_runs(25_000, |_| {
//!     let Ok(_next) = pmu.after_exit(Cause::Alarm, &mut vcpu);
//! });
//! assert_eq!(vcpu.interrupts, 1);
//! assert_eq!(pmu.access(Access::Read(0xc001_0201)), Outcome::Value(15_000));
//! ```
//! `examples/tiny_vmm.rs` is a complete VMM.
//!
//! # Inside
//! Data flows one way. A register access goes to a model, which knows what the register means; from there to the unit
//! that the PMUs of all vendors have in common (counters are configured, stopped, and overflow); to its bank, which
//! holds the counters' values; and to the source. Each knows only the next.

#![deny(missing_docs)]

mod bank;
pub mod ebb;
pub mod event;
mod event_mapper;
pub mod journal;
mod mask;
pub mod model;
pub mod notice;
mod outcome;
mod pmu;
pub mod policy;
pub mod report;
pub mod sbi_page;
pub mod shared_page;
pub mod source;
pub mod state;
mod tier;
pub mod translation;
mod unit;
pub mod x86;

pub use outcome::{Injected, Outcome};
pub use pmu::{Access, BeforeEntry, Cause, Platform, VirtualPmu, Wake};
pub use unit::Switch;
