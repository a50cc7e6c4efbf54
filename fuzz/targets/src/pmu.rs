//! A guest's accesses to its PMU, for each model, while the host counts, runs out of counters and changes its policy,
//! and while another vCPU of the guest writes the shared page at any moment: between two exits, and whenever Tally
//! looks at the page or asks the host for a count.
//!
//! The thread that runs writes what it likes into its block for event-based branches.
//!
//! The work of an exit is bounded, in calls of the host. The host is never asked for more events at once than the guest
//! has counters. No encoding reaches it that no processor of its vendor has, that Linux gives a meaning of its own, or
//! that the policy denies.

mod host;

use std::cell::Cell;
use std::convert::Infallible;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use arbitrary::Arbitrary;
use vpmu::ebb::{self, Block, Thread};
use vpmu::model::{amd, intel, riscv};
use vpmu::policy::{Allowed, Freeze, OnStarvation, Policy, Rule, Tier};
use vpmu::sbi_page::{self, Shared};
use vpmu::shared_page::{ACTIVE, FREEZING, IDLE, LvtNote, MAX_SLOTS, OFFERED, Page, THAWED};
use vpmu::state::PmuState;
use vpmu::x86::{PMU_MSRS, PROGRAM_MSRS, RDPMC_MSRS, Vendor};
use vpmu::{Access, Cause, Injected, Outcome, Platform, Switch, VirtualPmu};

use host::{Host, Later};

/// Maximum number of the host's calls in one exit, or for a new policy.
const MAX_CALLS: usize = 600;
/// Maximum number of alarms that one run of the guest has here.
const MAX_ALARMS: usize = 32;
/// Maximum number of notices in one exit.
const MAX_NOTICES: usize = 64;

#[derive(Debug, Arbitrary)]
struct Input {
    model: Model,
    is_host_intel: bool,
    has_page: bool,
    policy: Rules,
    steps: Vec<Step>,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Model {
    K7,
    Core,
    V2(u8),
    Intel { is_v5: bool, general: u8, fixed: u8, absent: u8 },
    Riscv { programmable: u8, overflows: bool },
}

impl Model {
    fn general(general: u8) -> usize {
        1 + usize::from(general) % intel::MAX_GENERAL
    }

    fn fixed(fixed: u8) -> usize {
        usize::from(fixed) % 4
    }

    fn programmable(programmable: u8) -> usize {
        usize::from(programmable) % (riscv::MAX_PROGRAMMABLE + 1)
    }

