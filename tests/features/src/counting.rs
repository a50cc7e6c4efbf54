//! Counting: exact counts, kinds of events, and modes of the processor.

use std::fs;
use std::ptr;

use perf_event_open_sys::bindings;

use crate::code::Codes;
use crate::code::{self, DIRECT_READ_SETTING, DIRECT_READ_SIGNAL, GROUP_SKEW, branches, instructions};
use crate::event::{Counter, Event, count_loop_with_all, values};
use crate::failure::{Failure, Verdict, checked, equal, within};
use crate::ring::Ring;
use crate::worker::in_child;

/// A counter counts each instruction, in short and in long runs.
pub fn counting() -> Verdict {
    let counter = Event::instructions().open()?;
    let mut expected = 0;
    for rounds in [1, 1000, 5_000_000] {
        counter.count_loop(rounds)?;
        expected += instructions(rounds);
        equal("instructions", counter.value()?, expected)?;
    }
    Ok(format!("{expected} instructions"))
}

/// Number of page faults that `fault_and_call` causes.
const PAGES: usize = 16;
/// Number of system calls that `fault_and_call` makes while calls are counted.
const CALLS: u64 = 100;

/// Hardware, raw, cache, software events and tracepoints count beside each other.
pub fn kinds() -> Verdict {
    let rounds = 1_000_000;
    let codes = Codes::of_this_processor()?;
    let (all, some) = (instructions(rounds), branches(rounds));
    let conditional = codes.conditional_branches.map(|code| (Event::raw(code), rounds));
    let (events, expected): (Vec<_>, Vec<_>) = [
        (Event::instructions(), all),
        (Event::branches(), some),
        (Event::raw(codes.instructions), all),
        (Event::raw(codes.branches), some),
    ]
    .into_iter()
    .chain(conditional)
    .unzip();
    let hardware = events.iter().map(Event::open).collect::<Result<Vec<_>, _>>()?;
    let faults = Event::software(bindings::PERF_COUNT_SW_PAGE_FAULTS).open()?;
    let calls = Event::tracepoint("raw_syscalls/sys_enter")?.open()?;
    count_loop_with_all(rounds)?;
    equal("hardware and raw events", values(&hardware)?, expected)?;
    equal("page faults in a loop", faults.value()?, 0)?;
    equal("system calls of a loop, with the one after it", calls.value()?, 1)?;
    fault_and_call(&faults, &calls)?;
    let (faults, calls) = (faults.value()?, calls.value()?);
    equal("page faults", faults, PAGES as u64)?;
    equal("system calls", calls, 1 + CALLS + 1)?;
    Ok(format!("{all} instructions, {some} branches, {faults} page faults, {calls} system calls"))
}

/// Events of all kinds can be one group, with a software event as its leader.
pub fn kinds_in_a_group() -> Verdict {
    let rounds = 1_000_000;
    let leader = Event::software(bindings::PERF_COUNT_SW_PAGE_FAULTS).open()?;
    let calls = join(Event::tracepoint("raw_syscalls/sys_enter")?, &leader)?;
    let all = join(Event::instructions(), &leader)?;
    let some = join(Event::raw(Codes::of_this_processor()?.branches), &leader)?;
    leader.count_loop(rounds)?;
    equal("page faults", leader.value()?, 0)?;
    equal("system calls", calls.value()?, 1)?;
    equal("instructions", all.value()?, instructions(rounds))?;
    equal("branches", some.value()?, branches(rounds))?;
    let times = |counter: &Counter| counter.counts().map(|counts| (counts.enabled, counts.running));
    let whole = times(&leader)?;
    for member in [&calls, &all, &some] {
        equal("times of a member", times(member)?, whole)?;
    }
    Ok(format!("{} instructions beside a software event that leads", all.value()?))
}

fn join(event: Event, leader: &Counter) -> Result<Counter, Failure> {
    event.open_with(leader).map_err(|source| Failure::System { action: "join a group".into(), source })
}

