//! KVM's interrupt controllers (RISC-V Advanced Interrupt Architecture): an APLIC turns interrupt lines into messages
//! (MSIs), and an IMSIC for each CPU receives the messages.

use std::sync::Arc;

use kvm_bindings::{
    KVM_DEV_RISCV_AIA_ADDR_APLIC, KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, KVM_DEV_RISCV_AIA_CONFIG_IDS,
    KVM_DEV_RISCV_AIA_CONFIG_SRCS, KVM_DEV_RISCV_AIA_CTRL_INIT, KVM_DEV_RISCV_AIA_GRP_ADDR,
    KVM_DEV_RISCV_AIA_GRP_CONFIG, KVM_DEV_RISCV_AIA_GRP_CTRL, KVM_DEV_RISCV_AIA_GRP_IMSIC,
    KVM_DEV_RISCV_AIA_IMSIC_ISEL_BITS, KVM_DEV_RISCV_IMSIC_SIZE, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_RISCV_AIA,
};
use kvm_ioctls::{DeviceFd, VmFd};

use super::machine::aia;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Number of interrupt identities of each IMSIC: the minimum of the specification.
pub const IDS: u32 = 63;

/// Creates the interrupt controllers. All vCPUs have to exist already.
pub fn create(vm: &VmFd, cpus: u32) -> Result<Controllers, KvmError> {
    let mut device =
        kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_RISCV_AIA, ..Default::default() };
    let device = vm.create_device(&mut device).operation("create the interrupt controllers")?;
    let config = |attribute: u32, value: u32| set(&device, KVM_DEV_RISCV_AIA_GRP_CONFIG, attribute, &value);
    let address = |attribute: u32, value: u64| set(&device, KVM_DEV_RISCV_AIA_GRP_ADDR, attribute, &value);
    config(KVM_DEV_RISCV_AIA_CONFIG_IDS, IDS)?;
    config(KVM_DEV_RISCV_AIA_CONFIG_SRCS, aia::SOURCES)?;
    config(KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, cpus.next_power_of_two().trailing_zeros())?;
    address(KVM_DEV_RISCV_AIA_ADDR_APLIC, aia::APLIC)?;
    for cpu in 0..cpus {
        address(1 + cpu, imsic(cpu))?;
    }
    set(&device, KVM_DEV_RISCV_AIA_GRP_CTRL, KVM_DEV_RISCV_AIA_CTRL_INIT, &())?;
    Ok(Controllers(Arc::new(device)))
}

/// The interrupt controllers of a machine.
#[derive(Clone)]
pub struct Controllers(Arc<DeviceFd>);

impl Controllers {
    /// Makes KVM check again whether an external interrupt is pending for a vCPU that does not run. This is necessary
    /// after `sip` was written: without IMSICs in hardware, KVM then loses an external interrupt that arrives at the
    /// same time.
    pub fn recheck_pending(&self, cpu: u8) -> Result<(), KvmError> {
        /// The IMSIC register `eithreshold`. Writing its current value has no other effect than the check.
        const THRESHOLD: u32 = 0x72;
        let mut value = 0_u64;
        let mut attribute = kvm_device_attr {
            group: KVM_DEV_RISCV_AIA_GRP_IMSIC,
            attr: u64::from(u32::from(cpu) << KVM_DEV_RISCV_AIA_IMSIC_ISEL_BITS | THRESHOLD),
            addr: &raw mut value as u64,
            flags: 0,
        };
        // SAFETY: the register has this size, and KVM writes to `value` only during the call.
        unsafe { self.0.get_device_attr(&mut attribute) }.operation("read an interrupt controller")?;
        self.0.set_device_attr(&attribute).operation("recheck pending interrupts")
    }
}

/// Returns the address of a CPU's IMSIC.
pub fn imsic(cpu: u32) -> u64 {
    aia::IMSIC + u64::from(cpu) * u64::from(KVM_DEV_RISCV_IMSIC_SIZE)
}

fn set<T>(device: &DeviceFd, group: u32, attribute: u32, value: &T) -> Result<(), KvmError> {
    let addr = std::ptr::from_ref(value) as u64;
    let attribute = kvm_device_attr { group, attr: attribute.into(), addr, flags: 0 };
    device.set_device_attr(&attribute).operation("set up the interrupt controllers")
}