    /// Returns the number of counters that can count.
    fn counters(self) -> usize {
        match self {
            Self::K7 => amd::Version::K7.counters(),
            Self::Core => amd::Version::Core.counters(),
            Self::V2(counters) => 1 + usize::from(counters) % amd::MAX_COUNTERS,
            Self::Intel { general, fixed, .. } => Self::general(general) + Self::fixed(fixed),
            // `cycle` and `instret`, beside the programmable ones.
            Self::Riscv { programmable, .. } => Self::programmable(programmable) + 2,
        }
    }
}

#[derive(Debug, Arbitrary)]
enum Step {
    Read(Register),
    ReadInProgram(Register),
    Write(Register, Value),
    /// An SBI call.
    Call {
        function: u8,
        arguments: [Value; 5],
    },
    /// The guest runs until each event has counted this.
    Run {
        counts: u16,
        times: u8,
    },
    /// Time passes, and the timer expires if it is due.
    Time {
        microseconds: u32,
        is_kicked: bool,
    },
    /// Others take the host's counters, or give them back.
    Host {
        is_starved: bool,
        refuses: bool,
    },
    /// Another vCPU writes a word of the page: now, or at a later look at it.
    Page {
        word: u8,
        value: Value,
        later: u8,
    },
    /// The guest takes interrupts at once, and uses its page.
    Guest {
        is_at_next_entry: bool,
        uses_page: bool,
    },
    Policy(Rules),
    Switch {
        counter: u8,
        is_on: bool,
    },
    Report,
    Completes {
        is_user: bool,
    },
    /// The thread that runs writes a word of its block for event-based branches.
    Block {
        word: u8,
        value: Value,
    },
    /// Another thread runs, or the same one goes on in user mode or in the kernel.
    Thread {
        has_block: bool,
        is_user: bool,
    },
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Register {
    Known(u8),
    Any(u32),
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Value {
    Small(u8),
    Bit(u8),
    /// A counter that overflows soon.
    Before(u8),
    /// A select with its usual bits.
    Select(u8, u8),
    /// The same with the flag of event-based branches, and that flag by itself.
    Flagged(u8, u8),
    Code(u8, u8),
    /// A word of the page's protocol.
    Word(u8),
    Any(u64),
}

fn code(unit_mask: u8, event: u8) -> u64 {
    u64::from(unit_mask) << 8 | u64::from(event)
}

impl Value {
    fn get(self) -> u64 {
        match self {
            Self::Small(value) => value.into(),
            Self::Bit(bit) => 1 << (bit % 64),
            Self::Before(counts) => u64::from(counts).wrapping_neg(),
            Self::Select(unit_mask, event) => 0x53_0000 | code(unit_mask, event),
            Self::Flagged(unit_mask, event) => 0x51_0000 | ebb::FLAG | code(unit_mask, event),
            Self::Code(unit_mask, event) => ebb::FLAG | code(unit_mask, event),
            Self::Word(number) => {
                [ACTIVE, OFFERED, THAWED, IDLE, FREEZING, 0, u64::MAX][usize::from(number) % 7]
            }
            Self::Any(value) => value,
        }
    }
}

/// Returns all registers that a PMU may have.
fn registers() -> &'static [u32] {
    static ALL: OnceLock<Vec<u32>> = OnceLock::new();
    ALL.get_or_init(|| {
        let x86 =
            PMU_MSRS.into_iter().chain(RDPMC_MSRS).chain([PROGRAM_MSRS]).flat_map(|range| range.take(16));
        x86.chain(riscv::CYCLE..=riscv::LAST_COUNTER).chain([riscv::OVERFLOWS]).collect()
    })
}

impl Register {
    fn number(self) -> u32 {
        let known = registers();
        match self {
            Self::Known(number) => known[usize::from(number) % known.len()],
            Self::Any(number) => number,
        }
    }
}

/// A policy.
#[derive(Debug, Arbitrary)]
struct Rules {
    tier: u8,
    rule: u16,
    min_period: u32,
    max_interrupts: u16,
    freeze: u8,
    on_starvation: u8,
}

impl Rules {
    fn policy(&self) -> Policy {
        let tiers = [Tier::Enhanced, Tier::Standard, Tier::Architectural];
        let allowed = match usize::from(self.tier) % 4 {
            3 => Allowed::These(vec![Rule::Raw { mask: 0xff, value: u64::from(self.rule & 0xff) }]),
            tier => Allowed::Tier(tiers[tier]),
        };
        let default = Policy::default();
        Policy {
            spare_counters: 0,
            ebb: self.min_period.is_multiple_of(2),
            record: true,
            allowed,
            min_period: u64::from(self.min_period).try_into().unwrap_or(default.min_period),
            max_interrupts_per_second: u32::from(self.max_interrupts).try_into().ok(),
            freeze: [Freeze::Guest, Freeze::Hybrid, Freeze::Host][usize::from(self.freeze) % 3],
            on_starvation: [OnStarvation::Report, OnStarvation::Scale, OnStarvation::Stop]
                [usize::from(self.on_starvation) % 3],
        }
    }
}

fn word(page: &Page, number: u8) -> &AtomicU64 {
    let slot = usize::from(number / 12) % MAX_SLOTS;
    match number % 12 {
        0 | 1 => &page.active,
        2 => &page.freezing,
        3 | 4 => &page.dirty,
        5 => &page.cleared,
        6 => &page.thaw,
        7 => &page.thaw_must_exit,
        8 => &page.lvt_entry,
        9 => &page.lvt_mask,
        10 => &page.written[slot],
        _ => &page.tail_guard,
    }
}

/// Returns a word of the page on which a RISC-V kernel makes its calls.
fn sbi_word(page: &sbi_page::Page, number: u8) -> &AtomicU64 {
    let counter = usize::from(number / 12) % sbi_page::COUNTERS;
    match number % 12 {
        0 => &page.active,
        1 | 2 => &page.running,
        3 | 4 => &page.used,
        5 => &page.written,
        6 | 7 => &page.values[counter],
        8 => &page.overflows,
        9 => &page.changed,
        10 => &page.configurations[counter][0],
        _ => &page.tail_guard,
    }
}

/// The memory of the page as Tally sees it.
struct Memory {
    page: Rc<Page>,
    host: Host,
}

impl Deref for Memory {
    type Target = Page;

