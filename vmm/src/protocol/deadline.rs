//! Connections with a deadline for the whole exchange. The kernel's timeouts are for one call each: a peer that sends a
//! byte now and then never exceeds them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Most bytes of one write: within a larger one, the kernel's timeout would begin anew for each part.
const CHUNK: usize = 16 << 10;

/// A connection whose reads and writes can have a timeout.
pub trait Timed: Read + Write {
    /// Sets the timeout of one read or write.
    fn set_timeout(&self, timeout: Duration) -> io::Result<()>;
}

impl Timed for UnixStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl Timed for TcpStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl<S: Timed + ?Sized> Timed for Box<S> {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        (**self).set_timeout(timeout)
    }
}

/// A connection with a deadline, after which reads and writes fail with [`ErrorKind::TimedOut`].
#[derive(Debug)]
pub struct Deadlined<S> {
    stream: S,
    end: Instant,
}

impl<S: Timed> Deadlined<S> {
    /// Sets the deadline of a connection.
    pub fn new(stream: S, end: Instant) -> Self {
        Self { stream, end }
    }

    /// Moves the deadline to this time from now.
    pub fn allow(&mut self, time: Duration) {
        self.end = Instant::now() + time;
    }

    /// Repeats a read or write until it succeeds or the deadline has passed.
    fn in_time(&mut self, mut act: impl FnMut(&mut S) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_timeout(left)?;
            match act(&mut self.stream) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl<S: Timed> Read for Deadlined<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.in_time(|stream| stream.read(bytes))
    }
}

impl<S: Timed> Write for Deadlined<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let chunk = &bytes[..bytes.len().min(CHUNK)];
        self.in_time(|stream| stream.write(chunk))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_hours(1);

    #[test]
    fn a_peer_that_sends_a_byte_now_and_then_exceeds_the_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let dripping = thread::spawn(move || {
            // All this takes far longer than the deadline allows.
            for _ in 0..100 {
                thread::sleep(SHORT / 5);
                if theirs.write_all(b"x").is_err() {
                    return;
                }
            }
        });
        let mut ours = Deadlined::new(ours, Instant::now() + SHORT);
        let error = ours.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::TimedOut, "timed out".to_owned()));
        drop(ours);
        dripping.join().unwrap();
    }

    #[test]
    fn a_peer_that_reads_nothing_exceeds_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ours = Deadlined::new(ours, Instant::now() + SHORT);
        let error = ours.write_all(&vec![0; 16 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_deadline_can_be_moved() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"x").unwrap();
        let mut ours = Deadlined::new(ours, Instant::now());
        let mut byte = [0];
        assert_eq!(ours.read(&mut byte).unwrap_err().kind(), ErrorKind::TimedOut);
        ours.allow(LONG);
        assert_eq!((ours.read(&mut byte).unwrap(), byte), (1, *b"x"));
    }
}
