//! The system calls that each kind of thread makes while a guest runs.

use vpmu_perf::broker::calls as broker;

use super::filter::{Argument, Calls, Is};
use super::{Access, Reach, Thread};
use crate::arch::calls as arch;

/// Returns the list of a kind of thread that reaches these folders.
pub fn of(thread: Thread, reach: &[Reach]) -> Calls {
    let mut calls = Calls::default();
    // First, because conditions are tried in their order.
    if thread == Thread::Vcpu {
        runs_a_vcpu(&mut calls);
    }
    every_thread(&mut calls);
    match thread {
        Thread::Broker => opens_events(&mut calls),
        Thread::Main => main(&mut calls),
        Thread::Signals => calls.allow(&[libc::SYS_rt_sigtimedwait]),
        Thread::Vcpu | Thread::FlameGraph => {}
        Thread::Disk => {
            interrupts(&mut calls);
            calls.allow(&[libc::SYS_fdatasync, libc::SYS_fstat, libc::SYS_pread64, libc::SYS_pwrite64]);
        }
        Thread::Share => {
            interrupts(&mut calls);
            share(&mut calls);
            if reach.iter().any(|reach| reach.access == Access::Write) {
                writable_share(&mut calls);
            }
        }
        Thread::Network => {
            interrupts(&mut calls);
            // To the process that carries the frames.
            calls.allow(&[libc::SYS_recvfrom]);
            sends(&mut calls);
            // To the tap device: what the guest's driver accepts.
            requests(&mut calls, &[TUNSETOFFLOAD]);
        }
        Thread::Agent => interrupts(&mut calls),
        Thread::Saver => {
            interrupts(&mut calls);
            requests(&mut calls, arch::SAVE);
            // To files that are open.
            calls.allow(&[libc::SYS_fdatasync, libc::SYS_ftruncate, libc::SYS_pread64, libc::SYS_pwrite64]);
        }
        Thread::Log => {
            calls.allow(&[libc::SYS_openat, libc::SYS_renameat2]);
            calls.allow(arch::RENAME);
        }
        Thread::Control => control(&mut calls),
        Thread::Metrics => answers_clients(&mut calls),
    }
    calls
}

/// Requests to terminals (`asm-generic/ioctls.h`): reading and restoring their settings; their size and process group.
const TCGETS: u32 = 0x5401;
const TCSETS: u32 = 0x5402;
const TCGETS2: u32 = 0x802c_542a;
const TCSETS2: u32 = 0x402c_542b;
const TIOCGPGRP: u32 = 0x540f;
const TIOCGWINSZ: u32 = 0x5413;

/// A request to a tap device (`linux/if_tun.h`).
const TUNSETOFFLOAD: u32 = 0x4004_54d0;

/// What Rust's and C's libraries need, and writing to open files.
fn every_thread(calls: &mut Calls) {
    calls.allow(&[
        libc::SYS_brk,
        libc::SYS_clock_gettime,
        libc::SYS_clock_nanosleep,
        libc::SYS_close,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_futex,
        libc::SYS_getpid,
        libc::SYS_getrandom,
        libc::SYS_gettid,
        libc::SYS_madvise,
        libc::SYS_mremap,
        libc::SYS_munmap,
        libc::SYS_nanosleep,
        libc::SYS_ppoll,
        libc::SYS_read,
        libc::SYS_restart_syscall,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sched_yield,
        libc::SYS_sigaltstack,
        libc::SYS_write,
        libc::SYS_writev,
    ]);
    calls.allow(arch::POLL);
    // No memory becomes executable.
    calls.allow_if(libc::SYS_mmap, &[Argument { number: 2, is: Is::Without(EXECUTABLE) }]);
    calls.allow_if(libc::SYS_mprotect, &[Argument { number: 2, is: Is::Without(EXECUTABLE) }]);
    calls.allow_if(libc::SYS_prctl, &[Argument { number: 0, is: Is::Equal(GET_NAME) }]);
    // Whatever ends the process restores the terminal.
    requests(calls, &[TCGETS, TCSETS, TCGETS2, TCSETS2]);
    // Rust's debug builds check that a file is open before they close it.
    fcntl(calls, &[libc::F_GETFD]);
    signals_this_process(calls, libc::SYS_tgkill);
}