    fn deref(&self) -> &Page {
        self.host.looks();
        &self.page
    }
}

/// The block of the thread that runs.
struct Words([Cell<u64>; ebb::SIZE / 8]);

impl Words {
    /// Returns a block that wants branches for two events.
    fn new() -> Self {
        let words = Self(std::array::from_fn(|_| Cell::new(0)));
        let enabled = ebb::control::GLOBAL_ENABLE | ebb::control::PMU_ENABLE;
        let slots = [(8, ebb::FLAG | 0xc0), (9, 1000), (12, ebb::FLAG | 0x76), (13, 10)];
        for (word, value) in
            [(ebb::word::CONTROL, enabled), (ebb::word::HANDLER, 0x1000)].into_iter().chain(slots)
        {
            words.store(word, value);
        }
        words
    }
}

impl Block for Words {
    fn load(&self, word: usize) -> u64 {
        self.0[word].get()
    }

    fn store(&self, word: usize, value: u64) {
        self.0[word].set(value);
    }
}

/// Highest address of a program.
const HIGHEST: u64 = (1 << 47) - 1;

/// The vCPU.
struct Vcpu {
    words: Words,
    /// Whether the thread that runs is in user mode, if it has a block.
    thread: Option<bool>,
    branches: usize,
    is_at_next_entry: bool,
    uses_page: bool,
    injected: usize,
}

impl Platform for Vcpu {
    type Error = Infallible;

    fn inject(&mut self, lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        self.injected += 1;
        let _ = lvt_note.map(|note| note.is_masked() || note.mask(note.written.unwrap_or_default()));
        Ok(if self.is_at_next_entry { Injected::AtNextEntry } else { Injected::Pending })
    }

    fn uses_shared_page(&mut self) -> bool {
        self.uses_page
    }

    fn thread(&mut self) -> Option<Thread<'_>> {
        let instruction = self.thread?.then_some(0x2000);
        Some(Thread { owner: [1, 2, 3], block: &self.words, instruction, highest: HIGHEST })
    }

