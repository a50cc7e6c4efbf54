//! What every maker's PMU does: counters are configured one by one and stopped all at once, a status remembers which have
//! overflowed, and an overflow interrupts. The models are this, with registers.

use crate::bank::{Alarm, Bank};
use crate::event::Selection;
use crate::notice::Notice;
use crate::source::Source;

/// What one counter is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Setting {
    /// What it counts, if anything.
    pub selection: Option<Selection>,
    /// Whether it counts, as far as it has a say.
    pub enabled: bool,
    /// Whether its overflow interrupts.
    pub interrupts: bool,
}

/// The counters of a vCPU, numbered from 0; sets of them are bit masks.
pub struct Unit<S: Source> {
    bank: Bank<S>,
    settings: Vec<Setting>,
    /// Those that may run.
    control: u64,
    /// Those that have overflowed since software last cleared them.
    status: u64,
    interrupt: bool,
    freezes: bool,
    frozen: bool,
}

impl<S: Source> Unit<S> {
    /// So many counters of so many bits, all zero, which select nothing; all of them may run until [`Self::set_control`] says otherwise.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        let bank = Bank::new(source, counters, width);
        let settings = vec![Setting::default(); counters];
        Self {
            control: set_of(counters),
            bank,
            settings,
            status: 0,
            interrupt: false,
            freezes: false,
            frozen: false,
        }
    }

    /// All counters.
    pub fn all(&self) -> u64 {
        set_of(self.bank.size())
    }

    /// Tells a counter what to do.
    pub fn configure(&mut self, counter: usize, setting: Setting) {
        // Overflows up to now are those of the old setting.
        self.bank.run(self.running() & !(1 << counter));
        self.take_overflows();
        self.settings[counter] = setting;
        let alarm = if setting.interrupts { Alarm::AtOverflow } else { Alarm::Off };
        self.bank.configure(counter, setting.selection, alarm);
        self.bank.run(self.running());
    }

    /// What a counter shows.
    pub fn read(&mut self, counter: usize) -> u64 {
        let value = self.bank.read(counter);
        self.take_overflows();
        value
    }

    /// Sets what a counter shows, as far as it is wide.
    pub fn write(&mut self, counter: usize, value: u64) {
        self.bank.write(counter, value);
        self.take_overflows();
    }

    /// The counters that may run.
    pub fn control(&self) -> u64 {
        self.control
    }

    /// Says which counters may run, of those that there are.
    pub fn set_control(&mut self, counters: u64) {
        self.control = counters & self.all();
        self.run();
    }

    /// The counters that have overflowed, by now.
    pub fn status(&mut self) -> u64 {
        self.look();
        self.status
    }

    /// Forgets overflows, up to now.
    pub fn clear_status(&mut self, counters: u64) {
        self.look();
        self.status &= !counters;
    }

    /// Has counters look as if they had overflowed; none interrupts.
    pub fn set_status(&mut self, counters: u64) {
        self.status |= counters & self.all();
    }

    /// Whether an overflow that interrupts freezes all counters, until they are thawed.
    pub fn freeze_at_interrupts(&mut self, freezes: bool) {
        self.freezes = freezes;
    }

    /// Whether all counters stand still, whatever they are told.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Freezes or thaws all counters.
    pub fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
        self.run();
    }

    /// Looks whether counters have overflowed: a signal has come that says so, perhaps.
    pub fn look(&mut self) {
        self.bank.look_at_all();
        self.take_overflows();
    }

    /// Some time has passed: counters that have lost their hardware are found out, and what no counter uses is given back.
    pub fn time_has_passed(&mut self) {
        self.look();
        self.bank.release_idle();
    }

    /// Whether it holds counters of the host.
    pub fn holds_counters(&self) -> bool {
        self.bank.is_backed()
    }

    /// Whether it has asked for an interrupt since this was last asked.
    pub fn take_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.interrupt)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.bank.take_notices()
    }

    fn running(&self) -> u64 {
        if self.frozen {
            return 0;
        }
        let enabled = (0..).zip(&self.settings).filter(|(_, setting)| setting.enabled);
        enabled.fold(0, |set, (counter, _)| set | 1 << counter) & self.control
    }

    fn run(&mut self) {
        self.bank.run(self.running());
        self.take_overflows();
    }

    /// The status has a bit for every overflow; an interrupt comes for those whose counter asks for one.
    fn take_overflows(&mut self) {
        let overflowed = self.bank.take_overflowed();
        if overflowed == 0 {
            return;
        }
        self.status |= overflowed;
        let interrupts = (0..)
            .zip(&self.settings)
            .any(|(counter, setting)| overflowed & 1 << counter != 0 && setting.interrupts);
        self.interrupt |= interrupts;
        if interrupts && self.freezes && !self.frozen {
            self.set_frozen(true);
        }
    }
}

/// So many counters as a set.
pub fn set_of(counters: usize) -> u64 {
    (1 << counters) - 1
}