const EXECUTABLE: u32 = libc::PROT_EXEC.cast_unsigned();
const THREAD: u32 = libc::CLONE_THREAD.cast_unsigned();
const GET_NAME: u32 = libc::PR_GET_NAME.cast_unsigned();
/// To `sched_setaffinity`.
const THIS_THREAD: u32 = 0;
const SET_NAME: u32 = libc::PR_SET_NAME.cast_unsigned();

/// Signals only to this process's own threads.
fn signals_this_process(calls: &mut Calls, call: i64) {
    calls.allow_if(call, &[Argument { number: 0, is: Is::Equal(std::process::id()) }]);
}

/// Request to KVM by which a device interrupts the guest.
const KVM_IRQ_LINE: u32 = 0x4008_ae61;

/// Interrupts for the guest.
fn interrupts(calls: &mut Calls) {
    requests(calls, &[KVM_IRQ_LINE]);
}

/// Requests of `ioctl`. All 32 bits are compared, which is as many as the kernel looks at: two requests may differ in
/// the size of their structures only.
fn requests(calls: &mut Calls, requests: &[u32]) {
    for request in requests {
        calls.allow_if(libc::SYS_ioctl, &[Argument { number: 1, is: Is::Equal(*request) }]);
    }
}

/// Opening perf events for the threads of another process, each on whatever CPU it runs and in no group, with no flag
/// but `PERF_FLAG_FD_CLOEXEC`. `perf_event_attr` is in memory, where a filter cannot look: [`vpmu_perf::broker`] makes
/// it.
fn opens_events(calls: &mut Calls) {
    const ANY: u32 = u32::MAX;
    const CLOEXEC: u32 = 8;
    /// The signal that only asks whether a thread is there.
    const NONE: u32 = 0;
    let arguments = [
        Argument { number: 2, is: Is::Equal(ANY) },
        Argument { number: 3, is: Is::Equal(ANY) },
        Argument { number: 4, is: Is::Without(!CLOEXEC) },
    ];
    calls.allow_if(libc::SYS_perf_event_open, &arguments);
    calls.allow_if(libc::SYS_tgkill, &[Argument { number: 2, is: Is::Equal(NONE) }]);
    fcntl(calls, &broker::FCNTL);
    let (command, signal) = broker::FCNTL_SIGNAL;
    let arguments = [
        Argument { number: 1, is: Is::Equal(command.cast_unsigned()) },
        Argument { number: 2, is: Is::Equal(signal.cast_unsigned()) },
    ];
    calls.allow_if(libc::SYS_fcntl, &arguments);
    requests(calls, &broker::IOCTL);
    calls.allow(&broker::ANY);
}

/// Having events opened by the broker.
fn has_events_opened(calls: &mut Calls) {
    calls.allow(&[libc::SYS_recvmsg]);
    requests(calls, &PERF_REQUESTS);
}

/// Requests to perf events (`linux/perf_event.h`): ENABLE, DISABLE, REFRESH, RESET, PERIOD, ID.
const PERF_REQUESTS: [u32; 6] = [0x2400, 0x2401, 0x2402, 0x2403, 0x4008_2404, 0x8008_2407];

/// Of these, what is asked at overflows: REFRESH, PERIOD.
const PERF_AT_OVERFLOWS: [u32; 2] = [0x2402, 0x4008_2404];

/// Running a vCPU, with counters of the thread's own.
fn runs_a_vcpu(calls: &mut Calls) {
    calls.try_first(&[arch::KVM_RUN]);
    calls.try_first(arch::AT_OVERFLOWS);
    calls.try_first(&PERF_AT_OVERFLOWS);
    requests(calls, &[arch::KVM_RUN]);
    has_events_opened(calls);
    requests(calls, arch::VCPU);
    requests(calls, arch::SAVE_VCPU);
    requests(calls, &[KVM_IRQ_LINE]);
    calls.allow(&[
        libc::SYS_getcpu,
        libc::SYS_pread64,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_timer_delete,
        libc::SYS_timer_settime,
        // The console's output is flushed by a timer.
        libc::SYS_timerfd_settime,
    ]);
}

fn fcntl(calls: &mut Calls, commands: &[i32]) {
    for command in commands {
        let argument = Argument { number: 1, is: Is::Equal(command.cast_unsigned()) };
        calls.allow_if(libc::SYS_fcntl, &[argument]);
    }
}

/// What `devices::fs` does with a folder that the guest only reads.
fn share(calls: &mut Calls) {
    calls.allow(&[
        libc::SYS_faccessat,
        libc::SYS_faccessat2,
        libc::SYS_fstat,
        libc::SYS_fstatfs,
        libc::SYS_getdents64,
        libc::SYS_getegid,
        libc::SYS_geteuid,
        libc::SYS_lseek,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_preadv2,
        libc::SYS_readlinkat,
        libc::SYS_statx,
    ]);
}

