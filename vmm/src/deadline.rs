//! Connections whose other end has only so much time for all that it has to do. The kernel's timeouts are for one call each:
//! who sends a byte now and then never runs into them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// So much is written at once: of more the kernel would wait for each part anew.
const PIECE: usize = 16 << 10;

/// A connection, whose calls can be given a timeout.
pub trait Timed: Read + Write {
    /// Reads and writes give up after this.
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

/// A connection with a deadline, after which nothing is read or written any more.
#[derive(Debug)]
pub struct Deadlined<S> {
    stream: S,
    end: Instant,
}

impl<S: Timed> Deadlined<S> {
    /// Until then.
    pub fn new(stream: S, end: Instant) -> Self {
        Self { stream, end }
    }

    /// Gives the other end so much time from now on.
    pub fn allow(&mut self, patience: Duration) {
        self.end = Instant::now() + patience;
    }

    /// Does it, unless the time is over before it is done.
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
        let piece = &bytes[..bytes.len().min(PIECE)];
        self.in_time(|stream| stream.write(piece))
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
    fn who_sends_a_byte_now_and_then_runs_into_the_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let dripping = thread::spawn(move || {
            // All this takes far longer than there is time for.
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
    fn who_reads_nothing_runs_into_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ours = Deadlined::new(ours, Instant::now() + SHORT);
        let error = ours.write_all(&vec![0; 16 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn more_time_can_be_given() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"x").unwrap();
        let mut ours = Deadlined::new(ours, Instant::now());
        let mut byte = [0];
        assert_eq!(ours.read(&mut byte).unwrap_err().kind(), ErrorKind::TimedOut);
        ours.allow(LONG);
        assert_eq!((ours.read(&mut byte).unwrap(), byte), (1, *b"x"));
    }
}
