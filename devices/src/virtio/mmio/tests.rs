use proptest::prelude::*;
use vm_memory::Bytes;
use vm_memory::GuestAddress;

use super::super::testing::Driver;
use super::*;

/// Answers every request with its own bytes, backwards.
#[derive(Default)]
struct Mirror {
    resets: u32,
    /// The driver's interrupts, to be looked at whenever a request is taken.
    interrupts: Option<EventFd>,
    /// How many had been raised by then, since the request before.
    raised: Vec<u64>,
}

impl Device for Mirror {
    fn id(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        1 << 5
    }
    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3]
    }
    fn queues(&self) -> Vec<u16> {
        vec![16, 16]
    }
    fn serve(&mut self, queues: &mut Queues) {
        use std::io::{Read, Write};
        for queue in 0..2 {
            while let Some(mut request) = queues.next(queue) {
                self.raised.extend(self.interrupts.as_ref().map(|raised| raised.read().unwrap_or(0)));
                let mut text = Vec::new();
                let _ = request.reader.by_ref().take(1000).read_to_end(&mut text);
                text.reverse();
                let written = request.writer.write(&text).unwrap_or(0);
                queues.done(request.head, u32::try_from(written).unwrap());
            }
        }
    }
    fn reset(&mut self) {
        self.resets += 1;
    }
}

fn mirror() -> Mirror {
    Mirror::default()
}

#[test]
fn a_driver_finds_the_device_that_is_there() {
    let driver = Driver::new(&mirror());
    assert_eq!([0, 4, 8].map(|register| driver.read(register)), [MAGIC, 2, 42]);
    assert_eq!(driver.read(0x10), 1 << 5 | 1 << 29);
    driver.write(0x14, 1);
    assert_eq!(driver.read(0x10), 1);
    let mut config = [9; 4];
    driver.transport.read(0x101, &mut config);
    assert_eq!(config, [2, 3, 0, 0]);
}

#[test]
fn a_request_is_answered_and_the_driver_told() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    assert_eq!((driver.read(0x70), driver.transport.has_driver()), (15, true));
    let answer = driver.ask(1, b"abc", 8);
    driver.serve(&mut device);
    assert_eq!(driver.answered(1), Some(3));
    assert_eq!(driver.bytes(answer, 3), b"cba");
    assert_eq!(driver.interrupt.read().unwrap(), 1);
    assert_eq!(driver.read(0x60), 1);
    driver.write(0x64, 1);
    assert_eq!(driver.read(0x60), 0);
}

/// How many interrupts there had been when each of four requests was taken, and how many at the end.
fn interrupts_of_four_requests(features: u64, looks: impl Fn(&Driver)) -> (Vec<u64>, u64) {
    let mut device = mirror();
    let mut driver = Driver::new(&device);
    driver.set_up(1 << 32 | features);
    device.interrupts = Some(driver.interrupt.try_clone().unwrap());
    for text in [b"a", b"b", b"c", b"d"] {
        driver.ask(0, text, 1);
    }
    looks(&driver);
    driver.serve(&mut device);
    (device.raised, driver.interrupt.read().unwrap_or(0))
}

#[test]
fn a_request_that_is_done_does_not_wait_for_the_next_one() {
    assert_eq!(interrupts_of_four_requests(0, |_| {}), (vec![0, 1, 1, 1], 1));
}

#[test]
fn a_driver_that_has_not_looked_yet_is_told_once() {
    let by_index = 1 << VIRTIO_RING_F_EVENT_IDX;
    assert_eq!(interrupts_of_four_requests(by_index, |_| {}), (vec![0, 1, 0, 0], 0));
    // It wants to hear of the third one: that is behind the available ring.
    let third = |driver: &Driver| {
        let used_event = Driver::rings(0) + 0x404 + 16 * 2;
        driver.memory.write_obj(2_u16, GuestAddress(used_event)).unwrap();
    };
    assert_eq!(interrupts_of_four_requests(by_index, third), (vec![0, 0, 0, 1], 0));
}