/// The rest of `devices::fs`. Landlock restricts neither modes nor times, so these are set by descriptors, which it let
/// the thread open.
fn writable_share(calls: &mut Calls) {
    calls.allow(&[
        libc::SYS_fallocate,
        libc::SYS_fchmod,
        libc::SYS_fdatasync,
        libc::SYS_fsync,
        libc::SYS_ftruncate,
        libc::SYS_linkat,
        libc::SYS_mkdirat,
        libc::SYS_mknodat,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_pwritev2,
        libc::SYS_renameat2,
        libc::SYS_symlinkat,
        libc::SYS_unlinkat,
    ]);
    calls.allow(arch::RENAME);
    // Of an open file, which takes no path.
    calls.allow_if(libc::SYS_utimensat, &[Argument { number: 1, is: Is::Null }]);
}

/// Sending on a connected socket. With an address, `sendto` would also connect one (`MSG_FASTOPEN`).
fn sends(calls: &mut Calls) {
    const FLAGS: u32 = libc::MSG_DONTWAIT.cast_unsigned() | libc::MSG_NOSIGNAL.cast_unsigned();
    let arguments = [Argument { number: 3, is: Is::Without(!FLAGS) }, Argument { number: 4, is: Is::Null }];
    calls.allow_if(libc::SYS_sendto, &arguments);
}

/// A server on a socket that listens already. Its clients have a time.
fn answers_clients(calls: &mut Calls) {
    calls.allow(&[libc::SYS_accept4, libc::SYS_recvfrom]);
    sends(calls);
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let level = Argument { number: 1, is: Is::Equal(libc::SOL_SOCKET.cast_unsigned()) };
        let option = Argument { number: 2, is: Is::Equal(option.cast_unsigned()) };
        calls.allow_if(libc::SYS_setsockopt, &[level, option]);
    }
}

/// Answering clients, each on a thread of its own; sending them snapshots; counting what vCPUs' threads do; finding out
/// how many counters of a CPU are free.
fn control(calls: &mut Calls) {
    answers_clients(calls);
    has_events_opened(calls);
    starts_threads(calls);
    calls.allow(&[libc::SYS_pread64]);
    calls.allow_if(libc::SYS_sched_setaffinity, &[Argument { number: 0, is: Is::Equal(THIS_THREAD) }]);
    // Snapshots.
    requests(calls, arch::SAVE);
    requests(calls, arch::FINGERPRINT);
}

/// Starting threads, but no processes. The C library tries clone3 first, whose flags are in memory, where a filter
/// cannot look; if the kernel has no such call, it uses clone.
fn starts_threads(calls: &mut Calls) {
    calls.deny(libc::SYS_clone3);
    calls.allow_if(libc::SYS_clone, &[Argument { number: 0, is: Is::With(THREAD) }]);
    calls.allow(&[libc::SYS_rseq, libc::SYS_sched_getaffinity, libc::SYS_set_robust_list]);
    calls.allow_if(libc::SYS_prctl, &[Argument { number: 0, is: Is::Equal(SET_NAME) }]);
}

