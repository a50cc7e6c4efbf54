//! The interrupt controllers, which are KVM's (RISC-V Advanced Interrupt Architecture): lines lead to one that makes them
//! messages, and each CPU has one that takes messages.

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
use crate::kvm_error::{Doing, KvmError};

/// How many interrupts each CPU can tell apart: the least that there can be.
pub const IDS: u32 = 63;

/// Makes them, for vCPUs that are there already.
pub fn create(vm: &VmFd, cpus: u32) -> Result<Controllers, KvmError> {
    let mut device =
        kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_RISCV_AIA, ..Default::default() };
    let device = vm.create_device(&mut device).doing("make the interrupt controllers")?;
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

/// The controllers of a machine.
#[derive(Clone)]
pub struct Controllers(Arc<DeviceFd>);

impl Controllers {
    /// Has KVM find out anew whether an interrupt waits for a CPU that does not run. It forgets what comes while a vCPU's waiting
    /// interrupts are set, unless the processor keeps them itself.
    pub fn look_again(&self, cpu: u8) -> Result<(), KvmError> {
        /// The register of the least interrupt that is not taken. To set it to what it is does no more than that.
        const THRESHOLD: u32 = 0x72;
        let mut value = 0_u64;
        let mut attribute = kvm_device_attr {
            group: KVM_DEV_RISCV_AIA_GRP_IMSIC,
            attr: u64::from(u32::from(cpu) << KVM_DEV_RISCV_AIA_IMSIC_ISEL_BITS | THRESHOLD),
            addr: &raw mut value as u64,
            flags: 0,
        };
        // SAFETY: the register is of this size, and KVM writes there only during the call.
        unsafe { self.0.get_device_attr(&mut attribute) }.doing("read an interrupt controller")?;
        self.0.set_device_attr(&attribute).doing("look for interrupts")
    }
}

/// Where a CPU takes messages.
pub fn imsic(cpu: u32) -> u64 {
    aia::IMSIC + u64::from(cpu) * u64::from(KVM_DEV_RISCV_IMSIC_SIZE)
}

fn set<T>(device: &DeviceFd, group: u32, attribute: u32, value: &T) -> Result<(), KvmError> {
    let addr = std::ptr::from_ref(value) as u64;
    let attribute = kvm_device_attr { group, attr: attribute.into(), addr, flags: 0 };
    device.set_device_attr(&attribute).doing("set up the interrupt controllers")
}