#[test]
fn features_that_nobody_offered_are_refused() {
    for features in [0, 1 << 32 | 1 << 40] {
        let driver = Driver::new(&mirror());
        driver.set_up(features);
        assert_eq!(driver.read(0x70) & (status::FEATURES_OK | status::DRIVER_OK), 0, "{features:#x}");
    }
}

#[test]
fn after_a_reset_the_driver_begins_anew() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.ask(0, b"x", 1);
    driver.write(0x70, 0);
    driver.serve(&mut device);
    assert_eq!((device.resets, driver.answered(0), driver.read(0x44)), (1, None, 0));
    driver.set_up(1 << 32);
    driver.serve(&mut device);
    assert_eq!((device.resets, driver.answered(0)), (1, Some(1)));
}

#[test]
fn a_request_outside_of_memory_comes_back_empty() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.ask(0, b"x", 1);
    driver.descriptor(Driver::rings(0), 0, u64::MAX - 1, 1, 0, 0);
    driver.serve(&mut device);
    assert_eq!(driver.answered(0), Some(0));
}

#[test]
fn a_ring_that_makes_no_sense_stops_the_device_until_a_reset() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.memory.write_obj(1000_u16, GuestAddress(Driver::rings(0) + 0x402)).unwrap();
    driver.serve(&mut device);
    assert_eq!((driver.read(0x70) & status::NEEDS_RESET, driver.read(0x60)), (status::NEEDS_RESET, 2));
    driver.ask(1, b"x", 1);
    driver.serve(&mut device);
    assert_eq!(driver.answered(1), None);
}

#[test]
fn where_no_device_is_the_bus_floats() {
    let driver = Driver::new(&mirror());
    let bus = MmioBus::new(0x1000, vec![driver.transport.clone()]);
    let read = |address| {
        let mut data = [0; 4];
        bus.read(address, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!((read(0x1000), read(0x0ffc), read(0x2000)), (MAGIC, u32::MAX, u32::MAX));
    bus.write(u64::MAX, &[0; 8]);
}

/// A step of a hostile guest's.
#[derive(Debug, Clone)]
enum Step {
    Register(u64, u32),
    Access(u64, usize),
    Memory(u64, u64),
    Serve,
}

fn step() -> impl Strategy<Value = Step> {
    let value = prop_oneof![0..32_u32, any::<u32>(), Just(0x1000), Just(0x2000)];
    let register = (0..0x30_u64).prop_map(|word| word * 4);
    let memory = prop_oneof![0..0x4000_u64, (0x3f_0000_u64..0x40_0000)];
    prop_oneof![
        4 => (register, value).prop_map(|(register, value)| Step::Register(register, value)),
        1 => (any::<u64>(), 0..9_usize).prop_map(|(offset, size)| Step::Access(offset, size)),
        3 => (memory, any::<u64>()).prop_map(|(at, value)| Step::Memory(at, value)),
        2 => Just(Step::Serve),
    ]
}

proptest! {
    #[test]
    fn no_driver_brings_the_device_down(ready: bool, steps in proptest::collection::vec(step(), 0..60)) {
        let mut device = mirror();
        let driver = if ready { Driver::ready(&device) } else { Driver::new(&device) };
        for step in steps {
            match step {
                Step::Register(register, value) => driver.write(register, value),
                Step::Access(offset, size) => {
                    driver.transport.write(offset, &vec![0xff; size]);
                    driver.transport.read(offset, &mut vec![0; size]);
                }
                Step::Memory(at, value) => {
                    let _ = driver.memory.write_obj(value, GuestAddress(at));
                }
                Step::Serve => driver.serve(&mut device),
            }
        }
        // Whatever it was, a reset mends it.
        driver.write(0x70, 0);
        driver.serve(&mut device);
        prop_assert_eq!(driver.read(0x70), 0);
    }
}
