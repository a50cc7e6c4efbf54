//! Event-based branches: at a counter's overflow the program goes on at a handler of its own, without its kernel.
//!
//! A program opens an event with a flag in its code ([`FLAG`]), and keeps a **block** for each thread in its own
//! memory: whether and where it wants to be branched to, and after how many events. The thread's base address of GS
//! says where the block is. So the VMM keeps nothing for a program, and a program reads and writes its block without an
//! exit. `docs/ebb.md` describes the interface.
//!
//! The block is untrusted. All of it that has an effect is an address to go on at in user mode, and numbers of counts,
//! to which the policy's limits apply.

/// The flag in an event select: counter mask 255 and edge detect, not inverted. No processor counts anything for it,
/// because no event happens 255 times in a cycle.
pub const FLAG: u64 = 0xff << 24 | 1 << 18;

/// Number of slots in a block.
pub const SLOTS: usize = 8;
/// Size of a block in bytes. It is aligned so that it lies on one page.
pub const SIZE: usize = size_of::<u64>() * (SLOT + SLOTS * SLOT_WORDS);
/// Alignment of a block.
pub const ALIGNMENT: u64 = 512;
const _: () = assert!(SIZE as u64 <= ALIGNMENT);

/// First word of a block: "TALLYEBB" in memory.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TALLYEBB");

/// Numbers of a block's words, of 64 bits each.
pub mod word {
    /// [`super::MAGIC`].
    pub const MAGIC: usize = 0;
    /// The block's own address.
    pub const ADDRESS: usize = 1;
    /// The base address of FS of the thread whose block it is.
    pub const THREAD: usize = 2;
    /// The control and status register, BESCR.
    pub const CONTROL: usize = 3;
    /// The handler's address, EBBHR.
    pub const HANDLER: usize = 4;
    /// Where the program was when it was branched, EBBRR.
    pub const RETURN: usize = 5;
}

/// Longer periods are taken as this one.
pub const LONGEST_PERIOD: u64 = 1 << 46;

/// Number of the first slot's first word.
const SLOT: usize = 8;
const SLOT_WORDS: usize = 4;

/// Numbers of a slot's words, from its first.
mod slot {
    /// The event's code, with the flag. 0 if the slot is not used.
    pub const EVENT: usize = 0;
    /// Number of events from an overflow to the next.
    pub const PERIOD: usize = 1;
    /// Number of events that are left until the next overflow, as of the counter's last stop or overflow. 0 before the
    /// first start.
    pub const LEFT: usize = 2;
    /// Number of overflows.
    pub const OVERFLOWS: usize = 3;
}

/// Bits of [`word::CONTROL`].
pub mod control {
    /// BESCR's GE: branches are enabled.
    pub const GLOBAL_ENABLE: u64 = 1 << 63;
    /// BESCR's PME: branches for counters are enabled.
    pub const PMU_ENABLE: u64 = 1 << 32;
    /// BESCR's PMEO: a counter has overflowed.
    pub const OCCURRED: u64 = 1 << 0;
}

/// The words of a thread's block, in the guest's memory.
pub trait Block {
    /// Reads a word.
    fn load(&self, word: usize) -> u64;
    /// Writes a word.
    fn store(&self, word: usize, value: u64);
}

/// Identifies a thread among those of a guest: by its page tables, its block and its base address of FS.
pub type Owner = [u64; 3];

/// The thread that a vCPU runs, if it has a block.
pub struct Thread<'a> {
    /// Which thread it is.
    pub owner: Owner,
    /// Its block.
    pub block: &'a dyn Block,
    /// Where the thread goes on, if it can be made to go on elsewhere: it is in user mode, and nothing is about to be
    /// injected.
    pub instruction: Option<u64>,
    /// The highest address at which a handler can be.
    pub highest: u64,
}

/// A slot of a thread's block.
#[derive(Clone, Copy)]
pub(crate) struct Slot<'a> {
    block: &'a dyn Block,
    first: usize,
}

impl<'a> Thread<'a> {
    /// Returns the first slot for an event.
    pub(crate) fn slot(&self, event: u64) -> Option<Slot<'a>> {
        let slots = (0..SLOTS).map(|number| SLOT + number * SLOT_WORDS);
        let mut slots = slots.map(|first| Slot { block: self.block, first });
        slots.find(|slot| slot.load(slot::EVENT) == event)
    }

    /// Records that a counter has overflowed.
    pub(crate) fn occurs(&self) {
        let control = self.block.load(word::CONTROL);
        self.block.store(word::CONTROL, control | control::OCCURRED);
    }

    /// Returns the handler to branch to, if one is due and enabled: a counter has overflowed, whenever that was.
    pub(crate) fn due(&self) -> Option<u64> {
        let all = control::GLOBAL_ENABLE | control::PMU_ENABLE | control::OCCURRED;
        let is_due = self.block.load(word::CONTROL) & all == all;
        if is_due { self.handler() } else { None }
    }

    fn handler(&self) -> Option<u64> {
        let handler = self.block.load(word::HANDLER);
        (1..=self.highest).contains(&handler).then_some(handler)
    }

    /// Returns whether an overflow waits that no handler can ever handle.
    pub(crate) fn is_stuck(&self) -> bool {
        self.block.load(word::CONTROL) & control::OCCURRED != 0 && self.handler().is_none()
    }

    /// Disables further branches, and notes where the handler returns to.
    pub(crate) fn branch(&self, from: u64) {
        let control = self.block.load(word::CONTROL);
        self.block.store(word::CONTROL, control & !(control::GLOBAL_ENABLE | control::PMU_ENABLE));
        self.block.store(word::RETURN, from);
    }
}

impl Slot<'_> {
    fn load(self, word: usize) -> u64 {
        self.block.load(self.first + word)
    }

    fn store(self, word: usize, value: u64) {
        self.block.store(self.first + word, value);
    }

    /// Number of events from an overflow to the next. 0 if there are to be none.
    pub(crate) fn period(self) -> u64 {
        self.load(slot::PERIOD).min(LONGEST_PERIOD)
    }

    /// Number of events until the next overflow of a counter that starts.
    pub(crate) fn left(self, period: u64) -> u64 {
        match self.load(slot::LEFT) {
            0 => period,
            left if left > LONGEST_PERIOD => LONGEST_PERIOD,
            left => left,
        }
    }

    /// Notes that so many events are left, and so many overflows have happened since the last note.
    pub(crate) fn note(self, left: u64, overflows: u64) {
        self.store(slot::LEFT, left);
        if overflows != 0 {
            self.store(slot::OVERFLOWS, self.load(slot::OVERFLOWS).wrapping_add(overflows));
        }
    }
}
