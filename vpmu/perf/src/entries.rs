//! Entries into a guest that the processor counts as something that the guest does. On some of AMD's, each VMRUN adds
//! an instruction and a branch to events that count the guest only: what a guest's counters say then depends on how
//! often the host was interrupted. [`EntryTicks`] says what an entry adds, and [`Entries`] how many there were, so that
//! events can leave them out.
//!
//! How many there were in all is a statistic of KVM's. How many of them were in the guest's user mode can be told by
//! the instruction pointer, where a kernel has the upper half of the addresses: the tracepoint of KVM's entries is
//! counted with a filter.

use std::cell::{Cell, OnceCell};
use std::fs;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use perf_event_open_sys::bindings::PERF_TYPE_TRACEPOINT;
use vpmu::event::{Event, Filter, GenericEvent, Scope, Selection};
use vpmu::source::Count;

use crate::attribution::read;
use crate::request::{Encoded, Purpose, Request, this_thread};
use crate::system_calls::SystemCalls;

/// What each entry into a guest adds to the counts of events, in user mode and in the kernel of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EntryTicks {
    /// At entries in user mode.
    pub user: Ticks,
    /// At entries in the kernel.
    pub kernel: Ticks,
}

/// What one entry adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ticks {
    /// To events that count instructions.
    pub instructions: u32,
    /// To events that count branches.
    pub branches: u32,
    /// To events that count taken branches.
    pub taken_branches: u32,
}

/// What an event counts of which an entry may be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    Instructions,
    Branches,
    TakenBranches,
}

