//! A kernel that makes its calls on the shared page, beside one whose calls all exit: both see the same.

use std::convert::Infallible;
use std::mem::offset_of;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use proptest::prelude::*;
use vpmu::event::Filter;
use vpmu::model::riscv::{OVERFLOWS, Shape};
use vpmu::sbi_page::{NO_TRAP, OVERFLOW, Page, Shared};
use vpmu::shared_page::LvtNote;
use vpmu::source::script::Script;
use vpmu::{Access, Cause, Injected, Outcome, Platform, VirtualPmu};

use super::*;
use crate::riscv::code::far_call;
use crate::riscv::encode::jump;
use machine::Outside;

const SECTION: usize = 2 << 20;
const SHAPE: Shape = Shape { programmable: 6, overflows: true };
/// The programmable counters.
const ALL: u64 = 0b1_1111_1000;

const CONFIG: u64 = 2;
const START: u64 = 3;
const STOP: u64 = 4;

/// Address of the structure of the current task, and the offset in it of the CPU's number.
const TASK: u64 = 0xffff_ffd8_0123_4000;
const CPU: u32 = 32;
const CPU_NUMBER: u8 = 1;
const SCAUSE: u32 = 0x142;
const SSTATUS: u32 = 0x100;
/// A system call of a program, and a timer interrupt.
const SYSTEM_CALL: u64 = 8;
const TIMER: u64 = 1 << 63 | 5;
const COUNTERS: std::ops::Range<u32> = 3..9;

/// Builds a kernel with everything that the shared page needs. Returns it and the offset of a call.
fn kernel() -> (Vec<u8>, usize, [usize; 2]) {
    let mut kernel = KernelBuilder::new(&ORDER);
    let ecall = kernel.others(300).here();
    // The kernel's function for SBI calls.
    kernel.word(0x73).word(RET_WORD);
    kernel.others(300);
    for _ in 0..200 {
        // LW a5, 32(tp); LW a4, 8(tp); SW a4, 8(tp).
        kernel.word(CPU << 20 | 0x2_2783).word(0x0082_2703).word(0x00e2_2423);
    }
    kernel.id(Register::A7, 4);
    let at = kernel.here();
    for word in far_call(at, ecall).unwrap() {
        kernel.word(word);
    }
    let switch = kernel.others(300).short(SHORT_RET).switch(&CSRS, true);
    let overflow = kernel.others(300).read_overflows(13);
    kernel.others(100).short(SHORT_RET);
    let mut image = kernel.image;
    image.resize(SECTION, 0);
    image[16..24].copy_from_slice(&(SECTION as u64 + 4096).to_le_bytes());
    (image, at, [switch, overflow])
}

/// The kernel after it was changed.
struct Changed {
    image: Vec<u8>,
    call: usize,
    sites: [usize; 2],
    pages: u64,
}

static KERNEL: LazyLock<Changed> = LazyLock::new(|| {
    let (mut image, call, sites) = kernel();
    let pages = retarget(&mut image, 2).unwrap().pages.expect("there is room for it");
    assert!(pages > SECTION as u64 + 4096 && pages + 2 * Page::STRIDE as u64 <= 2 * SECTION as u64);
    Changed { image, call, sites, pages }
});

const RET_WORD: u32 = 0x0000_8067;

/// A vCPU of the host.
struct Vcpu {
    pmu: VirtualPmu<Script>,
    host: Script,
    is_interrupted: bool,
    exits: usize,
}

struct Interrupts<'a>(&'a mut bool);

impl Platform for Interrupts<'_> {
    type Error = Infallible;

    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        *self.0 = true;
        Ok(Injected::Pending)
    }
}

impl Vcpu {
    fn new() -> Self {
        let host = Script::default();
        Self { pmu: VirtualPmu::riscv(SHAPE, host.clone()), host, is_interrupted: false, exits: 0 }
    }

    fn exits(&mut self, cause: Cause) {
        self.exits += 1;
        let Ok(_) = self.pmu.after_exit(cause, &mut Interrupts(&mut self.is_interrupted));
    }

