//! Tests that messages are decoded as they were encoded, and that arbitrary bytes are handled.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;

fn string() -> impl Strategy<Value = OsString> {
    vec(1..=255_u8, 0..20).prop_map(OsString::from_vec)
}

fn variable() -> impl Strategy<Value = OsString> {
    string()
        .prop_map(|name| name.into_vec().into_iter().filter(|byte| *byte != b'=').collect::<Vec<_>>())
        .prop_map(OsString::from_vec)
}

fn size() -> impl Strategy<Value = Size> {
    any::<(u16, u16)>().prop_map(|(rows, columns)| Size { rows, columns })
}

fn share() -> impl Strategy<Value = Share> {
    let access = prop_oneof![Just(Access::ReadOnly), Just(Access::ReadWrite)];
    (string(), string(), access).prop_map(|(tag, path, access)| Share { tag, path, access })
}

fn network() -> impl Strategy<Value = Network> {
    let fields = (any::<[u8; 6]>(), option::of(any::<u32>()));
    fields.prop_map(|(address, server)| Network { address, name_server: server.map(Ipv4Addr::from) })
}

fn restored() -> impl Strategy<Value = Restored> {
    let time = (any::<u64>(), 0..1_000_000_000_u32);
    (time, any::<Entropy>()).prop_map(|((seconds, nanoseconds), entropy)| Restored {
        time: Duration::new(seconds, nanoseconds),
        entropy,
    })
}

fn start() -> impl Strategy<Value = Start> {
    let terminals =
        any::<(bool, bool, bool)>().prop_map(|(stdin, stdout, stderr)| Terminals { stdin, stdout, stderr });
    let settings =
        (vec(share(), 0..3), option::of(string()), terminals, option::of(size()), option::of(string()));
    let rest = (option::of(network()), option::of(restored()), vec(string(), 0..5));
    let root = (option::of(string()), option::of(string()), vec((variable(), string()), 0..3));
    (settings, rest, root).prop_map(|(settings, (network, restored, command), (root, user, environment))| {
        let (shares, folder, terminals, size, term) = settings;
        Start { root, shares, network, folder, terminals, size, term, user, environment, restored, command }
    })
}

fn to_guest() -> impl Strategy<Value = ToGuest> {
    prop_oneof![
        start().prop_map(ToGuest::Start),
        size().prop_map(ToGuest::Size),
        any::<u8>().prop_map(ToGuest::Signal),
        restored().prop_map(ToGuest::Restored),
    ]
}

fn to_host() -> impl Strategy<Value = ToHost> {
    prop_oneof![
        Just(ToHost::Ready),
        any::<u8>().prop_map(ToHost::SignalSent),
        any::<u8>().prop_map(ToHost::Exited),
        any::<String>().prop_map(ToHost::Failed),
    ]
}

/// Decodes a stream that arrives in pieces of these lengths, which are repeated as necessary.
fn decode<M: Message>(stream: &[u8], pieces: &[usize]) -> Result<Vec<M>, Error> {
    let mut decoder = Decoder::new();
    let mut messages = Vec::new();
    let (mut rest, mut pieces) = (stream, pieces.iter().cycle());
    while !rest.is_empty() {
        let piece;
        (piece, rest) = rest.split_at(rest.len().min(*pieces.next().unwrap()));
        decoder.feed(piece);
        while let Some(message) = decoder.next()? {
            messages.push(message);
        }
    }
    Ok(messages)
}

fn encode<M: Message>(messages: &[M]) -> Vec<u8> {
    messages.iter().flat_map(|message| message.encode().unwrap()).collect()
}

