//! A complete VMM with a virtual PMU, to show that [`VirtualPmu`] is all that a VMM needs: one vCPU, and a bare-metal
//! guest whose counter counts instructions and interrupts at each overflow.
//!
//! The guest accesses two registers of AMD's PMU: `PERF_CTL0` and `PERF_CTR0`. KVM passes these accesses on, because
//! the VMM says so in an MSR filter. On a host of Intel's the same guest counts the same events. There is no interrupt
//! controller: an overflow is an NMI.
//!
//! Run it on a host with KVM and a PMU, as a user who may use both: `cargo run --release -p vpmu --example tiny_vmm`.

#[cfg(target_arch = "x86_64")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    x86_64::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("This guest is for x86_64.");
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::global_asm;
    use std::error::Error;
    use std::{io, mem, ptr, slice};

    use kvm_bindings::{
        KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_PMU_CAP_DISABLE,
        KVMIO, kvm_enable_cap, kvm_signal_mask, kvm_userspace_memory_region,
    };
    use kvm_ioctls::{
        Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd, VmFd,
    };
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
    use vmm_sys_util::ioctl::ioctl_with_ref;
    use vmm_sys_util::ioctl_iow_nr;
    use vpmu::model::amd::Version;
    use vpmu::shared_page::LvtNote;
    use vpmu::x86::{Leaf, Vendor};
    use vpmu::{Access, Cause, Injected, Outcome, Platform, VirtualPmu};
    use vpmu_perf::{HostPmu, PerfEvents};

    // The guest, in real mode: it counts the instructions of a loop, and writes the count and the number of interrupts
    // to port 0x10.
    global_asm!(
        ".pushsection .rodata.guest, \"a\"",
        ".globl guest_begin, guest_end",
        "guest_begin:",
        ".code16",
        // The NMI handler is vector 2 of the real mode's table.
        "movw $(handler - guest_begin + {BEGIN}), 8",
        "movw $0, 10",
        "movw ${BEGIN}, %sp",
        "call restart",
        // PERF_CTL0: count retired instructions in all modes, interrupt at an overflow, enable.
        "movl $0xc0010200, %ecx",
        "movl $0x5300c0, %eax",
        "xorl %edx, %edx",
        "wrmsr",
        "movl ${ITERATIONS}, %ecx",
        "2: decl %ecx",
        "jnz 2b",
        // PERF_CTL0: disable.
        "movl $0xc0010200, %ecx",
        "xorl %eax, %eax",
        "wrmsr",
        "movl $0xc0010201, %ecx",
        "rdmsr",
        "outl %eax, $0x10",
        "movl 0x500, %eax",
        "outl %eax, $0x10",
        "hlt",
        "handler:",
        "pushal",
        "incl 0x500",
        "call restart",
        "popal",
        "iret",
        // PERF_CTR0: overflow after PERIOD instructions.
        "restart: movl $0xc0010201, %ecx",
        "movl $-{PERIOD}, %eax",
        "movl $0xffff, %edx",
        "wrmsr",
        "ret",
        ".code64",
        "guest_end:",
        ".popsection",
        BEGIN = const BEGIN,
        PERIOD = const PERIOD,
        ITERATIONS = const ITERATIONS,
        options(att_syntax),
    );

    const BEGIN: u64 = 0x1000;
    const PERIOD: u32 = 10_000;
    const ITERATIONS: u32 = 100_000;
    const MEMORY: usize = 0x10000;

    fn guest() -> &'static [u8] {
        unsafe extern "C" {
            static guest_begin: u8;
            static guest_end: u8;
        }
        let (begin, end) = (&raw const guest_begin, &raw const guest_end);
        // SAFETY: both labels are in one section, with the guest's bytes between them, which nobody writes.
        unsafe { slice::from_raw_parts(begin, end as usize - begin as usize) }
    }

    ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, kvm_signal_mask);

    pub fn main() -> Result<(), Box<dyn Error>> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        pass_on_pmu_registers(&vm)?;
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)])?;
        memory.write_slice(guest(), GuestAddress(BEGIN))?;
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: memory.get_host_address(GuestAddress(0))? as u64,
            ..Default::default()
        };
        // SAFETY: the memory is mapped, and is unmapped after the VM is closed.
        unsafe { vm.set_user_memory_region(region)? };
        let mut vcpu = vm.create_vcpu(0)?;
        start_in_real_mode(&vcpu)?;
        let alarms = leave_guest_at_alarms(&vcpu)?;

        let cpuid = std::arch::x86_64::__cpuid(0);
        let Some(vendor) =
            Vendor::of(Leaf { eax: cpuid.eax, ebx: cpuid.ebx, ecx: cpuid.ecx, edx: cpuid.edx })
        else {
            return Err("neither AMD's processor nor Intel's".into());
        };
        let source = PerfEvents::new(HostPmu::bind_thread()?.0);
        let mut pmu = VirtualPmu::amd(Version::Core, vendor, source);
        let mut output = Vec::new();
        loop {
            let cause = match vcpu.run() {
                Ok(VcpuExit::X86Rdmsr(exit)) => {
                    match pmu.access(Access::Read(exit.index)) {
                        Outcome::Value(value) => *exit.data = value,
                        Outcome::Handled | Outcome::Fault | Outcome::NotHandled => *exit.error = 1,
                    }
                    Cause::Guest
                }
                Ok(VcpuExit::X86Wrmsr(exit)) => {
                    if pmu.access(Access::Write(exit.index, exit.data)) != Outcome::Handled {
                        *exit.error = 1;
                    }
                    Cause::Guest
                }
                Ok(VcpuExit::IoOut(0x10, data)) => {
                    output.push(u32::from_le_bytes(data.try_into()?));
                    Cause::Guest
                }
                Ok(VcpuExit::Hlt) => break,
                Ok(other) => return Err(format!("unexpected exit {other:?}").into()),
                Err(error) if error.errno() == libc::EINTR => {
                    take_signal(&alarms);
                    Cause::Alarm
                }
                Err(error) => return Err(error.into()),
            };
            // This VMM has no timer for `next.wake`, so it finds a counter that has lost its hardware only at an exit.
            let next = pmu.after_exit(cause, &mut Vcpu(&vcpu))?;
            next.notices.iter().for_each(|notice| eprintln!("{notice}"));
        }
        let [count, interrupts] = output[..] else { return Err("the guest did not finish".into()) };
        let passed = u64::from(interrupts) * u64::from(PERIOD);
        println!("{} instructions, {interrupts} overflows", passed + u64::from(count.wrapping_add(PERIOD)));
        Ok(())
    }

    /// A vCPU without an interrupt controller.
    struct Vcpu<'a>(&'a VcpuFd);

    impl Platform for Vcpu<'_> {
        type Error = kvm_ioctls::Error;

        fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, kvm_ioctls::Error> {
            self.0.nmi()?;
            Ok(Injected::AtNextEntry)
        }
    }

    /// Switches KVM's own vPMU off, and passes accesses to the six counters' registers on to this VMM.
    fn pass_on_pmu_registers(vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for (cap, value) in [
            (KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE),
            (KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER),
        ] {
            vm.enable_cap(&kvm_enable_cap { cap, args: [value.into(), 0, 0, 0], ..Default::default() })?;
        }
        let flags = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
        // A bit of 0 passes the access on.
        let counters = MsrFilterRange { flags, base: 0xc001_0200, msr_count: 12, bitmap: &[0; 2] };
        vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[counters])
    }

    fn start_in_real_mode(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = (BEGIN, 2);
        vcpu.set_regs(&regs)
    }

    /// Blocks the signal of the perf events in this thread, except in the guest. Returns the set with this signal.
    fn leave_guest_at_alarms(vcpu: &VcpuFd) -> io::Result<libc::sigset_t> {
        #[repr(C)]
        struct Mask {
            len: u32,
            set: [u8; 8],
        }
        // SAFETY: all-zero is a valid set, the empty one.
        let mut alarms: libc::sigset_t = unsafe { mem::zeroed() };
        // SAFETY: the set is valid, and so is the signal.
        unsafe { libc::sigaddset(&raw mut alarms, libc::SIGIO) };
        // SAFETY: the set is valid; the old mask is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const alarms, ptr::null_mut()) };
        let none_blocked = Mask { len: 8, set: [0; 8] };
        // SAFETY: the mask is as long as it says, and KVM only reads it.
        match unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &none_blocked) } {
            0 => Ok(alarms),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn take_signal(set: &libc::sigset_t) {
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the set and the time are valid; what the signal says of itself is not asked for.
        unsafe { libc::sigtimedwait(set, ptr::null_mut(), &raw const at_once) };
    }
}
