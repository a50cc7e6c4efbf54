//! What a VMM with a virtual PMU would save if the host's kernel could do more: instructions of the host for an
//! overflow that ends `KVM_RUN` by itself, for the next period of an event, for an event's page, and for an MSR whose
//! value is in memory. KVM has to have the changes of `host/kvm.patch`, as it does for `tally-lab figures upstream`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[cfg(target_arch = "x86_64")]
    x86_64::main()?;
    #[cfg(not(target_arch = "x86_64"))]
    println!("This guest is for x86-64.");
    Ok(())
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::{asm, global_asm};
    use std::error::Error;
    use std::fs::File;
    use std::io::{self, Read};
    use std::os::fd::{AsRawFd, FromRawFd, RawFd};
    use std::sync::atomic::{AtomicI64, AtomicU32, Ordering, fence};
    use std::{mem, ptr, slice};

    use kvm_bindings::{
        KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_PMU_CAP_DISABLE,
        KVMIO, kvm_enable_cap, kvm_signal_mask, kvm_userspace_memory_region,
    };
    use kvm_ioctls::{
        Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd, VmFd,
    };
    use perf_event_open_sys::bindings::{
        PERF_ATTR_SIZE_VER5, PERF_COUNT_HW_INSTRUCTIONS, PERF_FLAG_FD_CLOEXEC, PERF_TYPE_HARDWARE, PERIOD,
        perf_event_attr,
    };
    use perf_event_open_sys::perf_event_open;
    use vmm_sys_util::ioctl::{ioctl_with_ref, ioctl_with_val};
    use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr};

    type Result<T> = std::result::Result<T, Box<dyn Error>>;

    // The guests, in real mode: a loop that NMIs interrupt, and one that reads an MSR.
    global_asm!(
        ".pushsection .rodata.guest, \"a\"",
        ".globl guest_loops, guest_reads, guest_end",
        ".code16",
        "guest_loops:",
        // The NMI handler is vector 2 of the real mode's table.
        "movw $(handler - guest_loops + {BEGIN}), 8",
        "movw $0, 10",
        "movw ${BEGIN}, %sp",
        "2: incl %eax",
        "jmp 2b",
        "handler:",
        "iret",
        "guest_reads:",
        "movl ${MSR}, %ecx",
        "3: movl ${TIMES}, %ebx",
        "4: rdmsr",
        "decl %ebx",
        "jnz 4b",
        "outb %al, $0x10",
        "jmp 3b",
        ".code64",
        "guest_end:",
        ".popsection",
        BEGIN = const BEGIN,
        MSR = const MSR,
        TIMES = const TIMES,
        options(att_syntax),
    );

    unsafe extern "C" {
        static guest_loops: u8;
        static guest_reads: u8;
        static guest_end: u8;
    }

    const BEGIN: usize = 0x1000;
    const MEMORY: usize = 0x10000;
    /// Size of an event's page.
    const PAGE: usize = 4096;
    /// AMD's `PERF_CTR0`.
    const MSR: u32 = 0xc001_0201;
    /// Instructions of the guest from one overflow to the next; they take turns.
    const PERIODS: [u64; 2] = [10_000, 10_002];
    /// What is measured is done so often, after a tenth as many times that are not counted.
    const TIMES: u64 = 1_000;

    // What the patches add to `linux/kvm.h`.
    const KVM_EXIT_PERF_OVERFLOW: u32 = 64;
    const KVM_NEXT_PERIOD: usize = 2040;
    ioctl_io_nr!(KVM_BIND_PERF_EVENT, KVMIO, 0xf0);
    ioctl_iow_nr!(KVM_SET_MSR_IN_MEMORY, KVMIO, 0xf1, MsrInMemory);

    /// `struct kvm_msr_in_memory`.
    #[repr(C)]
    struct MsrInMemory {
        msr: u32,
        event: i32,
        value: *const MsrValue,
    }

    /// `struct kvm_msr_value`.
    #[repr(C)]
    struct MsrValue {
        add: u64,
        mask: u64,
    }

    ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, kvm_signal_mask);

    pub fn main() -> Result<()> {
        // SAFETY: the labels are in one section, with the guests' bytes between them, which nobody writes.
        let [loops, reads] = unsafe {
            let [loops, reads, end] = [&raw const guest_loops, &raw const guest_reads, &raw const guest_end];
            [(loops, reads), (reads, end)]
                .map(|(begin, end)| slice::from_raw_parts(begin, end as usize - begin as usize))
        };
        by_signal(loops)?;
        by_exit(loops)?;
        of_reads(reads)
    }

    /// `tally-lab figures upstream` reads these lines.
    fn tell(what: &str, cost: u64) {
        println!("{what} {cost}");
    }

    /// As Tally does it.
    fn by_signal(guest: &[u8]) -> Result<()> {
        let mut vm = Vm::new(guest)?;
        let event = Event::of_the_guest()?;
        event.signal_this_thread()?;
        let signals = vm.leave_at_signals()?;
        let unmapped = vm.cost(|vcpu, _| overflow_by_signal(vcpu, &signals))?;
        tell("signal,unmapped", unmapped);
        let _page = event.page()?;
        tell("signal", vm.cost(|vcpu, _| overflow_by_signal(vcpu, &signals))?);
        let and_period = |vcpu: &mut VcpuFd, number| {
            overflow_by_signal(vcpu, &signals)?;
            event.set_period(period(number))
        };
        tell("signal,period", vm.cost(and_period)?);
        let and_nmi = |vcpu: &mut VcpuFd, _| {
            overflow_by_signal(vcpu, &signals)?;
            Ok(vcpu.nmi()?)
        };
        tell("signal,nmi", vm.cost(and_nmi)?);
        Ok(())
    }

    /// With the patches `overflow-exit` and `next-period`.
    fn by_exit(guest: &[u8]) -> Result<()> {
        let mut vm = Vm::new(guest)?;
        let event = Event::of_the_guest()?;
        // SAFETY: the argument is a number.
        done(unsafe { ioctl_with_val(&vm.vcpu, KVM_BIND_PERF_EVENT(), event.0.as_raw_fd().try_into()?) })?;
        let _page = event.page()?;
        tell("exit", vm.cost(|vcpu, _| overflow_by_exit(vcpu))?);
        let and_period = |vcpu: &mut VcpuFd, number| {
            overflow_by_exit(vcpu)?;
            event.set_period(period(number))
        };
        tell("exit,period", vm.cost(and_period)?);
        let by_kvm = |vcpu: &mut VcpuFd, number| {
            set_next_period(vcpu, period(number));
            overflow_by_exit(vcpu)
        };
        let before = event.read()?;
        tell("exit,next-period", vm.cost(by_kvm)?);
        // Half of the overflows have either. What comes late is late by less than one instruction on average.
        let mean = (event.read()? - before) / (TIMES + TIMES / 10);
        if mean != PERIODS[0].midpoint(PERIODS[1]) {
            return Err(format!("KVM set periods of {mean}").into());
        }
        Ok(())
    }

    /// With the patch `msr-in-memory`.
    fn of_reads(guest: &[u8]) -> Result<()> {
        let mut vm = Vm::new(guest)?;
        let event = Event::of_the_guest()?;
        let page = event.page()?;
        // A round of the guest is `TIMES` reads.
        let by_exit = vm.cost(|vcpu, _| reads(vcpu, &|| page.read()))? / TIMES;
        tell("read", by_exit);
        let value = MsrValue { add: 0, mask: (1 << 48) - 1 };
        let in_memory = MsrInMemory { msr: MSR, event: event.0.as_raw_fd(), value: &raw const value };
        // SAFETY: KVM reads what is passed, and the value until the vCPU is closed.
        done(unsafe { ioctl_with_ref(&vm.vcpu, KVM_SET_MSR_IN_MEMORY(), &in_memory) })?;
        let in_memory = vm.cost(|vcpu, _| reads(vcpu, &|| None))? / TIMES;
        tell("read,in-memory", in_memory);
        // It ends before what KVM reads does.
        drop(vm);
        Ok(())
    }

    fn period(number: u64) -> u64 {
        if number.is_multiple_of(2) { PERIODS[0] } else { PERIODS[1] }
    }

    fn overflow_by_signal(vcpu: &mut VcpuFd, signals: &libc::sigset_t) -> Result<()> {
        match vcpu.run() {
            Err(error) if error.errno() == libc::EINTR => {}
            other => return Err(format!("{other:?} instead of a signal").into()),
        }
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the set and the time are valid; what the signal says of itself is not asked for.
        unsafe { libc::sigtimedwait(signals, ptr::null_mut(), &raw const at_once) };
        Ok(())
    }

    fn overflow_by_exit(vcpu: &mut VcpuFd) -> Result<()> {
        match vcpu.run()? {
            VcpuExit::Unsupported(KVM_EXIT_PERF_OVERFLOW) => Ok(()),
            other => Err(format!("{other:?} instead of an overflow").into()),
        }
    }

    fn set_next_period(vcpu: &mut VcpuFd, period: u64) {
        // SAFETY: `padding` is as large as the union, and any bytes are a number.
        let padding = unsafe { &mut vcpu.get_kvm_run().s.padding };
        for (byte, value) in padding[KVM_NEXT_PERIOD..].iter_mut().zip(period.to_ne_bytes()) {
            *byte = value.cast_signed();
        }
    }

    /// Runs a guest that reads, until it says that it has. `read` gives it the value, unless KVM does.
    fn reads(vcpu: &mut VcpuFd, read: &dyn Fn() -> Option<u64>) -> Result<()> {
        loop {
            match vcpu.run()? {
                VcpuExit::X86Rdmsr(exit) => *exit.data = read().ok_or("a read is not in memory")?,
                VcpuExit::IoOut(..) => return Ok(()),
                other => return Err(format!("{other:?} instead of a read").into()),
            }
        }
    }

    /// A guest with one vCPU and no interrupt controller.
    struct Vm {
        vcpu: VcpuFd,
        _vm: VmFd,
    }

    impl Vm {
        fn new(guest: &[u8]) -> Result<Self> {
            let vm = Kvm::new()?.create_vm()?;
            for (cap, value) in [
                (KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE),
                (KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER),
            ] {
                vm.enable_cap(&kvm_enable_cap { cap, args: [value.into(), 0, 0, 0], ..Default::default() })?;
            }
            // A bit of 0 passes the access on.
            let counter =
                MsrFilterRange { flags: MsrFilterRangeFlags::READ, base: MSR, msr_count: 1, bitmap: &[0] };
            vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[counter])?;
            let (kind, access) =
                (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
            let memory: *mut u8 = map(MEMORY, access, kind, -1)?;
            // SAFETY: the guest is shorter than the memory, which nobody else has.
            unsafe { memory.wrapping_add(BEGIN).copy_from_nonoverlapping(guest.as_ptr(), guest.len()) };
            let region = kvm_userspace_memory_region {
                memory_size: MEMORY as u64,
                userspace_addr: memory as u64,
                ..Default::default()
            };
            // SAFETY: the memory stays mapped.
            unsafe { vm.set_user_memory_region(region)? };
            let vcpu = vm.create_vcpu(0)?;
            let mut sregs = vcpu.get_sregs()?;
            (sregs.cs.base, sregs.cs.selector) = (0, 0);
            vcpu.set_sregs(&sregs)?;
            let mut regs = vcpu.get_regs()?;
            (regs.rip, regs.rflags) = (BEGIN as u64, 2);
            vcpu.set_regs(&regs)?;
            Ok(Self { vcpu, _vm: vm })
        }

        /// Blocks the signal of the perf events in this thread, except in the guest. Returns the set with this signal.
        fn leave_at_signals(&self) -> io::Result<libc::sigset_t> {
            #[repr(C)]
            struct Mask {
                len: u32,
                set: [u8; 8],
            }
            // SAFETY: all-zero is a valid set, the empty one.
            let mut signals: libc::sigset_t = unsafe { mem::zeroed() };
            // SAFETY: the set is valid, and so is the signal.
            unsafe { libc::sigaddset(&raw mut signals, libc::SIGIO) };
            // SAFETY: the set is valid; the old mask is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut()) };
            let none_blocked = Mask { len: 8, set: [0; 8] };
            // SAFETY: the mask is as long as it says, and KVM only reads it.
            done(unsafe { ioctl_with_ref(&self.vcpu, KVM_SET_SIGNAL_MASK(), &none_blocked) })?;
            Ok(signals)
        }

        /// Returns the mean number of instructions that the host executes for something, the VMM's included.
        fn cost(&mut self, mut once: impl FnMut(&mut VcpuFd, u64) -> Result<()>) -> Result<u64> {
            let host = Event::of_the_host()?;
            for number in 0..TIMES / 10 {
                once(&mut self.vcpu, number)?;
            }
            let before = host.read()?;
            for number in 0..TIMES {
                once(&mut self.vcpu, number)?;
            }
            Ok((host.read()? - before) / TIMES)
        }
    }

    /// An event that counts instructions of this thread.
    struct Event(File);

    impl Event {
        /// All of the guest's, with an overflow from time to time.
        fn of_the_guest() -> io::Result<Self> {
            let mut attr = Self::instructions();
            attr.set_exclude_host(1);
            attr.set_pinned(1);
            attr.__bindgen_anon_1.sample_period = PERIODS[0];
            Self::open(attr)
        }

        /// All others, those of interrupts as well.
        fn of_the_host() -> io::Result<Self> {
            let mut attr = Self::instructions();
            attr.set_exclude_guest(1);
            Self::open(attr)
        }

        fn instructions() -> perf_event_attr {
            perf_event_attr {
                size: PERF_ATTR_SIZE_VER5,
                type_: PERF_TYPE_HARDWARE,
                config: PERF_COUNT_HW_INSTRUCTIONS.into(),
                ..Default::default()
            }
        }

        fn open(mut attr: perf_event_attr) -> io::Result<Self> {
            // SAFETY: `attr` is valid, and says how large it is.
            let fd = unsafe { perf_event_open(&raw mut attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC.into()) };
            done(fd)?;
            // SAFETY: nobody else has it.
            Ok(Self(unsafe { File::from_raw_fd(fd) }))
        }

        fn signal_this_thread(&self) -> io::Result<()> {
            const F_SETOWN_EX: libc::c_int = 15;
            let fd = self.0.as_raw_fd();
            // SAFETY: there is nothing that it could do.
            let owner = [0, unsafe { libc::gettid() }];
            // SAFETY: `owner` has the layout of `f_owner_ex`, with `F_OWNER_TID`.
            done(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
            // SAFETY: it takes flags and no pointer.
            done(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })
        }

        fn set_period(&self, period: u64) -> Result<()> {
            // SAFETY: the kernel only reads the number.
            Ok(done(unsafe { libc::ioctl(self.0.as_raw_fd(), PERIOD.into(), &raw const period) })?)
        }

        fn read(&self) -> io::Result<u64> {
            let mut count = [0; 8];
            (&self.0).read_exact(&mut count)?;
            Ok(u64::from_ne_bytes(count))
        }

        /// Maps the event's page. The event lives as long as it does.
        fn page(&self) -> io::Result<Page> {
            map(PAGE, libc::PROT_READ, libc::MAP_SHARED, self.0.as_raw_fd()).map(Page)
        }
    }

    /// The page that says which counter an event is on.
    struct Page(*mut Shared);

    /// The beginning of `perf_event_mmap_page`.
    #[repr(C)]
    struct Shared {
        versions: [u32; 2],
        lock: AtomicU32,
        index: AtomicU32,
        offset: AtomicI64,
    }

    impl Drop for Page {
        fn drop(&mut self) {
            // SAFETY: it was mapped with this size, and nobody else has it.
            unsafe { libc::munmap(self.0.cast(), PAGE) };
        }
    }

    impl Page {
        /// Returns the count, as `perf_event_open(2)` says. `None` if the event is on no counter.
        fn read(&self) -> Option<u64> {
            // SAFETY: the page is mapped as long as `self` lives, and the kernel writes each field at once.
            let shared = unsafe { &*self.0 };
            loop {
                let lock = shared.lock.load(Ordering::Acquire);
                let index = shared.index.load(Ordering::Relaxed).checked_sub(1)?;
                let offset = shared.offset.load(Ordering::Relaxed);
                let (low, high): (u32, u32);
                // SAFETY: Linux lets a program read the counters of events whose pages it has mapped.
                unsafe { asm!("rdpmc", in("ecx") index, out("eax") low, out("edx") high, options(nostack)) };
                fence(Ordering::Acquire);
                if shared.lock.load(Ordering::Relaxed) == lock {
                    // Of 64 bits, the counter has 48.
                    let counter = (u64::from(high) << 32 | u64::from(low)) << 16;
                    return Some(offset.wrapping_add(counter.cast_signed() >> 16).cast_unsigned());
                }
            }
        }
    }

    /// Maps memory, which stays mapped until somebody unmaps it.
    fn map<T>(size: usize, access: libc::c_int, kind: libc::c_int, fd: RawFd) -> io::Result<*mut T> {
        // SAFETY: the kernel chooses the address.
        let memory = unsafe { libc::mmap(ptr::null_mut(), size, access, kind, fd, 0) };
        if memory == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(memory.cast()) }
    }

    fn done(result: libc::c_int) -> io::Result<()> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
