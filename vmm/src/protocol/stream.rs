//! A snapshot on the control socket: the state, and then the memory in parts, each behind where it belongs and its
//! length. A part of no length is the end.

use std::io::{self, Read, Write};

use tally_machine::{GuestRam, PART, PageMap};

/// Longest state: that of a guest that has looked up all the files that it may, in shares.
pub const MAX_STATE: u64 = 256 << 20;

/// Sends a state and a memory. No vCPU may run meanwhile.
pub fn send(mut to: impl Write, state: &[u8], ram: &GuestRam, pages: &PageMap) -> io::Result<()> {
    to.write_all(state)?;
    ram.for_each_part(pages, |offset, bytes| {
        to.write_all(&header(offset, bytes.len()))?;
        to.write_all(bytes)
    })?;
    to.write_all(&header(0, 0))
}

fn header(offset: u64, len: usize) -> Vec<u8> {
    [offset.to_le_bytes(), (len as u64).to_le_bytes()].concat()
}

/// Receives a state of this length.
pub fn receive_state(mut from: impl Read, len: u64) -> io::Result<Vec<u8>> {
    if len > MAX_STATE {
        return Err(io::Error::other("it sends too long a state"));
    }
    let mut state = Vec::new();
    from.by_ref().take(len).read_to_end(&mut state)?;
    if state.len() as u64 == len { Ok(state) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Receives the next part of a memory, and returns where it belongs. Returns `None` at the end.
pub fn receive_part(mut from: impl Read, part: &mut Vec<u8>) -> io::Result<Option<u64>> {
    let mut header = [0; 16];
    from.read_exact(&mut header)?;
    let ([offset, len], _) = header.as_chunks::<8>() else { unreachable!("it has two words") };
    let (offset, len) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*len));
    match usize::try_from(len) {
        Ok(0) => return Ok(None),
        Ok(len) if len <= PART => part.resize(len, 0),
        _ => return Err(io::Error::other("it sends too long a part of its memory")),
    }
    from.read_exact(part)?;
    Ok(Some(offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_received_until_the_end() {
        let sent =
            [header(4096, 3), b"abc".to_vec(), header(1 << 40, 1), b"d".to_vec(), header(0, 0)].concat();
        let (mut from, mut part) = (&sent[..], Vec::new());
        assert_eq!((receive_part(&mut from, &mut part).unwrap(), &part[..]), (Some(4096), &b"abc"[..]));
        assert_eq!((receive_part(&mut from, &mut part).unwrap(), &part[..]), (Some(1 << 40), &b"d"[..]));
        assert_eq!(receive_part(&mut from, &mut part).unwrap(), None);
        assert!(receive_part(&mut from, &mut part).is_err(), "nothing is left");
    }

    #[test]
    fn whatever_a_vm_says_no_more_memory_is_taken() {
        let mut part = Vec::new();
        for len in [PART + 1, usize::MAX] {
            assert!(receive_part(&header(0, len)[..], &mut part).is_err());
        }
        assert!(receive_part(&[header(0, 5), b"four".to_vec()].concat()[..], &mut part).is_err());
        assert!(receive_state(&b"state"[..], MAX_STATE + 1).is_err());
        assert!(receive_state(&b"state"[..], 6).is_err());
        assert_eq!(receive_state(&b"state"[..], 5).unwrap(), b"state");
    }
}
