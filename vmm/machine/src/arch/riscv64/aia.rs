//! KVM's interrupt controllers (RISC-V Advanced Interrupt Architecture): an APLIC turns interrupt lines into messages
//! (MSIs), and an IMSIC for each CPU receives the messages.

use std::sync::Arc;

use kvm_bindings::{
    KVM_DEV_RISCV_AIA_ADDR_APLIC, KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, KVM_DEV_RISCV_AIA_CONFIG_IDS,
    KVM_DEV_RISCV_AIA_CONFIG_SRCS, KVM_DEV_RISCV_AIA_CTRL_INIT, KVM_DEV_RISCV_AIA_GRP_ADDR,
    KVM_DEV_RISCV_AIA_GRP_APLIC, KVM_DEV_RISCV_AIA_GRP_CONFIG, KVM_DEV_RISCV_AIA_GRP_CTRL,
    KVM_DEV_RISCV_AIA_GRP_IMSIC, KVM_DEV_RISCV_AIA_IMSIC_ISEL_BITS, KVM_DEV_RISCV_IMSIC_SIZE,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_RISCV_AIA, kvm_msi,
};
use kvm_ioctls::{DeviceFd, VmFd};
use serde::{Deserialize, Serialize};

use super::layout::aia;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Number of interrupt identities of each IMSIC, as the guest is told: the minimum of the specification.
pub const IDS: u32 = 63;
/// Number of identities that the IMSICs really have where KVM permits it.
const REAL_IDS: u32 = 2 * IDS + 1;
/// An identity that the guest is not told of. A message with it only makes KVM look which interrupts are pending; a
/// guest that enables it all the same gets one more external interrupt with each overflow.
const SPARE_ID: u32 = IDS + 1;

/// Creates the interrupt controllers. All vCPUs have to exist already.
pub fn create(vm: &VmFd, cpus: u32) -> Result<Controllers, KvmError> {
    let mut device =
        kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_RISCV_AIA, ..Default::default() };
    let device = vm.create_device(&mut device).operation("create the interrupt controllers")?;
    let config = |attribute: u32, value: u32| set(&device, KVM_DEV_RISCV_AIA_GRP_CONFIG, attribute, &value);
    let address = |attribute: u32, value: u64| set(&device, KVM_DEV_RISCV_AIA_GRP_ADDR, attribute, &value);
    // If the host has guest interrupt files, KVM permits no more identities than they have.
    let has_spare = config(KVM_DEV_RISCV_AIA_CONFIG_IDS, REAL_IDS).is_ok();
    if !has_spare {
        config(KVM_DEV_RISCV_AIA_CONFIG_IDS, IDS)?;
    }
    config(KVM_DEV_RISCV_AIA_CONFIG_SRCS, aia::SOURCES)?;
    config(KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, cpus.next_power_of_two().trailing_zeros())?;
    address(KVM_DEV_RISCV_AIA_ADDR_APLIC, aia::APLIC)?;
    for cpu in 0..cpus {
        address(1 + cpu, imsic(cpu))?;
    }
    set(&device, KVM_DEV_RISCV_AIA_GRP_CTRL, KVM_DEV_RISCV_AIA_CTRL_INIT, &())?;
    Ok(Controllers { device: Arc::new(device), cpus, has_spare })
}

/// The interrupt controllers of a machine.
#[derive(Clone)]
pub struct Controllers {
    device: Arc<DeviceFd>,
    cpus: u32,
    /// Whether [`SPARE_ID`] exists.
    has_spare: bool,
}

/// The registers of the interrupt controllers, in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Of the APLIC, in the order of [`aplic_registers`].
    aplic: Vec<u64>,
    /// The APLIC's `domaincfg`: whether it sends messages.
    domain: u64,
    /// Of each vCPU's IMSIC, in the order of [`IMSIC_REGISTERS`].
    imsics: Vec<[u64; IMSIC_REGISTERS.len()]>,
}

/// Offset of the APLIC's register `domaincfg` (AIA, 4.5).
const DOMAIN: u32 = 0;

/// Returns the offsets of the APLIC's other registers, in an order in which they can be set: `genmsi`, then `sourcecfg`
/// and `target` of each source, what is pending, and what is enabled. KVM ignores what is pending of a source that is
/// not configured.
fn aplic_registers() -> impl Iterator<Item = u32> {
    const GENERATE: u32 = 0x3000;
    let of_each_source = |first: u32| (0..aia::SOURCES).map(move |source| first + 4 * source);
    // Source 0 does not exist, but has a bit.
    let of_each_word = |first: u32| (0..=aia::SOURCES / 32).map(move |word| first + 4 * word);
    let configuration = of_each_source(0x0004).chain(of_each_source(0x3004));
    [GENERATE].into_iter().chain(configuration).chain(of_each_word(0x1c00)).chain(of_each_word(0x1e00))
}

