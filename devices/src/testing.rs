//! Observes system calls in tests.

/// Runs `work` on a thread on which `fsync` and `fdatasync` fail with EIO.
pub fn without_sync<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    without([libc::SYS_fsync, libc::SYS_fdatasync], work)
}

/// Runs `work` on a thread on which these system calls fail with EIO, by a seccomp filter (seccomp(2)).
pub fn without<T: Send>(calls: [libc::c_long; 2], work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            filter(calls);
            work()
        });
        thread.join().expect("the work succeeds")
    })
}

fn filter([first, second]: [libc::c_long; 2]) {
    let load_number = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    let equals = |number: libc::c_long, otherwise| {
        (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::try_from(number).unwrap(), 0, otherwise)
    };
    let give = |what| (libc::BPF_RET | libc::BPF_K, what, 0, 0);
    let fail = give(libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EIO).unwrap());
    let mut instructions =
        [load_number, equals(first, 1), fail, equals(second, 1), fail, give(libc::SECCOMP_RET_ALLOW)]
            .map(|(code, k, jt, jf)| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k });
    let len = u16::try_from(instructions.len()).unwrap();
    let program = libc::sock_fprog { len, filter: instructions.as_mut_ptr() };
    // SAFETY: this option takes no pointer.
    let allowed = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel copies the program, whose instructions live until the end of this function.
    let filtered =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!((allowed, filtered), (0, 0), "the filter needs a kernel with CONFIG_SECCOMP_FILTER");
}
