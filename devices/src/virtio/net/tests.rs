//! A driver that sends and receives frames over a socket.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::super::Transport;
use super::super::testing::Driver;
use super::*;
use crate::net::{Filter, Stream};

const MERGEABLE: u64 = 1 << 32;
const HEADER: [u8; 12] = [0; 12];
const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const RECEIVEQ: usize = receiveq(0);
const TRANSMITQ: usize = transmitq(0);

fn device() -> (UnixStream, Net) {
    let ([theirs], net) = device_with_pairs();
    (theirs, net)
}

fn device_with_pairs<const PAIRS: usize>() -> ([UnixStream; PAIRS], Net) {
    let sockets = [(); PAIRS].map(|()| UnixStream::pair().unwrap());
    let mut backends: Vec<Box<dyn Backend>> = Vec::new();
    let theirs = sockets.map(|(theirs, ours)| {
        theirs.set_nonblocking(true).unwrap();
        backends.push(Box::new(Stream::new(ours.into(), Filter::Open)));
        theirs
    });
    let offer = Offer { pairs: u16::try_from(PAIRS).unwrap(), ..Stream::OFFER };
    (theirs, Net::new(MAC, offer, backends))
}

fn ready() -> (UnixStream, Net, Driver) {
    let (theirs, net) = device();
    let driver = Driver::ready(&net);
    (theirs, net, driver)
}

/// Sends a frame to the guest.
fn send(theirs: &mut UnixStream, content: &[u8]) {
    let length = u32::try_from(content.len()).unwrap();
    theirs.write_all(&[&length.to_be_bytes(), content].concat()).unwrap();
}

#[test]
fn the_guest_sees_an_address_and_an_mtu() {
    let (_theirs, net) = device();
    assert_eq!(net.config(), [2, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0xf0, 0xff]);
    assert_eq!(net.mac.to_string(), "02:00:00:00:00:01");
}

#[test]
fn a_frame_of_the_guest_arrives_behind_its_length() {
    let (mut theirs, mut net, mut driver) = ready();
    driver.submit(TRANSMITQ, &[&HEADER[..], b"frame"].concat(), 0);
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(TRANSMITQ), Some(0));
    let mut bytes = [0; 9];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0\0\x05frame");
}

#[test]
fn what_is_no_frame_is_not_sent_but_comes_back() {
    let (mut theirs, mut net, mut driver) = ready();
    driver.submit(TRANSMITQ, b"short", 0);
    // A checksum that is not in the frame, and segments that were not offered.
    driver.submit(TRANSMITQ, &[&[1, 0, 0, 0, 0, 0, 9, 9, 9, 9, 0, 0], &b"bad"[..]].concat(), 0);
    driver.submit(TRANSMITQ, &[&[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &b"bad"[..]].concat(), 0);
    driver.submit(TRANSMITQ, &[&HEADER[..], b"good"].concat(), 0);
    driver.serve(&mut net);
    assert_eq!((0..5).map_while(|_| driver.next_completion(TRANSMITQ)).count(), 4);
    let mut bytes = [0; 8];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0\0\x04good");
}

#[test]
fn a_frame_waits_for_a_buffer() {
    let (mut theirs, mut net, mut driver) = ready();
    send(&mut theirs, b"frame");
    driver.serve(&mut net);
    assert!(net.awaits().is_empty(), "it would be readable without end");
    let buffer = driver.submit(RECEIVEQ, &[], 100);
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(RECEIVEQ), Some(17));
    assert_eq!(driver.bytes(buffer, 17), [&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], &b"frame"[..]].concat());
    assert!(net.awaits()[0].1.contains(PollFlags::IN));
}

#[test]
fn a_large_frame_is_in_several_buffers_when_all_of_them_are_there() {
    let (mut theirs, mut net, mut driver) = ready();
    driver.reset(MERGEABLE);
    send(&mut theirs, &[7; 50]);
    let mut buffers: Vec<_> = (0..2).map(|_| driver.submit(RECEIVEQ, &[], 30)).collect();
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(RECEIVEQ), None);
    buffers.push(driver.submit(RECEIVEQ, &[], 30));
    driver.serve(&mut net);
    let lengths: Vec<_> = (0..4).map_while(|_| driver.next_completion(RECEIVEQ)).collect();
    assert_eq!(lengths, [30, 30, 2]);
    assert_eq!(driver.bytes(buffers[0], 30)[10..13], [3, 0, 7]);
    assert_eq!(driver.bytes(buffers[2], 2), [7, 7]);
}

#[test]
fn a_driver_that_joins_no_buffers_loses_what_is_too_long_for_one() {
    let (mut theirs, net) = device();
    let mut net = net;
    let mut driver = Driver::new(&net);
    // Without `VIRTIO_NET_F_MRG_RXBUF`.
    driver.set_up_with(1 << 32);
    send(&mut theirs, &[7; 50]);
    send(&mut theirs, b"short");
    for _ in 0..3 {
        driver.submit(RECEIVEQ, &[], 30);
    }
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(RECEIVEQ), Some(17));
    assert_eq!(driver.next_completion(RECEIVEQ), None);
}