    /// Handles an exit by an SBI call. Returns error and value.
    fn call(&mut self, function: u64, arguments: [u64; 6]) -> [u64; 2] {
        let result = match function {
            READ_COUNTER | READ_OVERFLOWS => {
                let csr =
                    if function == READ_OVERFLOWS { OVERFLOWS } else { u32::try_from(arguments[0]).unwrap() };
                let Outcome::Value(value) = self.pmu.access(Access::Read(csr)) else { panic!("{csr:#x}") };
                [0, value]
            }
            _ => {
                let answer = self.pmu.call(function, arguments);
                [answer.error.cast_unsigned(), answer.value]
            }
        };
        self.exits(Cause::Guest);
        result
    }
}

/// What the emulated processor sees of the host.
struct OutsideGuest<'a> {
    vcpu: &'a mut Vcpu,
    page: &'static Page,
    /// Address of the page.
    address: u64,
}

impl OutsideGuest<'_> {
    fn word(&self, address: u64) -> Option<&'static AtomicU64> {
        let offset = usize::try_from(address.checked_sub(self.address)?).ok()?;
        word(self.page, offset)
    }
}

/// Returns the word of the page at an offset.
fn word(page: &'static Page, offset: usize) -> Option<&'static AtomicU64> {
    // SAFETY: the page consists of these words.
    let words: &[AtomicU64; size_of::<Page>() / 8] = unsafe { &*std::ptr::from_ref(page).cast() };
    assert!(offset.is_multiple_of(8));
    words.get(offset / 8)
}

impl Outside for OutsideGuest<'_> {
    fn load(&mut self, address: u64) -> u64 {
        if address == TASK + u64::from(CPU) {
            return 0x1234_5678_0000_0000 | u64::from(CPU_NUMBER);
        }
        self.word(address).expect("it is on the page").load(Relaxed)
    }

    fn store(&mut self, address: u64, value: u64) -> bool {
        self.word(address).map(|word| word.store(value, Relaxed)).is_some()
    }

    fn call(&mut self, registers: &mut [u64; 32]) -> bool {
        assert_eq!(registers[17], EXTENSION);
        let arguments = std::array::from_fn(|argument| registers[10 + argument]);
        [registers[10], registers[11]] = self.vcpu.call(registers[16], arguments);
        true
    }
}

/// How the kernel reaches its PMU.
enum Route {
    /// Every call exits.
    Direct,
    /// By the code that was added to it.
    Stub { image: &'static [u8], call: usize, sites: [usize; 2], page: &'static Page, pages: u64, cause: u64 },
}

/// A guest's kernel, with what it knows of its counters.
struct Guest {
    vcpu: Vcpu,
    route: Route,
    /// The counters that it has configured, and those that run.
    used: u64,
    running: u64,
    programs_ran: u64,
    /// Everything that it has seen.
    seen: Vec<u64>,
}

const PERIOD: u64 = 10_000;

impl Guest {
    fn direct() -> Self {
        Self::new(Vcpu::new(), Route::Direct)
    }

    fn with_page() -> Self {
        let Changed { image, call, sites, pages } = &*KERNEL;
        let (call, sites, pages) = (*call, *sites, *pages);
        let page: &'static Page = Box::leak(Box::default());
        let mut vcpu = Vcpu::new();
        vcpu.pmu.share_sbi_page(Shared { memory: Box::new(page), number: CPU_NUMBER });
        Self::new(vcpu, Route::Stub { image, call, sites, page, pages, cause: SYSTEM_CALL })
    }

    fn new(vcpu: Vcpu, route: Route) -> Self {
        Self { vcpu, route, used: 0, running: 0, programs_ran: 0, seen: Vec::new() }
    }

    /// The kernel is entered by a trap.
    fn traps(&mut self, with: u64) {
        if let Route::Stub { cause, .. } = &mut self.route {
            *cause = with;
        }
    }