proptest! {
    #[test]
    fn messages_of_the_host_are_decoded_from_pieces_of_any_length(
        messages in vec(to_guest(), 0..6), pieces in vec(1..40_usize, 1..5)
    ) {
        prop_assert_eq!(decode::<ToGuest>(&encode(&messages), &pieces).unwrap(), messages);
    }

    #[test]
    fn messages_of_the_guest_are_decoded_from_pieces_of_any_length(
        messages in vec(to_host(), 0..6), pieces in vec(1..40_usize, 1..5)
    ) {
        prop_assert_eq!(decode::<ToHost>(&encode(&messages), &pieces).unwrap(), messages);
    }

    #[test]
    fn arbitrary_bytes_are_decoded_or_give_a_lasting_error(
        stream in vec(any::<u8>(), 0..200), pieces in vec(1..40_usize, 1..5)
    ) {
        // What is decoded can be encoded again.
        if let Ok(messages) = decode::<ToHost>(&stream, &pieces) {
            prop_assert!(encode(&messages).len() <= stream.len() * 3);
        }
        let mut decoder = Decoder::<ToGuest>::new();
        decoder.feed(&stream);
        if let Err(error) = std::iter::from_fn(|| decoder.next().transpose()).take(200).collect::<Result<Vec<_>, _>>() {
            prop_assert_eq!(decoder.next(), Err(error));
        }
    }

    #[test]
    fn a_corrupted_start_message_is_decoded_or_refused(start in start(), at: prop::sample::Index, byte: u8) {
        let mut frame = ToGuest::Start(start).encode().unwrap();
        let at = at.index(frame.len());
        frame[at] = byte;
        if let Ok(messages) = decode::<ToGuest>(&frame, &[64]) {
            prop_assert_eq!(decode::<ToGuest>(&encode(&messages), &[64]).unwrap(), messages);
        }
    }
}

#[test]
fn a_frame_has_the_documented_format() {
    let size = ToGuest::Size(Size { rows: 0x0102, columns: 80 });
    assert_eq!(size.encode().unwrap(), [2, 4, 0, 0, 0, 2, 1, 80, 0]);
    let start = Start {
        shares: vec![Share { tag: "work".into(), path: "/home/x".into(), access: Access::ReadOnly }],
        terminals: Terminals { stdin: true, ..Terminals::default() },
        size: Some(Size { rows: 24, columns: 80 }),
        command: vec!["echo".into(), "".into()],
        ..Start::default()
    };
    let text = b"ro=work\0/home/x\0terminal=stdin\0size=24x80\0--\0echo\0\0";
    let mut frame = vec![1, u8::try_from(text.len()).unwrap(), 0, 0, 0];
    frame.extend_from_slice(text);
    assert_eq!(ToGuest::Start(start).encode().unwrap(), frame);
}

#[test]
fn a_frame_that_is_too_long_is_refused_before_it_has_arrived() {
    let mut decoder = Decoder::<ToHost>::new();
    let length = u32::try_from(MAX_PAYLOAD + 1).unwrap();
    decoder.feed(&[FAILED]);
    decoder.feed(&length.to_le_bytes());
    assert_eq!(decoder.next(), Err(Error::TooLong(MAX_PAYLOAD + 1)));
}

#[test]
fn the_longest_message_is_decoded_and_a_longer_one_is_not_encoded() {
    let longest = ToHost::Failed("x".repeat(MAX_PAYLOAD));
    assert_eq!(decode::<ToHost>(&longest.encode().unwrap(), &[1000]).unwrap(), [longest]);
    assert_eq!(ToHost::Failed("x".repeat(MAX_PAYLOAD + 1)).encode(), Err(Error::TooLong(MAX_PAYLOAD + 1)));
}

#[test]
fn an_argument_with_a_nul_byte_is_not_encoded() {
    let start = Start { command: vec!["a\0b".into()], ..Start::default() };
    assert_eq!(ToGuest::Start(start).encode(), Err(Error::Nul));
}

#[test]
fn a_message_of_the_other_direction_is_invalid() {
    let signal = ToGuest::Signal(2).encode().unwrap();
    assert_eq!(decode::<ToHost>(&signal, &[64]), Err(Error::Malformed(SIGNAL)));
    assert_eq!(Error::Malformed(SIGNAL).to_string(), "a message of kind 0x03 is invalid");
}