    fn go_on_at(&mut self, address: u64) -> Result<(), Infallible> {
        assert_eq!(self.thread, Some(true), "a branch where none is possible");
        assert!((1..=HIGHEST).contains(&address), "a branch to {address:#x}");
        self.branches += 1;
        Ok(())
    }
}

struct Machine {
    pmu: VirtualPmu<Host>,
    host: Host,
    page: Rc<Page>,
    sbi_page: Rc<sbi_page::Page>,
    vcpu: Vcpu,
    is_riscv: bool,
}

impl Machine {
    fn new(input: &Input) -> Self {
        let vendor = if input.is_host_intel { Vendor::Intel } else { Vendor::Amd };
        let page = Rc::<Page>::default();
        let guest = match input.model {
            Model::K7 | Model::Core | Model::V2(_) => Some(Vendor::Amd),
            Model::Intel { .. } => Some(Vendor::Intel),
            Model::Riscv { .. } => None,
        };
        let host = Host::new(guest.map(|guest| (guest, vendor)), input.model.counters(), Rc::clone(&page));
        let source = host.clone();
        let mut pmu = match input.model {
            Model::K7 => VirtualPmu::amd(amd::Version::K7, vendor, source),
            Model::Core => VirtualPmu::amd(amd::Version::Core, vendor, source),
            Model::V2(_) => VirtualPmu::amd(amd::Version::V2(input.model.counters()), vendor, source),
            Model::Intel { is_v5, general, fixed, absent } => {
                let shape = intel::Shape {
                    version: if is_v5 { intel::Version::V5 } else { intel::Version::V2 },
                    general: Model::general(general),
                    fixed: Model::fixed(fixed),
                    absent: u32::from(absent % 128),
                };
                VirtualPmu::intel(shape, vendor, source)
            }
            Model::Riscv { programmable, overflows } => {
                let programmable = Model::programmable(programmable);
                VirtualPmu::riscv(riscv::Shape { programmable, overflows }, source)
            }
        };
        if input.has_page {
            pmu.share_page(Box::new(Memory { page: Rc::clone(&page), host: host.clone() }));
        }
        let sbi_page = Rc::<sbi_page::Page>::default();
        if input.has_page {
            pmu.share_sbi_page(Shared { memory: Box::new(Rc::clone(&sbi_page)), number: 0 });
        }
        let vcpu = Vcpu {
            words: Words::new(),
            thread: Some(true),
            branches: 0,
            is_at_next_entry: true,
            uses_page: true,
            injected: 0,
        };
        let mut machine = Self { pmu, host, page, sbi_page, vcpu, is_riscv: guest.is_none() };
        machine.set_policy(&input.policy);
        machine
    }

    fn set_policy(&mut self, rules: &Rules) {
        let policy = rules.policy();
        self.host.expect_policy(&policy);
        self.pmu.set_policy(&policy);
        self.check_calls();
    }

    /// Does what the vCPU's thread does after an exit, and checks how much that was.
    fn after_exit(&mut self, cause: Cause) {
        (self.vcpu.injected, self.vcpu.branches) = (0, 0);
        let Ok(next) = self.pmu.after_exit(cause, &mut self.vcpu);
        assert!(next.notices.len() <= MAX_NOTICES, "{} notices", next.notices.len());
        assert!(self.vcpu.injected <= 1, "{} interrupts in one exit", self.vcpu.injected);
        assert!(self.vcpu.branches <= 1, "{} branches in one exit", self.vcpu.branches);
        self.check_calls();
    }

    fn check_calls(&self) {
        let calls = self.host.take_calls();
        assert!(calls <= MAX_CALLS, "{calls} calls of the host at once");
    }

