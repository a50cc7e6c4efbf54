//! The sandbox of `tally run` on the lab's simulated host: the threads that only a Linux guest has. Other threads are
//! tested with bare-metal guests (`tests/sandbox.rs`).

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::program;
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![the_threads_that_serve_a_command_make_no_other_system_call]
}

/// Results of one step for each thread. No guest boots as far as its command.
static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let intrude = |thread: &str| {
        format!(
            "./tally run --sandbox on --flamegraph /tmp/out.svg -- true & tally=$!
             until [ \"$(cat /proc/$tally/task/*/comm | grep -c vcpu0)\" = 1 ] \
                 && ! grep -L '^Seccomp:.2' /proc/$tally/task/*/status | grep -q .; do sleep 0.01; done
             ./intrude $tally {thread} {} && wait $tally",
            libc::SYS_execve
        )
    };
    ["agent", "flamegraph"]
        .iter()
        .fold(Steps::new("sandbox").file(program("intrude"), "intrude"), |steps, thread| {
            steps.step(thread, &intrude(thread))
        })
        .run()
});

fn the_threads_that_serve_a_command_make_no_other_system_call() {
    for thread in ["agent", "flamegraph"] {
        let done = RESULTS.of(thread);
        let line = format!("tally: thread {thread}: the sandbox forbids the system call execve\n");
        assert_eq!((done.status, done.err.as_str()), (125, line.as_str()), "{}", done.text());
    }
}
