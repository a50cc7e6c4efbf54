//! Event-based branches in Tally's guests: when a counter overflows, the thread goes on at a handler of its own,
//! without a signal and without its kernel. `docs/ebb.md` describes the interface, `include/tally-ebb.h` is the same
//! for C.
//!
//! - [`Sampler`] samples the thread that calls it: where it was, and what had called it. It is safe to use.
//! - [`Branches`] calls a handler of the program's. The handler may run between any two instructions, like that of a
//!   signal, so it must be unsafe to give one.
//!
//! ```no_run
//! use tally_ebb::{Event, Sampler};
//!
//! let mut sampler = Sampler::new(Event::INSTRUCTIONS, 100_000, 10_000)?;
//! let (stacks, _) = sampler.sample(|| std::hint::black_box(1))?;
//! for stack in stacks {
//!     println!("{:#x}", stack[0]);
//! }
//! # Ok::<(), tally_ebb::Error>(())
//! ```

#![cfg(target_arch = "x86_64")]
#![deny(missing_docs)]

mod block;
mod branches;
mod counter;
mod entry;
mod error;
pub mod sample;
mod sampler;

pub use branches::Branches;
pub use counter::{Counter, Event, SlotClaim, check};
pub use entry::{Branch, Handler};
pub use error::Error;
pub use perf_event_open_sys::bindings::perf_event_attr as Attr;
pub use sampler::Sampler;
