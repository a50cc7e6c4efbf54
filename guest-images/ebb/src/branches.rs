//! The branches of one thread.

use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use crate::block::Mapped;
use crate::counter::{Counter, Event, SlotClaim};
use crate::entry::{self, Handler};
use crate::error::Error;

/// The branches of the calling thread, which has one of these at most. It stays on its thread.
pub struct Branches {
    page: Mapped,
    _on_its_thread: PhantomData<*const ()>,
}

impl Branches {
    /// Gives the calling thread a block. Branches are disabled at first.
    ///
    /// # Safety
    /// The handler runs between any two instructions of the thread. It may only do what the handler of a signal may do:
    /// in particular it must not allocate memory, take locks, panic, or access what the thread may be changing.
    /// `argument` has to be valid for the handler until this value is dropped. The thread uses its GS for nothing else.
    pub unsafe fn new(handler: Handler, argument: usize) -> Result<Self, Error> {
        let page = Mapped::new(entry::address(), entry::state())?;
        let words = [handler as usize as u64, argument as u64];
        for (word, value) in page.page().call.iter().zip(words) {
            word.store(value, Relaxed);
        }
        Ok(Self { page, _on_its_thread: PhantomData })
    }

    /// Opens an event: after each `period` of them, the thread is branched. It is disabled at first.
    pub fn open(&self, event: Event, period: u64) -> Result<Counter<'_>, Error> {
        Counter::open(self.page.page(), event, period, None)
    }

    /// Opens another event, which counts together with `leader`.
    pub fn open_with(&self, leader: &Counter<'_>, event: Event, period: u64) -> Result<Counter<'_>, Error> {
        Counter::open(self.page.page(), event, period, Some(leader))
    }

    /// Takes branches for an event that somebody else opens for this thread.
    pub fn want(&self, event: Event, period: u64) -> Result<SlotClaim<'_>, Error> {
        SlotClaim::new(self.page.page(), event, period)
    }

    /// Enables branches. An overflow that came while they were disabled is handled now.
    pub fn enable(&self) {
        entry::enable(self.page.page());
    }

    /// Disables branches; overflows wait.
    pub fn disable(&self) {
        self.page.page().disable();
    }

    /// Returns whether branches are enabled.
    pub fn is_enabled(&self) -> bool {
        self.page.page().is_enabled()
    }

    /// Returns whether an overflow waits.
    pub fn is_pending(&self) -> bool {
        self.page.page().is_pending()
    }

    /// Sets where the thread is branched to, in place of this library's code: 0 for nowhere.
    ///
    /// # Safety
    /// There is code that does what this library's does, or no program can have code there.
    pub unsafe fn set_entry(&self, address: u64) {
        self.page.page().set_handler(address);
    }
}