    /// Runs code of the kernel from an offset to another, or to its return.
    fn runs(&mut self, from: usize, to: Option<usize>, set: &[(usize, u64)]) -> [u64; 32] {
        const INTERRUPTS_ENABLED: u64 = 0x8000_0000_0000_0002;
        let Route::Stub { image, page, pages, cause, .. } = &mut self.route else { unreachable!() };
        let mut machine = Machine::new(image, BASE);
        machine.registers[4] = TASK;
        machine.csrs.extend([(SCAUSE, *cause), (SSTATUS, INTERRUPTS_ENABLED)]);
        for (register, value) in set {
            machine.registers[*register] = *value;
        }
        let before = machine.registers;
        let address = BASE + *pages + u64::from(CPU_NUMBER) * Page::STRIDE as u64;
        machine.run_in(&mut OutsideGuest { vcpu: &mut self.vcpu, page, address }, from, to);
        // GP, TP, and what functions preserve.
        let kept = [2, 3, 4, 8, 9].into_iter().chain(18..28);
        assert!(kept.into_iter().all(|register| machine.registers[register] == before[register]));
        assert_eq!(machine.csrs[&SSTATUS], INTERRUPTS_ENABLED);
        *cause = machine.csrs[&SCAUSE];
        machine.registers
    }

    fn call(&mut self, function: u64, arguments: [u64; 5]) -> [u64; 2] {
        let [a0, a1, a2, a3, a4] = arguments;
        let result = match &self.route {
            Route::Direct => self.vcpu.call(function, [a0, a1, a2, a3, a4, 0]),
            Route::Stub { call, .. } => {
                let (from, to) = (*call, *call + 8);
                let registers = [
                    (10, a0),
                    (11, a1),
                    (12, a2),
                    (13, a3),
                    (14, a4),
                    (15, 0),
                    (16, function),
                    (17, EXTENSION),
                ];
                let after = self.runs(from, Some(to), &registers);
                [after[10], after[11]]
            }
        };
        self.seen.extend([0xca11, function, result[0], result[1]]);
        result
    }

    fn reads(&mut self, counter: u32) -> u64 {
        let csr = 0xc00 + counter;
        let value = match &self.route {
            Route::Direct => self.vcpu.call(READ_COUNTER, [csr.into(), 0, 0, 0, 0, 0])[1],
            Route::Stub { sites: [switch, _], .. } => {
                let pair = CSRS.iter().position(|known| u32::from(*known) == csr).unwrap();
                let from = switch + 6 * pair;
                self.runs(from, None, &[])[10]
            }
        };
        self.seen.extend([0x4ead, value]);
        value
    }

    fn overflows(&mut self) -> u64 {
        let value = match &self.route {
            Route::Direct => self.vcpu.call(READ_OVERFLOWS, [0; 6])[1],
            Route::Stub { sites: [_, overflow], .. } => {
                let from = *overflow;
                self.runs(from, Some(from + 4), &[])[13]
            }
        };
        self.seen.extend([0x0f10, value]);
        value
    }

    fn configures(&mut self, flags: u64, event: u64) -> Option<u64> {
        let [error, counter] = self.call(CONFIG, [0, ALL, flags, event, 0]);
        if error != 0 {
            return None;
        }
        self.used |= 1 << counter;
        Some(counter)
    }

    fn starts(&mut self, counter: u64, value: u64) {
        if self.call(START, [counter, 1, 1, value, 0])[0] == 0 {
            self.running |= 1 << counter;
        }
    }

    fn stops(&mut self, set: u64, resets: bool) {
        self.call(STOP, [0, set, resets.into(), 0, 0]);
        self.running &= !set;
        if resets {
            self.used &= !set;
        }
    }

    /// Runs programs, which are interrupted.
    fn programs_run(&mut self, counts: u64) {
        self.traps(SYSTEM_CALL);
        let mut left = counts;
        while left > 0 {
            // A count at a time would be slow; an alarm never comes later than it expires.
            let step = left.min(64);
            left -= step;
            self.programs_ran += step;
            self.vcpu.host.time_passes(Duration::from_nanos(10 * step));
            let mut alarms = 0;
            self.vcpu.host.clone().guest_runs_in(Filter::User, step, || alarms += 1);
            if alarms > 0 {
                self.vcpu.exits(Cause::Alarm);
            }
            if std::mem::take(&mut self.vcpu.is_interrupted) {
                self.seen.extend([0x1e4, self.programs_ran]);
                self.traps(OVERFLOW);
                self.handles_overflow();
                self.traps(SYSTEM_CALL);
            }
        }
    }

