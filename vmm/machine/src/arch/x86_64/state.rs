//! What KVM holds of a machine and of a vCPU, in a snapshot.
//!
//! The order in which a vCPU's parts are restored matters to KVM: CPUID first, the local APIC after the system
//! registers (they say in which mode it is), the MSRs after it (its timer's deadline is one of them), the pending
//! events last.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, Msrs, kvm_clock_data, kvm_debugregs,
    kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use crate::arch::x86_64::msr;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Interrupt controllers, the timer, and the clock that the guest's kernel gets from KVM.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    controllers: Vec<kvm_irqchip>,
    timer: kvm_pit_state2,
    clock: kvm_clock_data,
}

const CONTROLLERS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl MachineState {
    /// Reads the state. No vCPU may run meanwhile.
    pub fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let controller = |chip_id| {
            let mut controller = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut controller).operation("read an interrupt controller")?;
            Ok(controller)
        };
        Ok(Self {
            controllers: CONTROLLERS.into_iter().map(controller).collect::<Result<_, _>>()?,
            timer: vm.get_pit2().operation("read the PIT")?,
            clock: vm.get_clock().operation("read the guest's clock")?,
        })
    }

    /// Sets the state. The guest's clock goes on where it was.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        for controller in &self.controllers {
            vm.set_irqchip(controller).operation("set an interrupt controller")?;
        }
        vm.set_pit2(&self.timer).operation("set the PIT")?;
        let clock = kvm_clock_data { clock: self.clock.clock, ..Default::default() };
        vm.set_clock(&clock).operation("set the guest's clock")
    }
}

/// The registers of a vCPU, and what is about to be delivered to it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// Frequency of the time-stamp counter, in kHz.
    clock: u32,
    run_state: kvm_mp_state,
    registers: kvm_regs,
    system: kvm_sregs,
    extended: kvm_xsave,
    extended_control: kvm_xcrs,
    debug: kvm_debugregs,
    local_apic: kvm_lapic_state,
    /// Numbers and values.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// The memory type range registers, which KVM does not list (SDM volume 4, table 2-2): the default type, the fixed
/// ranges and eight variable ones.
#[rustfmt::skip]
const MTRRS: [u32; 28] = [
    0x2ff,
    0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f,
    0x200, 0x201, 0x202, 0x203, 0x204, 0x205, 0x206, 0x207,
    0x208, 0x209, 0x20a, 0x20b, 0x20c, 0x20d, 0x20e, 0x20f,
];
const TSC: u32 = 0x10;

/// Returns the numbers of the MSRs that a snapshot has, as far as a vCPU has them.
pub fn msrs(kvm: &Kvm) -> Result<Vec<u32>, KvmError> {
    let list = kvm.get_msr_index_list().operation("list its MSRs")?;
    Ok(list.as_slice().iter().copied().chain(MTRRS).collect())
}

impl VcpuState {
    /// Reads the state. The vCPU's last exit has been completed.
    pub fn save(vcpu: &VcpuFd, msrs: &[u32]) -> Result<Self, KvmError> {
        Ok(Self {
            clock: vcpu.get_tsc_khz().operation("read the time-stamp counter's frequency")?,
            // Before the local APIC: reading it lets KVM take up what the local APIC has received.
            run_state: vcpu.get_mp_state().operation("read whether a vCPU runs")?,
            registers: vcpu.get_regs().operation("read the registers")?,
            system: vcpu.get_sregs().operation("read the system registers")?,
            extended: vcpu.get_xsave().operation("read the floating-point state")?,
            extended_control: vcpu.get_xcrs().operation("read XCR0")?,
            debug: vcpu.get_debug_regs().operation("read the debug registers")?,
            local_apic: vcpu.get_lapic().operation("read the local APIC")?,
            msrs: read_all(vcpu, msrs)?,
            events: vcpu.get_vcpu_events().operation("read a vCPU's events")?,
        })
    }

    /// Sets the state of a new vCPU that has its CPUID already. The machine's first vCPU comes first.
    pub fn restore(&self, vcpu: &VcpuFd, is_first: bool) -> Result<(), KvmError> {
        /// More than a second, however fast the counter is.
        const FAR: u64 = 1 << 60;
        if let (true, Some((_, tsc))) = (is_first, self.msrs.iter().find(|(number, _)| *number == TSC)) {
            // KVM before Linux 6.7 takes a value within a second of the one with which it has begun for an attempt to
            // synchronise vCPUs, and ignores it. One that is far away begins anew, and the other vCPUs follow.
            msr::write(vcpu, TSC, tsc ^ FAR)?;
        }
        vcpu.set_tsc_khz(self.clock).operation("set the time-stamp counter's frequency")?;
        vcpu.set_mp_state(self.run_state).operation("set whether a vCPU runs")?;
        vcpu.set_regs(&self.registers).operation("set the registers")?;
        vcpu.set_sregs(&self.system).operation("set the system registers")?;
        set_extended(vcpu, &self.extended)?;
        vcpu.set_xcrs(&self.extended_control).operation("set XCR0")?;
        vcpu.set_debug_regs(&self.debug).operation("set the debug registers")?;
        vcpu.set_lapic(&self.local_apic).operation("set the local APIC")?;
        write_all(vcpu, &self.msrs)?;
        vcpu.set_vcpu_events(&self.events).operation("set a vCPU's events")
    }
}

fn set_extended(vcpu: &VcpuFd, state: &kvm_xsave) -> Result<(), KvmError> {
    // SAFETY: KVM reads as much as the structure has, unless features of the processor were enabled for guests that
    // need more (`ARCH_REQ_XCOMP_GUEST_PERM`), which Tally never does.
    unsafe { vcpu.set_xsave(state) }.operation("set the floating-point state")
}

/// Reads MSRs. Those that this vCPU does not have are left out.
fn read_all(vcpu: &VcpuFd, mut numbers: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
    let mut all = Vec::with_capacity(numbers.len());
    while !numbers.is_empty() {
        let entries: Vec<_> =
            numbers.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut request = Msrs::from_entries(&entries).expect("KVM's own list fits");
        let read = vcpu.get_msrs(&mut request).operation("read the MSRs")?;
        all.extend(request.as_slice()[..read].iter().map(|entry| (entry.index, entry.data)));
        // KVM stops at the first that it refuses.
        numbers = numbers.get(read + 1..).unwrap_or_default();
    }
    Ok(all)
}

/// Writes MSRs. A refused one is an error unless the vCPU has the value already, or the value is 0, which is that of a
/// new vCPU. Without a vPMU of its own, KVM gives Intel's vCPUs the host's `PERF_CAPABILITIES`, but refuses the same
/// value.
fn write_all(vcpu: &VcpuFd, mut values: &[(u32, u64)]) -> Result<(), KvmError> {
    while !values.is_empty() {
        let entries: Vec<_> = values
            .iter()
            .map(|(index, data)| kvm_msr_entry { index: *index, data: *data, ..Default::default() })
            .collect();
        let request = Msrs::from_entries(&entries).map_err(|_| KvmError::Lacks(TOO_MANY.to_owned()))?;
        let written = vcpu.set_msrs(&request).operation("set the MSRs")?;
        match values.get(written) {
            Some((index, value)) if *value != 0 && msr::read(vcpu, *index)? != Some(*value) => {
                return Err(KvmError::Lacks(format!("MSR {index:#x} with the value {value:#x}")));
            }
            _ => values = values.get(written + 1..).unwrap_or_default(),
        }
    }
    Ok(())
}

const TOO_MANY: &str = "so many MSRs";