/// The event loop; and at the end, passing on signals, removing sockets and writing the flame graph.
fn main(calls: &mut Calls) {
    calls.allow(&[
        libc::SYS_fchmod,
        libc::SYS_fcntl,
        libc::SYS_fstat,
        libc::SYS_fsync,
        libc::SYS_getpgid,
        libc::SYS_lseek,
        libc::SYS_openat,
        libc::SYS_renameat2,
        libc::SYS_rt_sigaction,
        libc::SYS_statx,
        libc::SYS_timerfd_settime,
        libc::SYS_unlinkat,
        // For the end of the broker.
        libc::SYS_wait4,
    ]);
    calls.allow(arch::RENAME);
    calls.allow(arch::UNLINK);
    signals_this_process(calls, libc::SYS_kill);
    // What is typed interrupts the guest.
    interrupts(calls);
    // The terminal's size and its process group.
    requests(calls, &[TIOCGWINSZ, TIOCGPGRP]);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sandbox::Mode;

    const ALL: [Thread; 13] = [
        Thread::Broker,
        Thread::Main,
        Thread::Signals,
        Thread::Vcpu,
        Thread::Disk,
        Thread::Share,
        Thread::Network,
        Thread::Agent,
        Thread::Saver,
        Thread::FlameGraph,
        Thread::Log,
        Thread::Control,
        Thread::Metrics,
    ];

    #[test]
    fn every_list_fits_a_filter() {
        for thread in ALL {
            for mode in [Mode::On, Mode::Log] {
                of(thread, &writable()).compile(mode).unwrap_or_else(|error| panic!("{thread:?}: {error}"));
            }
        }
    }

    #[test]
    fn no_thread_starts_programs_opens_sockets_or_changes_who_it_is() {
        let forbidden = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            // A socket that no longer listens could be connected.
            libc::SYS_shutdown,
            libc::SYS_sendmmsg,
            // By a path, whatever Landlock says.
            libc::SYS_fchmodat,
            libc::SYS_fchownat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_writev,
            libc::SYS_bpf,
            libc::SYS_setuid,
            libc::SYS_capset,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_kexec_load,
        ];
        for thread in ALL {
            let calls = of(thread, &writable());
            let allowed: Vec<i64> = forbidden.into_iter().filter(|call| calls.has(*call)).collect();
            assert!(allowed.is_empty(), "{thread:?}: {allowed:?}");
        }
    }

    #[test]
    fn only_the_broker_opens_perf_events_and_few_threads_open_files() {
        let may = |call| ALL.into_iter().filter(|thread| of(*thread, &[]).has(call)).collect::<Vec<_>>();
        assert_eq!(may(libc::SYS_perf_event_open), [Thread::Broker]);
        assert_eq!(may(libc::SYS_openat), [Thread::Main, Thread::Share, Thread::Log]);
    }

    fn writable() -> [Reach; 1] {
        [Reach::to(Path::new("/"), Access::Write).unwrap()]
    }

    #[test]
    fn a_share_that_is_only_read_changes_nothing() {
        let changing = [
            libc::SYS_fchmod,
            libc::SYS_utimensat,
            libc::SYS_unlinkat,
            libc::SYS_mkdirat,
            libc::SYS_ftruncate,
            libc::SYS_pwrite64,
        ];
        let read = [Reach::to(Path::new("/"), Access::Read).unwrap()];
        for call in changing {
            assert!(
                !of(Thread::Share, &read).has(call) && of(Thread::Share, &writable()).has(call),
                "{call}"
            );
        }
    }

    #[test]
    fn arguments_are_checked() {
        const SERVERS: [Thread; 3] = [Thread::Control, Thread::Metrics, Thread::Network];
        /// `MSG_FASTOPEN` (`linux/socket.h`).
        const FASTOPEN: u32 = 0x2000_0000;
        const TCP: u32 = 6;
        const OTHER: u32 = 71;
        const F_SETSIG: u32 = 10;
        /// Types into a terminal (`asm-generic/ioctls.h`).
        const TIOCSTI: u32 = 0x5412;
        const SET_FILTER: u32 = 0x4008_2406;
        const SET_BPF: u32 = 0x4004_2408;
        let this = std::process::id();
        let (memory, thread) = (libc::PROT_READ.cast_unsigned(), THREAD | libc::CLONE_VM.cast_unsigned());
        let any = u32::MAX;
        let nosignal = libc::MSG_NOSIGNAL.cast_unsigned();
        let sample = vpmu_perf::SAMPLE_SIGNAL.cast_unsigned();
        let [socket, receive_timeout, send_timeout, reuse_address] =
            [libc::SOL_SOCKET, libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, libc::SO_REUSEADDR]
                .map(i32::cast_unsigned);
        for (threads, call, allowed, forbidden) in [
            (&ALL[..], libc::SYS_mmap, &[0, 0, memory][..], &[0, 0, memory | EXECUTABLE][..]),
            (&ALL, libc::SYS_mprotect, &[0, 0, memory], &[0, 0, memory | EXECUTABLE]),
            (&ALL, libc::SYS_tgkill, &[this, OTHER, 9], &[OTHER, OTHER, 9]),
            (&ALL, libc::SYS_prctl, &[GET_NAME], &[libc::PR_SET_DUMPABLE.cast_unsigned(), 1]),
            (&ALL, libc::SYS_ioctl, &[0, TCGETS], &[0, TIOCSTI]),
            (&[Thread::Main], libc::SYS_kill, &[this, 9], &[OTHER, 9]),
            (&[Thread::Control], libc::SYS_clone, &[thread], &[0]),
            // A CPU, a group, a control group.
            (&[Thread::Broker], libc::SYS_perf_event_open, &[0, OTHER, any, any, 8], &[0, any, 0, any, 8]),
            (&[Thread::Broker], libc::SYS_perf_event_open, &[0, OTHER, any, any, 0], &[0, 0, any, 3, 8]),
            (&[Thread::Broker], libc::SYS_perf_event_open, &[0, OTHER, any, any, 0], &[0, 0, any, any, 4]),
            // KVM_GET_TSC_KHZ, and KVM_ENABLE_CAP, whose structure has a size.
            #[cfg(target_arch = "x86_64")]
            (&[Thread::Vcpu], libc::SYS_ioctl, &[0, 0xaea3], &[0, 0x4068_aea3]),
            (&SERVERS, libc::SYS_sendto, &[0, 0, 0, nosignal, 0, 0], &[0, 0, 0, nosignal, 1, 16]),
            (&SERVERS, libc::SYS_sendto, &[0, 0, 0, 0, 0, 0], &[0, 0, 0, FASTOPEN, 0, 0]),
            (&SERVERS[..2], libc::SYS_setsockopt, &[0, socket, receive_timeout], &[0, socket, reuse_address]),
            (&SERVERS[..2], libc::SYS_setsockopt, &[0, socket, send_timeout], &[0, TCP, send_timeout]),
            (&[Thread::Control], libc::SYS_sched_setaffinity, &[0], &[OTHER]),
            (&[Thread::Share], libc::SYS_utimensat, &[0, 0], &[0, 1]),
            (&[Thread::Broker], libc::SYS_tgkill, &[OTHER, OTHER, 0], &[OTHER, OTHER, 9]),
            (&[Thread::Broker], libc::SYS_fcntl, &[0, libc::F_SETFL.cast_unsigned()], &[0, F_SETSIG, 9]),
            (&[Thread::Broker], libc::SYS_fcntl, &[0, F_SETSIG, sample], &[0, F_SETSIG, 0]),
            // A filter of what an event counts, and a program that is executed at each of its counts.
            (&[Thread::Broker], libc::SYS_ioctl, &[0, SET_FILTER], &[0, SET_BPF]),
            (&[Thread::Vcpu], libc::SYS_ioctl, &[0, PERF_REQUESTS[0]], &[0, SET_FILTER]),
        ] {
            for thread in threads {
                let calls = of(*thread, &writable());
                assert!(calls.allows(call, allowed), "{thread:?}: {call} {allowed:x?}");
                assert!(!calls.allows(call, forbidden), "{thread:?}: {call} {forbidden:x?}");
            }
        }
    }

    #[test]
    fn all_bits_of_a_request_are_compared() {
        let requests = |calls: &[&[u32]]| calls.concat();
        let of_vcpus = [&[arch::KVM_RUN][..], arch::VCPU, arch::SAVE_VCPU, &[KVM_IRQ_LINE], &PERF_REQUESTS];
        for (thread, requests) in [
            (Thread::Main, requests(&[&[KVM_IRQ_LINE, TIOCGWINSZ, TIOCGPGRP]])),
            (Thread::Vcpu, requests(&of_vcpus)),
            (Thread::Saver, requests(&[arch::SAVE, &[KVM_IRQ_LINE]])),
            (Thread::Control, requests(&[arch::SAVE, arch::FINGERPRINT, &PERF_REQUESTS])),
        ] {
            let calls = of(thread, &[]);
            for request in &requests {
                assert!(calls.allows(libc::SYS_ioctl, &[0, *request]), "{thread:?}: {request:#x}");
                let others = (0..32).map(|bit| request ^ 1 << bit);
                for other in others.filter(|other| !requests.contains(other) && other >> 8 & 0xff != 0x54) {
                    assert!(!calls.allows(libc::SYS_ioctl, &[0, other]), "{thread:?}: {other:#x}");
                }
            }
        }
    }

    #[test]
    fn an_address_is_none_only_if_all_of_its_bits_are_zero() {
        for (thread, call, number) in [
            (Thread::Metrics, libc::SYS_sendto, 4),
            (Thread::Network, libc::SYS_sendto, 4),
            (Thread::Share, libc::SYS_utimensat, 1),
        ] {
            let calls = of(thread, &writable());
            assert!(calls.allows(call, &[0; 6]));
            assert!(!calls.allows_upper(call, &[0; 6], number), "{thread:?}: {call}");
        }
    }
}
