use proptest::prelude::*;
use vm_memory::Bytes;
use vm_memory::GuestAddress;

use super::super::testing::Driver;
use super::*;

/// Replies to every request with its bytes in reverse.
#[derive(Default)]
struct Mirror {
    resets: u32,
    /// The driver's interrupt. It is read each time a request is taken.
    interrupt: Option<EventFd>,
    /// For each request, the number of interrupts since the previous request.
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
    fn queue_sizes(&self) -> Vec<u16> {
        vec![16, 16]
    }
    fn serve(&mut self, queues: &mut Queues) {
        use std::io::{Read, Write};
        for queue in 0..2 {
            while let Some(mut request) = queues.pop(queue) {
                self.raised.extend(self.interrupt.as_ref().map(|raised| raised.read().unwrap_or(0)));
                let mut text = Vec::new();
                let _ = request.reader.by_ref().take(1000).read_to_end(&mut text);
                text.reverse();
                let written = request.writer.write(&text).unwrap_or(0);
                queues.complete(request.head, u32::try_from(written).unwrap());
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
fn a_driver_reads_the_device_s_identity_features_and_configuration() {
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
fn a_request_is_completed_and_the_driver_interrupted() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    assert_eq!((driver.read(0x70), driver.transport.has_driver()), (15, true));
    let answer = driver.submit(1, b"abc", 8);
    driver.serve(&mut device);
    assert_eq!(driver.next_completion(1), Some(3));
    assert_eq!(driver.bytes(answer, 3), b"cba");
    assert_eq!(driver.interrupt.read().unwrap(), 1);
    assert_eq!(driver.read(0x60), 1);
    driver.write(0x64, 1);
    assert_eq!(driver.read(0x60), 0);
}

/// Serves four requests. Returns the number of new interrupts when each request was taken, and at the end.
fn interrupts_of_four_requests(features: u64, prepare: impl Fn(&Driver)) -> (Vec<u64>, u64) {
    let mut device = mirror();
    let mut driver = Driver::new(&device);
    driver.set_up(1 << 32 | features);
    device.interrupt = Some(driver.interrupt.try_clone().unwrap());
    for text in [b"a", b"b", b"c", b"d"] {
        driver.submit(0, text, 1);
    }
    prepare(&driver);
    driver.serve(&mut device);
    (device.raised, driver.interrupt.read().unwrap_or(0))
}

#[test]
fn the_driver_is_interrupted_after_each_request() {
    assert_eq!(interrupts_of_four_requests(0, |_| {}), (vec![0, 1, 1, 1], 1));
}

#[test]
fn a_driver_with_event_idx_is_interrupted_once_until_it_updates_used_event() {
    let event_idx = 1 << VIRTIO_RING_F_EVENT_IDX;
    assert_eq!(interrupts_of_four_requests(event_idx, |_| {}), (vec![0, 1, 0, 0], 0));
    // The driver requests a notification for the third request. `used_event` is behind the available ring.
    let third = |driver: &Driver| {
        let used_event = Driver::rings(0) + 0x404 + 16 * 2;
        driver.memory.write_obj(2_u16, GuestAddress(used_event)).unwrap();
    };
    assert_eq!(interrupts_of_four_requests(event_idx, third), (vec![0, 0, 0, 1], 0));
}

#[test]
fn features_that_were_not_offered_are_refused() {
    for features in [0, 1 << 32 | 1 << 40] {
        let driver = Driver::new(&mirror());
        driver.set_up(features);
        assert_eq!(driver.read(0x70) & (status::FEATURES_OK | status::DRIVER_OK), 0, "{features:#x}");
    }
}

#[test]
fn after_a_reset_the_driver_sets_up_the_device_again() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.submit(0, b"x", 1);
    driver.write(0x70, 0);
    driver.serve(&mut device);
    assert_eq!((device.resets, driver.next_completion(0), driver.read(0x44)), (1, None, 0));
    driver.set_up(1 << 32);
    driver.serve(&mut device);
    assert_eq!((device.resets, driver.next_completion(0)), (1, Some(1)));
}

#[test]
fn a_request_outside_of_memory_is_completed_without_data() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.submit(0, b"x", 1);
    driver.descriptor(Driver::rings(0), 0, u64::MAX - 1, 1, 0, 0);
    driver.serve(&mut device);
    assert_eq!(driver.next_completion(0), Some(0));
}

#[test]
fn an_invalid_ring_stops_the_device_until_a_reset() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.memory.write_obj(1000_u16, GuestAddress(Driver::rings(0) + 0x402)).unwrap();
    driver.serve(&mut device);
    assert_eq!((driver.read(0x70) & status::NEEDS_RESET, driver.read(0x60)), (status::NEEDS_RESET, 2));
    driver.submit(1, b"x", 1);
    driver.serve(&mut device);
    assert_eq!(driver.next_completion(1), None);
}

#[test]
fn reads_of_addresses_without_a_device_return_all_ones() {
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

/// An action of a hostile guest.
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
    fn no_driver_can_crash_the_device(ready: bool, steps in proptest::collection::vec(step(), 0..60)) {
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
        // A reset always works.
        driver.write(0x70, 0);
        driver.serve(&mut device);
        prop_assert_eq!(driver.read(0x70), 0);
    }
}