    /// Handles an overflow as Linux does (`pmu_sbi_ovf_handler`).
    fn handles_overflow(&mut self) {
        let (used, running) = (self.used, self.running);
        if used == 0 {
            return;
        }
        self.call(STOP, [0, used, 0, 0, 0]);
        let overflowed = self.overflows() & used;
        let over: Vec<_> = COUNTERS
            .filter(|counter| overflowed & 1 << counter != 0)
            .map(|counter| (counter, self.reads(counter)))
            .collect();
        let others = running & !overflowed;
        self.call(START, [0, others, 0, 0, 0]);
        for (counter, over) in over.into_iter().filter(|(counter, _)| running & 1 << counter != 0) {
            self.call(START, [counter.into(), 1, 1, over.min(PERIOD - 1).wrapping_sub(PERIOD), 0]);
        }
    }

    /// Runs the kernel.
    fn kernel_runs(&mut self, counts: u64) {
        let mut alarms = 0;
        self.vcpu.host.clone().guest_runs_in(Filter::Kernel, counts, || alarms += 1);
        if alarms > 0 {
            self.vcpu.exits(Cause::Alarm);
        }
    }

    /// What the counters are when all stand still.
    fn end(&mut self) -> Vec<u64> {
        self.stops(ALL, false);
        for counter in COUNTERS {
            self.reads(counter);
        }
        self.overflows();
        std::mem::take(&mut self.seen)
    }
}

const NOT_IN_THE_KERNEL: u64 = 1 << 6;
const CLEAR_VALUE: u64 = 1 << 1;
const CYCLES: u64 = 1;
const INSTRUCTIONS: u64 = 2;
const BRANCHES: u64 = 5;

/// What happens in a guest.
#[derive(Debug, Clone)]
enum Step {
    Configure { in_kernel: bool, event: u64 },
    Start { counter: u64, value: u64 },
    Resume { set: u64 },
    Stop { set: u64, resets: bool },
    Read { counter: u32 },
    Overflows,
    Programs(u64),
    Kernel(u64),
    Trap,
    Switch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let value = prop_oneof![
        Just(PERIOD.wrapping_neg()),
        (1..50_000_u64).prop_map(u64::wrapping_neg),
        Just(1 << 63),
        any::<u64>(),
    ];
    let step = prop_oneof![
        3 => (any::<bool>(), prop_oneof![Just(INSTRUCTIONS), Just(BRANCHES)])
            .prop_map(|(in_kernel, event)| Step::Configure { in_kernel, event }),
        4 => (3..9_u64, value).prop_map(|(counter, value)| Step::Start { counter, value }),
        1 => (0..=ALL).prop_map(|set| Step::Resume { set }),
        3 => (0..=ALL, any::<bool>()).prop_map(|(set, resets)| Step::Stop { set, resets }),
        2 => COUNTERS.prop_map(|counter| Step::Read { counter }),
        1 => Just(Step::Overflows),
        4 => (1..30_000_u64).prop_map(Step::Programs),
        2 => (1..300_u64).prop_map(Step::Kernel),
        1 => Just(Step::Trap),
        2 => Just(Step::Switch),
    ];
    prop::collection::vec(step, 0..80)
}

impl Guest {
    fn does(&mut self, step: &Step) {
        match *step {
            Step::Configure { in_kernel, event } => {
                // The code for the page adds instructions of the kernel, which are not counted here.
                let (flags, event) =
                    if in_kernel { (CLEAR_VALUE, BRANCHES) } else { (NOT_IN_THE_KERNEL, event) };
                self.configures(flags, event);
            }
            Step::Start { counter, value } => self.starts(counter, value),
            Step::Resume { set } => {
                if self.call(START, [0, set & ALL & self.used, 0, 0, 0])[0] == 0 {
                    self.running |= set & ALL & self.used;
                }
            }
            Step::Stop { set, resets } => self.stops(set & ALL, resets),
            Step::Read { counter } => {
                self.reads(counter);
            }
            Step::Overflows => {
                self.overflows();
            }
            Step::Programs(counts) => self.programs_run(counts),
            Step::Kernel(counts) => self.kernel_runs(counts),
            Step::Trap => self.traps(TIMER),
            Step::Switch => self.switches_tasks(),
        }
        // Overflows in the kernel are handled with the next interrupt.
        if std::mem::take(&mut self.vcpu.is_interrupted) {
            self.traps(OVERFLOW);
            self.handles_overflow();
        }
    }