    fn access(&mut self, access: Access) {
        let outcome = self.pmu.access(access);
        let is_read = !matches!(access, Access::Write(..));
        assert!(is_read || !matches!(outcome, Outcome::Value(_)), "a write returns a value");
        self.after_exit(Cause::Guest);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Read(register) => self.access(Access::Read(register.number())),
            Step::ReadInProgram(register) => self.access(Access::ReadInProgram(register.number())),
            Step::Write(register, value) => self.access(Access::Write(register.number(), value.get())),
            Step::Call { function, arguments } => {
                if self.is_riscv {
                    let [first, second, third, index, data] = arguments.map(Value::get);
                    let _ = self.pmu.has_event(index, data);
                    let last = if self.vcpu.uses_page { sbi_page::Page::announcement(0) } else { 0 };
                    let arguments = [first, second, third, index, data, last];
                    let _ = self.pmu.call(u64::from(function % 12), arguments);
                    self.after_exit(Cause::Guest);
                }
            }
            Step::Run { counts, times } => {
                for _ in 0..=(times % 4) {
                    let mut left = u64::from(*counts);
                    for _ in 0..MAX_ALARMS {
                        let alarms = self.host.guest_runs(&mut left);
                        self.after_exit(if alarms { Cause::Alarm } else { Cause::Guest });
                        if left == 0 {
                            break;
                        }
                    }
                }
            }
            Step::Time { microseconds, is_kicked } => {
                self.host.time_passes(Duration::from_micros((*microseconds).into()));
                self.after_exit(if *is_kicked { Cause::Kick } else { Cause::AlarmAndKick });
            }
            Step::Host { is_starved, refuses } => self.host.set(*is_starved, *refuses),
            Step::Page { word: number, value, .. } if self.is_riscv => {
                sbi_word(&self.sbi_page, *number).store(value.get(), Relaxed);
                self.sbi_page.changed.store(1, Relaxed);
            }
            Step::Page { word: number, value, later: 0 } => {
                word(&self.page, *number).store(value.get(), Relaxed);
            }
            Step::Page { word, value, later } => {
                self.host.write_later(Later { looks: *later, word: *word, value: value.get() });
            }
            Step::Guest { is_at_next_entry, uses_page } => {
                (self.vcpu.is_at_next_entry, self.vcpu.uses_page) = (*is_at_next_entry, *uses_page);
            }
            Step::Policy(rules) => self.set_policy(rules),
            Step::Switch { counter, is_on } => {
                let to = if *is_on { Switch::On } else { Switch::Off };
                self.pmu.set_counter_switch(usize::from(*counter % 40), to);
            }
            Step::Report => {
                let report = self.pmu.report();
                assert!(report.counters.len() <= 32, "{}", report.counters.len());
            }
            Step::Completes { is_user } => self.pmu.completes_instruction(|| *is_user),
            Step::Block { word, value } => {
                self.vcpu.words.store(usize::from(*word) % (ebb::SIZE / 8), value.get());
            }
            Step::Thread { has_block, is_user } => {
                self.vcpu.thread = has_block.then_some(*is_user);
            }
        }
        // Not every step ends with an exit; what it cost is not the next exit's.
        self.check_calls();
    }
}

/// Returns a policy that limits interrupts.
fn rules() -> Rules {
    Rules { tier: 0, rule: 0, min_period: 0, max_interrupts: 20, freeze: 0, on_starvation: 0 }
}

/// Restores a saved PMU of each model, which is refused or does what one does whose guest has written the same. What is
/// saved of it then is restored again and again as it is.
pub fn restored(state: &PmuState) {
    let models = [
        Model::K7,
        Model::Core,
        Model::V2(3),
        Model::Intel { is_v5: false, general: 3, fixed: 2, absent: 0 },
        Model::Intel { is_v5: true, general: 7, fixed: 3, absent: 0 },
        Model::Riscv { programmable: 3, overflows: true },
        Model::Riscv { programmable: 3, overflows: false },
    ];
    for model in models {
        let input = Input { model, is_host_intel: false, has_page: true, policy: rules(), steps: Vec::new() };
        let mut machine = Machine::new(&input);
        if machine.pmu.restore(state).is_err() {
            continue;
        }
        let saved = machine.pmu.save();
        let mut again = Machine::new(&input);
        assert_eq!(again.pmu.restore(&saved), Ok(()), "what was saved is refused");
        assert_eq!(again.pmu.save(), saved, "restoring changes what is saved");
        machine.after_exit(Cause::Guest);
        for register in 0..32 {
            machine.step(&Step::Read(Register::Known(register)));
            machine.step(&Step::Run { counts: 1000, times: 2 });
            machine.step(&Step::Time { microseconds: 1000, is_kicked: false });
        }
        for register in 0..32 {
            machine.step(&Step::Write(Register::Known(register), Value::Any(0)));
            machine.step(&Step::Run { counts: 1000, times: 1 });
        }
        let saved = machine.pmu.save();
        assert_eq!(Machine::new(&input).pmu.restore(&saved), Ok(()), "what was saved is refused");
    }
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(input) = crate::parse::<Input>(data) else { return };
    let mut machine = Machine::new(&input);
    for step in &input.steps {
        machine.step(step);
    }
}