/// The IMSIC's registers `eidelivery`, `eithreshold`, and which of its identities are pending (`eip0`) and enabled
/// (`eie0`).
const IMSIC_REGISTERS: [u32; 4] = [0x70, THRESHOLD, 0x80, 0xc0];
const THRESHOLD: u32 = 0x72;
// A register of each kind has the bits of all identities that the guest is told of.
const _: () = assert!(IDS < u64::BITS);

impl Controllers {
    /// Makes KVM check again whether an external interrupt is pending for a vCPU that does not run. This is necessary
    /// after `sip` was written: without IMSICs in hardware, KVM then loses an external interrupt that has arrived since
    /// `sip` was read. A message with [`SPARE_ID`] does it, or else two requests that read and write the threshold.
    pub fn recheck_pending(&self, vm: &VmFd, cpu: u8) -> Result<(), KvmError> {
        if self.has_spare {
            let address = imsic(cpu.into());
            let message = kvm_msi {
                address_lo: u32::try_from(address & u64::from(u32::MAX)).expect("it is the low half"),
                address_hi: u32::try_from(address >> 32).expect("it is the high half"),
                data: SPARE_ID,
                ..Default::default()
            };
            return vm.signal_msi(message).map(drop).operation("send a message to an interrupt controller");
        }
        let attribute = imsic_attribute(cpu.into(), THRESHOLD);
        // Writing the current value has no other effect than the check.
        let value = self.get(KVM_DEV_RISCV_AIA_GRP_IMSIC, attribute)?;
        self.set(KVM_DEV_RISCV_AIA_GRP_IMSIC, attribute, value)
    }

    /// Reads all registers. No vCPU may run meanwhile.
    pub fn save(&self) -> Result<State, KvmError> {
        let aplic = |register| self.get(KVM_DEV_RISCV_AIA_GRP_APLIC, register);
        let imsic = |cpu| {
            let mut values = [0; IMSIC_REGISTERS.len()];
            for (value, register) in values.iter_mut().zip(IMSIC_REGISTERS) {
                *value = self.get(KVM_DEV_RISCV_AIA_GRP_IMSIC, imsic_attribute(cpu, register))?;
            }
            Ok(values)
        };
        Ok(State {
            aplic: aplic_registers().map(aplic).collect::<Result<_, _>>()?,
            domain: aplic(DOMAIN)?,
            imsics: (0..self.cpus).map(imsic).collect::<Result<_, _>>()?,
        })
    }

    /// Sets all registers. The vCPUs' registers have been set before: setting `sip` undoes what is pending.
    pub fn restore(&self, state: &State) -> Result<(), KvmError> {
        // `genmsi`, the first, sends a message. The IMSICs' registers are set afterwards, and have no trace of it.
        for (register, value) in aplic_registers().zip(&state.aplic) {
            self.set(KVM_DEV_RISCV_AIA_GRP_APLIC, register, *value)?;
        }
        for (cpu, values) in (0..self.cpus).zip(&state.imsics) {
            for (register, value) in IMSIC_REGISTERS.into_iter().zip(values) {
                self.set(KVM_DEV_RISCV_AIA_GRP_IMSIC, imsic_attribute(cpu, register), *value)?;
            }
        }
        // Last: the APLIC sends messages for what is pending.
        self.set(KVM_DEV_RISCV_AIA_GRP_APLIC, DOMAIN, state.domain)
    }

    fn get(&self, group: u32, attribute: u32) -> Result<u64, KvmError> {
        // The APLIC's registers have half of this size: the upper half stays 0.
        let mut value = 0_u64;
        let mut attribute =
            kvm_device_attr { group, attr: attribute.into(), addr: &raw mut value as u64, flags: 0 };
        // SAFETY: no attribute of this device is larger, and KVM writes to `value` only during the call.
        unsafe { self.device.get_device_attr(&mut attribute) }.operation("read an interrupt controller")?;
        Ok(value)
    }

    fn set(&self, group: u32, attribute: u32, value: u64) -> Result<(), KvmError> {
        set(&self.device, group, attribute, &value)
    }
}

fn imsic_attribute(cpu: u32, register: u32) -> u32 {
    cpu << KVM_DEV_RISCV_AIA_IMSIC_ISEL_BITS | register
}

/// Returns the address of a CPU's IMSIC.
pub fn imsic(cpu: u32) -> u64 {
    aia::IMSIC + u64::from(cpu) * u64::from(KVM_DEV_RISCV_IMSIC_SIZE)
}

fn set<T>(device: &DeviceFd, group: u32, attribute: u32, value: &T) -> Result<(), KvmError> {
    let addr = std::ptr::from_ref(value) as u64;
    let attribute = kvm_device_attr { group, attr: attribute.into(), addr, flags: 0 };
    device.set_device_attr(&attribute).operation("set the interrupt controllers")
}