    /// Stops the running counters of a task and starts those of another, as Linux does.
    fn switches_tasks(&mut self) {
        let before = self.running;
        let mut values = Vec::new();
        for counter in COUNTERS.filter(|counter| before & 1 << counter != 0) {
            self.call(STOP, [counter.into(), 1, 0, 0, 0]);
            values.push(self.reads(counter));
            self.call(STOP, [counter.into(), 1, 1, 0, 0]);
            self.kernel_runs(20);
        }
        (self.running, self.used) = (0, self.used & !before);
        self.kernel_runs(100);
        for (value, event) in values.into_iter().zip([INSTRUCTIONS, BRANCHES].into_iter().cycle()) {
            if let Some(counter) = self.configures(NOT_IN_THE_KERNEL, event) {
                self.starts(counter, value);
            }
        }
    }
}

/// Runs the steps in a guest with the page and in one without. Returns what each has seen.
fn both(steps: &[Step]) -> [Vec<u64>; 2] {
    [Guest::direct(), Guest::with_page()].map(|mut guest| {
        for step in steps {
            guest.does(step);
        }
        guest.end()
    })
}

#[test]
fn a_sample_of_a_program_is_one_exit_and_a_task_switch_two_for_each_counter_at_most() {
    let mut guest = Guest::with_page();
    let counter = guest.configures(NOT_IN_THE_KERNEL, INSTRUCTIONS).unwrap();
    guest.starts(counter, PERIOD.wrapping_neg());
    guest.programs_run(10 * PERIOD);
    let before = guest.vcpu.exits;
    guest.programs_run(10 * PERIOD);
    assert_eq!(guest.vcpu.exits - before, 10);
    let interrupts = guest.seen.iter().filter(|seen| **seen == 0x1e4).count();
    assert_eq!(interrupts, 20);

    for (flags, exits) in [(NOT_IN_THE_KERNEL, 1), (0, 2)] {
        let mut guest = Guest::with_page();
        let switch = |guest: &mut Guest| {
            guest.traps(TIMER);
            let before = guest.vcpu.exits;
            guest.call(STOP, [3, 1, 0, 0, 0]);
            let value = guest.reads(3);
            guest.call(STOP, [3, 1, 1, 0, 0]);
            guest.kernel_runs(1000);
            assert_eq!(guest.call(CONFIG, [0, ALL, flags, INSTRUCTIONS, 0]), [0, 3]);
            guest.call(START, [3, 1, 1, value, 0]);
            guest.vcpu.exits - before
        };
        guest.configures(flags, INSTRUCTIONS);
        guest.starts(3, 1 << 62);
        switch(&mut guest);
        assert_eq!(switch(&mut guest), exits, "{flags:#x}");
    }
}

#[test]
fn counters_of_cycles_go_with_the_counter_before_them() {
    let mut guest = Guest::with_page();
    for event in [INSTRUCTIONS, CYCLES] {
        let counter = guest.configures(0, event).unwrap();
        guest.starts(counter, 1 << 62);
    }
    let before = guest.vcpu.exits;
    for counter in [3, 4] {
        guest.kernel_runs(10);
        guest.call(STOP, [counter, 1, 0, 0, 0]);
        guest.call(STOP, [counter, 1, 1, 0, 0]);
    }
    for (counter, event) in [(3, INSTRUCTIONS), (4, CYCLES)] {
        guest.kernel_runs(10);
        assert_eq!(guest.call(CONFIG, [0, ALL, 0, event, 0]), [0, counter]);
        guest.call(START, [counter, 1, 1, 1 << 62, 0]);
    }
    assert_eq!(guest.vcpu.exits - before, 2);
    guest.kernel_runs(100);
    guest.traps(TIMER);
    guest.stops(ALL, false);
    assert_eq!([guest.reads(3), guest.reads(4)], [(1 << 62) + 110; 2], "as if they had started together");
}

#[test]
fn after_a_read_of_one_counter_the_page_shows_what_others_of_its_event_have_counted() {
    let steps: Vec<_> = [false, false, true, false, false, false]
        .map(|in_kernel| Step::Configure { in_kernel, event: INSTRUCTIONS })
        .into_iter()
        .chain([
            Step::Start { counter: 3, value: PERIOD.wrapping_neg() },
            Step::Start { counter: 5, value: PERIOD.wrapping_neg() },
            Step::Start { counter: 6, value: (2 * PERIOD - 1).wrapping_neg() },
            Step::Switch,
            Step::Programs(PERIOD - 15),
            Step::Read { counter: 3 },
            Step::Configure { in_kernel: false, event: INSTRUCTIONS },
        ])
        .collect();
    let [direct, with_page] = both(&steps);
    assert_eq!(direct, with_page);
}

