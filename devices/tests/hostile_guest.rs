//! Random port accesses of any width and order must not crash a device.

use std::io::sink;

use devices::{AcpiSleep, DebugExit, End, FwCfg, PortBus, ResetOn, Serial};
use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const COM1: u16 = 0x3f8;
const FW_CFG: u16 = 0x510;
const SLEEP: u16 = 0x600;
const RESET: u16 = 0x602;
const DEBUG_EXIT: u16 = 0xf4;

#[derive(Debug, Clone)]
enum Access {
    Read(u16, usize),
    Write(u16, Vec<u8>),
    Receive(Vec<u8>),
}

fn bus() -> (PortBus, Serial) {
    let event = || EventFd::new(EFD_NONBLOCK).unwrap();
    let serial = Serial::new(event(), event(), sink());
    let mut bus = PortBus::default();
    bus.attach(COM1, Serial::PORTS, serial.clone()).unwrap();
    bus.attach(FW_CFG, 2, FwCfg::new(4, 1 << 30)).unwrap();
    bus.attach(SLEEP, 2, AcpiSleep).unwrap();
    bus.attach(RESET, 1, ResetOn::ACPI).unwrap();
    bus.attach(DEBUG_EXIT, 4, DebugExit).unwrap();
    (bus, serial)
}

/// Ports of the devices and near them, and arbitrary ports.
fn port() -> impl Strategy<Value = u16> {
    prop_oneof![
        COM1 - 4..COM1 + 12,
        FW_CFG - 4..FW_CFG + 6,
        SLEEP - 4..SLEEP + 8,
        DEBUG_EXIT - 4..DEBUG_EXIT + 8,
        any::<u16>()
    ]
}

fn access() -> impl Strategy<Value = Access> {
    let width = prop_oneof![Just(1_usize), Just(2), Just(4)];
    let data = width.clone().prop_flat_map(|width| prop::collection::vec(any::<u8>(), width));
    prop_oneof![
        (port(), width).prop_map(|(port, width)| Access::Read(port, width)),
        (port(), data).prop_map(|(port, data)| Access::Write(port, data)),
        prop::collection::vec(any::<u8>(), 0..100).prop_map(Access::Receive),
    ]
}

proptest! {
    #[test]
    fn no_access_panics_and_only_the_exit_registers_end_the_machine(
        accesses in prop::collection::vec(access(), 1..200)
    ) {
        let (bus, serial) = bus();
        for access in accesses {
            match access {
                Access::Read(port, width) => bus.read(port, &mut vec![0; width]),
                Access::Write(port, data) => {
                    let expected = match (port, data[0]) {
                        (RESET, 1) if data.len() == 1 => Some(End::Reboot),
                        (SLEEP, value) if data.len() <= 2 && value & 0x3c == 0x34 => Some(End::PowerOff),
                        (at, value) if at >= DEBUG_EXIT && usize::from(at) + data.len() <= usize::from(DEBUG_EXIT) + 4 => {
                            Some(End::DebugExit(value))
                        }
                        _ => None,
                    };
                    prop_assert_eq!(bus.write(port, &data), expected);
                }
                Access::Receive(input) => {
                    let taken = serial.receive(&input).unwrap();
                    prop_assert!(taken <= input.len());
                }
            }
        }
    }
}
