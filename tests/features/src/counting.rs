//! Counting counters: that they count, what they can count, and in which modes of the processor.

use std::fs;
use std::ptr;

use perf_event_open_sys::bindings;

use crate::code::{self, READ_SIGNAL, READS_SWITCH, SWITCHED_WITHIN, branches, instructions};
use crate::event::{Codes, Counter, Event, over_all, values};
use crate::failure::{Failure, Verdict, checked, equal, within};
use crate::ring::Ring;
use crate::worker::in_child;

/// A counter counts each instruction, however many there are.
pub fn counting() -> Verdict {
    let counter = Event::instructions().open()?;
    let mut expected = 0;
    for rounds in [1, 1000, 5_000_000] {
        counter.over(rounds)?;
        expected += instructions(rounds);
        equal("instructions", counter.value()?, expected)?;
    }
    Ok(format!("{expected} instructions"))
}

const PAGES: usize = 16;
const CALLS: u64 = 100;

/// Hardware, raw, cache, software events and tracepoints count beside each other.
pub fn kinds() -> Verdict {
    let rounds = 1_000_000;
    let codes = Codes::own()?;
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
    over_all(rounds)?;
    equal("hardware and raw events", values(&hardware)?, expected)?;
    equal("page faults in a loop", faults.value()?, 0)?;
    equal("system calls in a loop, with the one behind it", calls.value()?, 1)?;
    fault_and_call(&faults, &calls)?;
    let (faults, calls) = (faults.value()?, calls.value()?);
    equal("page faults", faults, PAGES as u64)?;
    equal("system calls", calls, 1 + CALLS + 1)?;
    Ok(format!("{all} instructions, {some} branches, {faults} page faults, {calls} system calls"))
}

/// Counters of all kinds are switched as one group, which a software event may lead.
pub fn kinds_in_a_group() -> Verdict {
    let rounds = 1_000_000;
    let leader = Event::software(bindings::PERF_COUNT_SW_PAGE_FAULTS).open()?;
    let calls = join(Event::tracepoint("raw_syscalls/sys_enter")?, &leader)?;
    let all = join(Event::instructions(), &leader)?;
    let some = join(Event::raw(Codes::own()?.branches), &leader)?;
    leader.over(rounds)?;
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

/// Touches pages for the first time and makes system calls, with the two counters switched on.
fn fault_and_call(faults: &Counter, calls: &Counter) -> Result<(), Failure> {
    let (length, access) = (PAGES * 4096, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses a place that is free.
    let area = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
    if area == libc::MAP_FAILED {
        return Err(Failure::last("map memory"));
    }
    // SAFETY: it is our own memory. A huge page would fault once.
    let result = unsafe { libc::madvise(area, length, libc::MADV_NOHUGEPAGE) };
    checked("ask for small pages", result)?;
    faults.enable()?;
    for page in 0..PAGES {
        // SAFETY: the address is in the area.
        unsafe { ptr::write_volatile(area.cast::<u8>().wrapping_add(page * 4096), 1) };
    }
    faults.disable()?;
    calls.enable()?;
    for _ in 0..CALLS {
        // SAFETY: takes nothing and changes nothing.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    calls.disable()
}

/// User mode and the kernel are counted apart, and together they are everything.
pub fn modes() -> Verdict {
    let rounds = 1_000_000;
    let event = |user: u64, kernel: u64| {
        Event::instructions().with(|attr| {
            attr.set_exclude_user(1 - user);
            attr.set_exclude_kernel(1 - kernel);
        })
    };
    // In a group all are switched at once, or as soon after each other as the processor's PMU allows.
    let user = event(1, 0).open()?;
    let (kernel, both, neither) =
        (join(event(0, 1), &user)?, join(event(1, 1), &user)?, join(event(0, 0), &user)?);
    user.over(rounds)?;
    let (user, kernel, both) = (user.value()?, kernel.value()?, both.value()?);
    equal("in user mode", user, instructions(rounds))?;
    within("in the kernel", kernel, 1..rounds)?;
    within("in both, beside the sum", both.abs_diff(user + kernel), ..=SWITCHED_WITHIN)?;
    equal("in neither", neither.value()?, 0)?;
    Ok(format!("{user} in user mode, {kernel} in the kernel, {both} in both"))
}

/// What x86 has no separate count for may be left out, and nothing is missing.
pub fn hypervisor_and_idle() -> Verdict {
    let rounds = 1_000_000;
    let counter = Event::instructions()
        .with(|attr| {
            attr.set_exclude_hv(1);
            attr.set_exclude_idle(1);
        })
        .open()?;
    counter.over(rounds)?;
    equal("instructions", counter.value()?, instructions(rounds))?;
    Ok(format!("{} instructions", counter.value()?))
}

/// A machine that runs no guests has nothing to count when it leaves itself out.
pub fn exclude_host() -> Verdict {
    let counter = Event::instructions().with(|attr| attr.set_exclude_host(1)).open()?;
    counter.over(1_000_000)?;
    equal("instructions of guests", counter.value()?, 0)?;
    Ok("0 instructions of guests".into())
}

/// A machine that runs no guests loses nothing when it leaves them out.
pub fn exclude_guest() -> Verdict {
    let rounds = 1_000_000;
    let counter = Event::instructions().with(|attr| attr.set_exclude_guest(1)).open()?;
    counter.over(rounds)?;
    equal("instructions", counter.value()?, instructions(rounds))?;
    Ok(format!("{} instructions", counter.value()?))
}

/// Programs are told not to read counters themselves, and are killed if they do. Whoever runs this has switched it off.
pub fn rdpmc_is_off() -> Verdict {
    let setting = fs::read_to_string(READS_SWITCH)
        .map_err(|source| Failure::System { action: format!("read {READS_SWITCH}"), source })?;
    equal(READS_SWITCH, setting.trim(), "0")?;
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
    equal("the signal that ends a program that uses it", signal, Some(READ_SIGNAL))?;
    Ok(format!("cap_user_rdpmc 0; signal {READ_SIGNAL}"))
}