#[test]
fn a_counter_that_was_configured_on_the_page_and_reset_by_an_exit_keeps_its_value_there() {
    let [direct, with_page] = [Guest::direct(), Guest::with_page()].map(|mut guest| {
        for event in [BRANCHES, INSTRUCTIONS] {
            guest.configures(NOT_IN_THE_KERNEL, event).unwrap();
        }
        guest.starts(4, 1 << 62);
        guest.stops(1 << 4, true);
        guest.starts(3, 1 << 62);
        guest.configures(NOT_IN_THE_KERNEL, INSTRUCTIONS).unwrap();
        guest.starts(4, 1 << 61);
        guest.programs_run(1);
        guest.stops(1 << 4, true);
        guest.end()
    });
    assert_eq!(direct, with_page);
}

#[test]
fn another_kernel_in_the_memory_of_the_page_is_left_alone() {
    let mut guest = Guest::with_page();
    let counter = guest.configures(NOT_IN_THE_KERNEL, INSTRUCTIONS).unwrap();
    guest.starts(counter, PERIOD.wrapping_neg());
    let Route::Stub { page, .. } = guest.route else { unreachable!() };
    for offset in (0..size_of::<Page>()).step_by(8) {
        word(page, offset).unwrap().store(0x5555, Relaxed);
    }
    guest.vcpu.host.clone().guest_runs_in(Filter::User, PERIOD, || ());
    guest.vcpu.exits(Cause::Alarm);
    assert!(guest.vcpu.is_interrupted);
    for offset in (0..size_of::<Page>()).step_by(8) {
        assert_eq!(word(page, offset).unwrap().load(Relaxed), 0x5555, "{offset:#x}");
    }
    // Its calls do not announce the page.
    guest.route = Route::Direct;
    guest.handles_overflow();
    assert_eq!(page.active.load(Relaxed), 0x5555);
}

#[test]
fn a_kernel_without_room_for_it_gets_no_page() {
    let (image, at, _) = kernel();
    let without = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut image = image.clone();
        change(&mut image);
        retarget(&mut image, 2).unwrap().pages
    };
    assert!(without(&|_| ()).is_some());
    // Something in the padding, no memory behind the kernel, and a call of another function.
    assert_eq!(without(&|image| image[SECTION - 5000] = 1), None);
    assert_eq!(without(&|image| image[16..24].copy_from_slice(&(2 * SECTION as u64).to_le_bytes())), None);
    assert_eq!(
        without(&|image| image[at..at + 4].copy_from_slice(&jump(at, at + 8).unwrap().to_le_bytes())),
        None
    );
}

proptest! {
    #[test]
    fn a_kernel_with_the_page_sees_what_it_sees_without(steps in steps()) {
        let [direct, with_page] = both(&steps);
        prop_assert_eq!(direct, with_page);
    }

    #[test]
    fn whatever_is_written_to_the_page_the_vmm_goes_on(
        steps in steps(),
        writes in prop::collection::vec((0..size_of::<Page>() / 8, prop_oneof![any::<u64>(), 0..=ALL, Just(NO_TRAP)]), 1..60),
    ) {
        let mut guest = Guest::with_page();
        let mut writes = writes.into_iter().cycle();
        for step in &steps {
            guest.does(step);
            let Route::Stub { page, .. } = guest.route else { unreachable!() };
            for (index, value) in writes.by_ref().take(3) {
                // The VMM would take the page back otherwise.
                if ![offset_of!(Page, active), offset_of!(Page, tail_guard)].contains(&(index * 8)) {
                    word(page, index * 8).unwrap().store(value, Relaxed);
                }
            }
            page.changed.store(1, Relaxed);
            guest.vcpu.exits(Cause::Kick);
        }
        guest.end();
        let report = guest.vcpu.pmu.report();
        prop_assert_eq!(report.counters.len(), 9);
    }
}