#[test]
fn when_the_other_end_is_gone_the_link_is_down_and_the_guest_sends_into_the_void() {
    let (theirs, mut net, mut driver) = ready();
    driver.serve(&mut net);
    let generation = driver.read(0xfc);
    driver.write(0x64, 3);
    drop(theirs);
    driver.serve(&mut net);
    let mut status = [9; 2];
    driver.transport.read(0x106, &mut status);
    assert_eq!((status, driver.read(0x60)), ([0; 2], 2), "the driver is told");
    assert_ne!(driver.read(0xfc), generation);
    assert!(net.awaits().is_empty(), "it would be readable without end");
    driver.submit(TRANSMITQ, &[&HEADER[..], b"frame"].concat(), 0);
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(TRANSMITQ), Some(0));
}

#[test]
fn no_frame_of_before_a_reset_arrives_after_it() {
    let (mut theirs, mut net, mut driver) = ready();
    send(&mut theirs, b"old");
    driver.serve(&mut net);
    driver.reset(MERGEABLE);
    send(&mut theirs, b"new!");
    driver.submit(RECEIVEQ, &[], 100);
    driver.serve(&mut net);
    assert_eq!(driver.next_completion(RECEIVEQ), Some(16));
}

#[test]
fn a_restored_driver_is_told_that_the_link_is_up_again() {
    let (theirs, mut net, mut driver) = ready();
    driver.serve(&mut net);
    assert_eq!(driver.read(0x60), 0, "a driver that starts is told nothing");
    drop(theirs);
    driver.serve(&mut net);
    driver.write(0x64, 3);
    let (state, generation) = (driver.transport.save().unwrap(), driver.read(0xfc));
    let (_theirs, mut other) = device();
    driver.transport =
        Transport::new(&other, driver.memory.clone(), driver.interrupt.try_clone().unwrap()).unwrap();
    driver.transport.restore(&state).unwrap();
    other.restore(net.save().unwrap().as_ref()).unwrap();
    driver.serve(&mut other);
    let mut status = [9; 2];
    driver.transport.read(0x106, &mut status);
    assert_eq!((status, driver.read(0x60)), ([1, 0], 2));
    assert_ne!(driver.read(0xfc), generation);
}

/// Lets the driver use so many pairs. Returns the device's answer.
fn use_pairs(driver: &mut Driver, net: &mut Net, queue: usize, pairs: u8) -> Option<u8> {
    let answer = driver.submit(queue, &[4, 0, pairs, 0], 1);
    driver.serve(net);
    driver.next_completion(queue).map(|_| driver.bytes(answer, 1)[0])
}

#[test]
fn a_driver_uses_as_many_pairs_as_it_says() {
    let ([mut first, mut second], mut net) = device_with_pairs();
    let mut driver = Driver::ready(&net);
    assert_eq!(net.config()[8..10], [2, 0]);
    let buffer = [0, 2].map(|queue| driver.submit(queue, &[], 100));
    send(&mut second, b"second");
    driver.serve(&mut net);
    assert_eq!(
        driver.bytes(buffer[0], 18)[12..],
        *b"second",
        "only the first pair is used until the driver says more"
    );
    assert_eq!(use_pairs(&mut driver, &mut net, 4, 2), Some(0));
    send(&mut second, b"second");
    driver.serve(&mut net);
    assert_eq!(driver.bytes(buffer[1], 18)[12..], *b"second");
    for (queue, theirs) in [(1, &mut first), (3, &mut second)] {
        driver.submit(queue, &[&HEADER[..], b"frame"].concat(), 0);
        driver.serve(&mut net);
        let mut bytes = [0; 9];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0\0\x05frame");
    }
}

#[test]
fn a_number_of_pairs_that_there_is_not_is_refused() {
    let (_theirs, mut net) = device_with_pairs::<2>();
    let mut driver = Driver::ready(&net);
    for pairs in [0, 3, 255] {
        assert_eq!(use_pairs(&mut driver, &mut net, 4, pairs), Some(1));
    }
    for command in [&[4, 0, 1][..], &[1, 0, 1, 0], &[4, 1, 1, 0], &[]] {
        let answer = driver.submit(4, command, 1);
        driver.serve(&mut net);
        assert_eq!(driver.next_completion(4), Some(1));
        assert_eq!(driver.bytes(answer, 1), [1], "{command:?}");
    }
}

#[test]
fn without_several_pairs_the_control_queue_comes_after_the_first() {
    let (_theirs, mut net) = device_with_pairs::<2>();
    let mut driver = Driver::new(&net);
    driver.set_up_with(1 << 32 | 1 << VIRTIO_NET_F_CTRL_VQ);
    assert_eq!(use_pairs(&mut driver, &mut net, 2, 2), Some(1));
}

#[test]
fn a_saved_device_keeps_its_pairs() {
    let (_theirs, mut net) = device_with_pairs::<2>();
    let mut driver = Driver::ready(&net);
    use_pairs(&mut driver, &mut net, 4, 2);
    let saved = net.save().unwrap();
    assert_eq!(saved, Some(DeviceState::Net { pairs: 2 }));
    let (_theirs, mut other) = device_with_pairs::<2>();
    other.restore(saved.as_ref()).unwrap();
    assert_eq!(other.save().unwrap(), saved);
    let (_theirs, mut smaller) = device();
    assert!(smaller.restore(saved.as_ref()).is_err());
    assert!(other.restore(Some(&DeviceState::Net { pairs: 0 })).is_err());
}
