//! Targets of counters: a task, a CPU, a task and its children.

use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings;

use crate::code::{self, PARENT_INSTRUCTIONS, child_instructions, instructions, run_in_child, spin};
use crate::event::{Counter, Event, Target, count_loop_with_all, values};
use crate::failure::{Failure, Verdict, equal, within};
use crate::worker::{Worker, this_thread};

/// 40 ms, if each instruction takes a nanosecond. In that time the scheduler switches tasks several times.
const ROUNDS: u64 = 20_000_000;
const TOTAL: u64 = instructions(ROUNDS);

/// A task's counter counts that task only.
pub fn per_task() -> Verdict {
    let worker = Worker::start();
    let counter = Event::instructions().open_for(Target::Task(worker.thread))?;
    counter.enable()?;
    spin(ROUNDS);
    counter.disable()?;
    let counts = counter.counts()?;
    equal("while another runs", (counts.value, counts.running), (0, 0))?;
    let (begin, end) = (counter.call(bindings::ENABLE, 0), counter.call(bindings::DISABLE, 0));
    worker.begin(move || code::run(begin, ROUNDS, end).map(drop));
    spin(ROUNDS);
    worker.finish()?;
    equal("while both take turns", counter.value()?, TOTAL)?;
    Ok(format!("{TOTAL} of one thread beside another"))
}

/// A CPU's counter counts every task that runs there. Only this task and its worker run.
pub fn per_cpu() -> Verdict {
    // SAFETY: the argument is a number.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    let open = |cpu: i64| {
        Event::instructions()
            .open_for(Target::Cpu(i32::try_from(cpu).expect("a CPU's number fits into 32 bits")))
    };
    let of_cpus: Vec<Counter> = (0..cpus).map(open).collect::<Result<_, Failure>>()?;
    let worker = Worker::start();
    let of_tasks = [this_thread(), worker.thread]
        .map(|thread| Event::instructions().open_for(Target::Task(thread)))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    // The worker must run while all counters are enabled, and never while only some of them are.
    worker.begin(|| {
        thread::sleep(Duration::from_millis(10));
        spin(ROUNDS / 4);
        Ok(())
    });
    thread::sleep(Duration::from_millis(5));
    count_loop_with_all(ROUNDS)?;
    worker.finish()?;
    let tasks = values(&of_tasks)?;
    equal("this task", tasks[0], TOTAL)?;
    within("the other task", tasks[1], ROUNDS / 2..)?;
    let counted: u64 = values(&of_cpus)?.iter().sum();
    equal("the CPUs", counted, tasks.iter().sum())?;
    Ok(format!("{counted} on the CPUs, {tasks:?} in the tasks"))
}

/// An inherited counter counts children that are created later, and not threads that existed before.
pub fn inherited() -> Verdict {
    let rounds = 1_000_000;
    let worker = Worker::start();
    let counter = Event::instructions().inherited().open()?;
    run_in_child(counter.call(bindings::ENABLE, 0), rounds, counter.call(bindings::DISABLE, 0))?;
    let with_child = PARENT_INSTRUCTIONS + child_instructions(rounds);
    equal("parent and child", counter.value()?, with_child)?;
    worker.begin(|| {
        spin(ROUNDS);
        Ok(())
    });
    counter.count_loop(ROUNDS)?;
    worker.finish()?;
    equal("with a thread that existed before", counter.value()?, with_child + TOTAL)?;
    worker.end();
    Ok(format!("{with_child} with a child, {TOTAL} beside a thread"))
}

/// A counter that is not inherited does not count the children of its task.
pub fn not_inherited() -> Verdict {
    let counter = Event::instructions().open()?;
    run_in_child(counter.call(bindings::ENABLE, 0), 1_000_000, counter.call(bindings::DISABLE, 0))?;
    equal("the parent", counter.value()?, PARENT_INSTRUCTIONS)?;
    Ok(format!("{PARENT_INSTRUCTIONS} without the child"))
}