impl Counted {
    /// Returns what an event counts on AMD's processors since family 17h (PPR, "Performance Monitor Counters").
    fn of(event: Event) -> Option<Self> {
        /// The number and the unit mask of the event, which have no count mask, edge or inversion.
        const SIMPLE: u64 = 0xf_0000_ffff;
        const NUMBER: u64 = 0xf_0000_00ff;
        match event {
            Event::Generic(GenericEvent::Instructions) => Some(Self::Instructions),
            Event::Generic(GenericEvent::Branches) => Some(Self::Branches),
            Event::Raw(code) if code & !SIMPLE == 0 => match code & NUMBER {
                0xc0 => Some(Self::Instructions),
                0xc2 => Some(Self::Branches),
                0xc4 => Some(Self::TakenBranches),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Ticks {
    fn of(self, counted: Counted) -> u64 {
        match counted {
            Counted::Instructions => self.instructions.into(),
            Counted::Branches => self.branches.into(),
            Counted::TakenBranches => self.taken_branches.into(),
        }
    }
}

impl EntryTicks {
    /// Number of [`Self::numbers`].
    pub const NUMBERS: usize = 6;

    /// Returns all numbers, for a file.
    pub fn numbers(self) -> [u32; Self::NUMBERS] {
        let Self { user, kernel } = self;
        [
            user.instructions,
            user.branches,
            user.taken_branches,
            kernel.instructions,
            kernel.branches,
            kernel.taken_branches,
        ]
    }

    /// Returns what has these [`Self::numbers`].
    pub fn from_numbers(numbers: [u32; Self::NUMBERS]) -> Self {
        let of = |first| {
            let [instructions, branches, taken_branches] =
                [0, 1, 2].map(|number: usize| numbers[first + number]);
            Ticks { instructions, branches, taken_branches }
        };
        Self { user: of(0), kernel: of(3) }
    }

    /// Returns what an entry adds to a count of instructions in all modes, if that is the same in each.
    pub fn to_all_instructions(self) -> Option<u32> {
        (self.user.instructions == self.kernel.instructions).then_some(self.user.instructions)
    }

    /// Returns whether this process can tell entries in user mode from those in the kernel: only root may look at
    /// tracepoints, unless the administrator has decided otherwise.
    pub fn can_tell_modes() -> bool {
        tracepoint().is_some()
    }

    /// Returns what the entries add to a count.
    fn of(self, selection: Selection) -> Option<PerEntry> {
        // What enters the guest is the host's own work, which other counts contain.
        if selection.scope != Scope::Guest {
            return None;
        }
        let counted = Counted::of(selection.event)?;
        let (user, kernel) = (self.user.of(counted), self.kernel.of(counted));
        let per_entry = match selection.filter {
            Filter::All => PerEntry { user, kernel },
            Filter::User => PerEntry { user, kernel: 0 },
            Filter::Kernel => PerEntry { user: 0, kernel },
        };
        (per_entry != PerEntry { user: 0, kernel: 0 }).then_some(per_entry)
    }
}

/// What an entry adds to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PerEntry {
    user: u64,
    kernel: u64,
}

impl PerEntry {
    /// Returns whether it depends on how many of the entries were in user mode.
    fn depends_on_mode(self) -> bool {
        self.user != self.kernel
    }

    /// Returns what these entries have added. `None` if it depends on how many of them were in user mode, which is not
    /// known.
    fn times(self, number: Number) -> Option<u64> {
        if !self.depends_on_mode() {
            return Some(self.user.wrapping_mul(number.all));
        }
        let user = number.in_user_mode?;
        let kernel = number.all.saturating_sub(user);
        Some(self.user.wrapping_mul(user).wrapping_add(self.kernel.wrapping_mul(kernel)))
    }
}

/// A number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Number {
    all: u64,
    /// `None` if it is not known.
    in_user_mode: Option<u64>,
}

/// The entries of this thread into its guest, which the thread's events leave out.
pub struct Entries {
    ticks: EntryTicks,
    /// Returns their number, as KVM counts them.
    all: Box<dyn Fn() -> Option<u64>>,
    /// KVM's tracepoint of entries, if it can tell those in user mode.
    tracepoint: Option<Encoded>,
    /// Counts those in user mode, once an event has asked for that.
    in_user_mode: OnceCell<Option<OwnedFd>>,
    /// How many there were at the last exit, if an event asked for that since.
    at_exit: Cell<Option<Number>>,
    system_calls: SystemCalls,
}

impl Entries {
    /// Begins to count the entries of this thread. `all` returns their number. `is_split` says that the guest's kernel
    /// has the upper half of the addresses, and programs the lower one.
    pub(crate) fn of_this_thread(
        ticks: EntryTicks,
        all: impl Fn() -> Option<u64> + 'static,
        is_split: bool,
        system_calls: SystemCalls,
    ) -> Self {
        Self {
            ticks,
            all: Box::new(all),
            tracepoint: tracepoint().filter(|_| is_split),
            in_user_mode: OnceCell::new(),
            at_exit: Cell::new(None),
            system_calls,
        }
    }

    /// Begins to count entries in user mode, unless that is done already.
    fn tell_modes(&self) {
        self.in_user_mode.get_or_init(|| {
            self.at_exit.set(None);
            let request =
                Request { event: self.tracepoint?, thread: this_thread(), purpose: Purpose::Entries };
            self.system_calls.add(request.system_calls());
            request.open().ok()
        });
    }

    /// Says that the guest has run since the last call.
    pub fn guest_ran(&self) {
        self.at_exit.set(None);
    }

    fn number(&self) -> Option<Number> {
        if let Some(number) = self.at_exit.get() {
            return Some(number);
        }
        let in_user_mode = self.in_user_mode.get().and_then(Option::as_ref);
        self.system_calls.add(1 + u64::from(in_user_mode.is_some()));
        let in_user_mode = in_user_mode.and_then(read).map(|reading| reading.value);
        let number = Number { all: (self.all)()?, in_user_mode };
        self.at_exit.set(Some(number));
        Some(number)
    }
}

/// What the entries have added to the count of one event.
pub struct Added {
    entries: Rc<Entries>,
    per_entry: PerEntry,
    /// What all entries of the thread would have added when it was asked last.
    before: Option<u64>,
    /// What those have added while the event counted.
    sum: u64,
    /// The last count without them, which does not decrease.
    last: u64,
    /// The event was without hardware at the last count, or shortly before.
    was_starved: bool,
}

impl Added {
    /// Returns what entries from now on add to an event, if they add anything.
    pub fn to(entries: &Rc<Entries>, selection: Selection) -> Option<Self> {
        let per_entry = entries.ticks.of(selection)?;
        if per_entry.depends_on_mode() {
            entries.tell_modes();
        }
        let mut added = Self {
            entries: Rc::clone(entries),
            per_entry,
            before: None,
            sum: 0,
            last: 0,
            was_starved: false,
        };
        added.begin();
        Some(added)
    }

    /// The event begins to count from zero.
    pub fn begin(&mut self) {
        (self.before, self.sum, self.last, self.was_starved) = (self.now(), 0, 0, false);
    }

    /// Takes what entries have added off a count, but for those of a time in which the event was without hardware.
    pub fn take_off(&mut self, count: Count) -> Count {
        let now = self.now();
        let before = std::mem::replace(&mut self.before, now);
        let is_starved = matches!(count, Count::Starved(_));
        let was_starved = std::mem::replace(&mut self.was_starved, is_starved);
        if !is_starved
            && !was_starved
            && let (Some(before), Some(now)) = (before, now)
        {
            self.sum = self.sum.saturating_add(now.saturating_sub(before));
        }
        self.last = self.last.max(count.number().saturating_sub(self.sum));
        count.map(|_| self.last)
    }

    fn now(&self) -> Option<u64> {
        self.per_entry.times(self.entries.number()?)
    }
}

/// Returns KVM's tracepoint of entries, if this process may know it.
pub fn tracepoint() -> Option<Encoded> {
    const IN: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    let id =
        IN.iter().find_map(|folder| fs::read_to_string(format!("{folder}/events/kvm/kvm_entry/id")).ok());
    Some((PERF_TYPE_TRACEPOINT, id?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Ticks = Ticks { instructions: 1, branches: 2, taken_branches: 3 };

    fn selection(event: Event, filter: Filter) -> Selection {
        Selection { event, filter, scope: Scope::Guest }
    }

    #[test]
    fn entries_add_to_instructions_and_branches_and_to_nothing_else() {
        let ticks = EntryTicks { user: ONE, kernel: Ticks::default() };
        let of =
            |code, filter| ticks.of(selection(Event::Raw(code), filter)).map(|per| (per.user, per.kernel));
        assert_eq!([0xc0, 0xc2, 0xc4].map(|code| of(code, Filter::All)), [1, 2, 3].map(|n| Some((n, 0))));
        assert_eq!(of(0xc0, Filter::Kernel), None, "they add nothing in the kernel");
        for other in [0x76, 0xd1, 0xc3, 0x1_0000_00c0, 0x0100_00c0, 0x0080_00c0, 0x0004_00c0] {
            assert_eq!(of(other, Filter::All), None, "{other:#x}");
        }
        let with_host = Selection { scope: Scope::Thread, ..selection(Event::Raw(0xc0), Filter::All) };
        assert_eq!(ticks.of(with_host), None);
        let generic = Event::Generic(GenericEvent::Branches);
        assert_eq!(ticks.of(selection(generic, Filter::User)), Some(PerEntry { user: 2, kernel: 0 }));
    }

    #[test]
    fn ticks_are_the_same_after_they_were_in_a_file() {
        let ticks =
            EntryTicks { user: ONE, kernel: Ticks { instructions: 4, branches: 5, taken_branches: 6 } };
        assert_eq!(ticks.numbers(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(EntryTicks::from_numbers(ticks.numbers()), ticks);
    }

    #[test]
    fn without_the_tracepoint_only_what_does_not_depend_on_the_mode_is_known() {
        let number = |in_user_mode| Number { all: 10, in_user_mode };
        let [both, user] = [PerEntry { user: 1, kernel: 1 }, PerEntry { user: 1, kernel: 0 }];
        assert_eq!((both.times(number(Some(4))), user.times(number(Some(4)))), (Some(10), Some(4)));
        assert_eq!((both.times(number(None)), user.times(number(None))), (Some(10), None));
    }

    #[test]
    fn what_entries_add_is_taken_off_unless_the_event_had_no_hardware() {
        let made = Rc::new(Cell::new(100));
        let all = Rc::clone(&made);
        let ticks = EntryTicks { user: ONE, kernel: ONE };
        let entries =
            Rc::new(Entries::of_this_thread(ticks, move || Some(all.get()), false, SystemCalls::default()));
        let mut added = Added::to(&entries, selection(Event::Raw(0xc0), Filter::All)).unwrap();
        let enter = |times| {
            made.set(made.get() + times);
            entries.guest_ran();
        };
        enter(7);
        assert_eq!(added.take_off(Count::Exact(1007)), Count::Exact(1000));
        assert_eq!(added.take_off(Count::Exact(1007)), Count::Exact(1000), "the guest has not run");
        enter(5);
        assert_eq!(added.take_off(Count::Starved(1010)), Count::Starved(1003));
        enter(90);
        assert_eq!(added.take_off(Count::Exact(1010)), Count::Exact(1003), "it has counted none of these");
        enter(2);
        assert_eq!(added.take_off(Count::Exact(1014)), Count::Exact(1005));
        added.begin();
        enter(1);
        assert_eq!(added.take_off(Count::Exact(11)), Count::Exact(10));
    }
}