/// Touches pages for the first time while `faults` counts, then makes system calls while `calls` counts.
fn fault_and_call(faults: &Counter, calls: &Counter) -> Result<(), Failure> {
    let (length, access) = (PAGES * 4096, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses a free range of addresses.
    let area = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
    if area == libc::MAP_FAILED {
        return Err(Failure::last("map memory"));
    }
    // A huge page would fault only once.
    // SAFETY: the range has just been mapped, and nothing uses it yet.
    let result = unsafe { libc::madvise(area, length, libc::MADV_NOHUGEPAGE) };
    checked("ask for small pages", result)?;
    faults.enable()?;
    for page in 0..PAGES {
        // SAFETY: the address is in the mapping, which is writable.
        unsafe { ptr::write_volatile(area.cast::<u8>().wrapping_add(page * 4096), 1) };
    }
    faults.disable()?;
    calls.enable()?;
    for _ in 0..CALLS {
        // SAFETY: the call takes no arguments and changes nothing.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    calls.disable()
}

/// User mode and the kernel are counted separately, and the two counts add up to the count of both.
pub fn modes() -> Verdict {
    let rounds = 1_000_000;
    let event = |user: u64, kernel: u64| {
        Event::instructions().with(|attr| {
            attr.set_exclude_user(1 - user);
            attr.set_exclude_kernel(1 - kernel);
        })
    };
    // A group's counters are enabled and disabled at the same time, or one right after the other (`GROUP_SKEW`).
    let user = event(1, 0).open()?;
    let (kernel, both, neither) =
        (join(event(0, 1), &user)?, join(event(1, 1), &user)?, join(event(0, 0), &user)?);
    user.count_loop(rounds)?;
    let (user, kernel, both) = (user.value()?, kernel.value()?, both.value()?);
    equal("in user mode", user, instructions(rounds))?;
    within("in the kernel", kernel, 1..rounds)?;
    within("difference of both from the sum", both.abs_diff(user + kernel), ..=GROUP_SKEW)?;
    equal("in neither", neither.value()?, 0)?;
    Ok(format!("{user} in user mode, {kernel} in the kernel, {both} in both"))
}

/// `exclude_hv` and `exclude_idle` are accepted, and change nothing where the PMU does not tell these apart.
pub fn hypervisor_and_idle() -> Verdict {
    let rounds = 1_000_000;
    let counter = Event::instructions()
        .with(|attr| {
            attr.set_exclude_hv(1);
            attr.set_exclude_idle(1);
        })
        .open()?;
    counter.count_loop(rounds)?;
    equal("instructions", counter.value()?, instructions(rounds))?;
    Ok(format!("{} instructions", counter.value()?))
}

/// On a machine that runs no guests, `exclude_host` leaves nothing to count.
pub fn exclude_host() -> Verdict {
    let counter = Event::instructions().with(|attr| attr.set_exclude_host(1)).open()?;
    counter.count_loop(1_000_000)?;
    equal("instructions of guests", counter.value()?, 0)?;
    Ok("0 instructions of guests".into())
}

/// On a machine that runs no guests, `exclude_guest` changes nothing.
pub fn exclude_guest() -> Verdict {
    let rounds = 1_000_000;
    let counter = Event::instructions().with(|attr| attr.set_exclude_guest(1)).open()?;
    counter.count_loop(rounds)?;
    equal("instructions", counter.value()?, instructions(rounds))?;
    Ok(format!("{} instructions", counter.value()?))
}

/// While direct reads are forbidden, the counter's page says so, and a signal ends a program that reads a counter
/// directly. The caller of this program has forbidden them.
pub fn rdpmc_is_off() -> Verdict {
    let setting = fs::read_to_string(DIRECT_READ_SETTING)
        .map_err(|source| Failure::System { action: format!("read {DIRECT_READ_SETTING}"), source })?;
    equal(DIRECT_READ_SETTING, setting.trim(), "0")?;
    let counter = Event::instructions().open()?;
    let ring = Ring::map(&counter, 0)?;
    counter.enable()?;
    let page = ring.page();
    // SAFETY: all fields of the union are numbers.
    let capabilities = unsafe { page.__bindgen_anon_1.__bindgen_anon_1 };
    equal("cap_user_rdpmc", capabilities.cap_user_rdpmc(), 0)?;
    let status = in_child(|| {
        code::read_counter_zero();
        0
    })?;
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    equal("the signal that ends a program that reads a counter", signal, Some(DIRECT_READ_SIGNAL))?;
    Ok(format!("cap_user_rdpmc 0; signal {DIRECT_READ_SIGNAL}"))
}
