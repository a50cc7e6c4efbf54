use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

use proptest::prelude::*;
use vm_memory::Bytes;
use vm_memory::GuestAddress;

use super::super::Queues;
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
fn registers_are_accessed_while_a_request_is_processed() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.submit(0, b"x", 1);
    let (began, has_begun) = channel();
    let (end, may_end) = channel::<()>();
    let (answer, answers) = channel();
    std::thread::scope(|scope| {
        let driver = &driver;
        scope.spawn(move || {
            driver.transport.serve(&mut device, |_, queues| {
                let _request = queues.pop(0);
                began.send(()).unwrap();
                let _ = may_end.recv();
            });
        });
        has_begun.recv().unwrap();
        scope.spawn(move || {
            let before = driver.read(0x70);
            driver.write(0x50, 0);
            driver.write(0x70, 0);
            let _ = answer.send((before, driver.read(0x70)));
        });
        let seen = answers.recv_timeout(Duration::from_secs(20));
        drop(end);
        assert_eq!(seen, Ok((15, 0)), "status before and after a reset");
    });
}

#[test]
fn a_reset_abandons_the_request_that_is_processed() {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    let reply = driver.submit(0, b"x", 1);
    let transport = Arc::clone(&driver.transport);
    transport.serve(&mut device, |_, queues| {
        let mut request = queues.pop(0).unwrap();
        driver.write(0x70, 0);
        driver.set_up(1 << 32);
        driver.submit(1, b"next", 4);
        assert!(request.reader.read_exact(&mut [0]).is_err());
        assert!(request.writer.write_all(b"y").is_err());
        queues.complete(request.head, 1);
        assert!(!queues.has_request(1) && queues.pop(1).is_none(), "the device is not reset yet");
    });
    assert_eq!((driver.bytes(reply, 1), driver.next_completion(0)), (vec![0], None));
    assert!(driver.interrupt.read().is_err());
    driver.serve(&mut device);
    assert_eq!((device.resets, driver.next_completion(1)), (1, Some(4)));
}

/// Serves a request whose chain begins with this descriptor. Returns the status, and the reply's length.
fn served_chain(address: u64, length: u32, flags: u16, next: u16) -> (u32, Option<u32>) {
    let mut device = mirror();
    let mut driver = Driver::ready(&device);
    driver.submit(0, b"x", 1);
    driver.descriptor(Driver::rings(0), 0, address, length, flags, next);
    // A table of one descriptor, for a chain that is an indirect one.
    driver.descriptor(0x20_0000, 0, 0x30_0000, 4, 0, 0);
    driver.serve(&mut device);
    (driver.read(0x70) & status::NEEDS_RESET, driver.next_completion(0))
}

#[test]
fn a_chain_that_breaks_the_specification_stops_the_device() {
    let (next, indirect) = (1, 4);
    let broken = (status::NEEDS_RESET, None);
    assert_eq!(served_chain(0x20_0000, 16, indirect, 0), broken, "indirect descriptors were not negotiated");
    assert_eq!(served_chain(0x20_0000, 16, indirect | next, 1), broken);
    assert_eq!(served_chain(0x30_0000, 4, next, 0), broken, "a loop");
    assert_eq!(served_chain(0x30_0000, 4, next, 16), broken, "a descriptor past the table");
    assert_eq!(served_chain(0x30_0000, 4, next, 1), (0, Some(1)));
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
