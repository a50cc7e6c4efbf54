//! The server on a VM's control socket: a thread that accepts clients, and a thread for each client. A client that
//! stalls holds up only its own thread; the VM's other threads wait for none of these.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use log::debug;

use crate::protocol::message::{self, Answer, Request};
use crate::sandbox::{Confinement, Thread};

/// Maximum number of concurrent clients.
const MAX_CLIENTS: usize = 16;
/// Timeout for a client's next request. A client that looks repeatedly does so more often.
const READ_TIMEOUT: Duration = Duration::from_mins(2);
/// Timeout for a client to read an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a client could not be accepted, for lack of file descriptors say.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A machine that answers clients' requests.
pub trait ServedVm: Send + Sync + 'static {
    /// State that is kept for a client while it is connected.
    type Session: Default;

    /// Carries out a request and returns the answer.
    fn answer(&self, session: &mut Self::Session, request: Request) -> Answer;

    /// Sends a snapshot. If the machine is to end afterwards, stays until the client says so or goes away.
    fn send_snapshot(
        &self,
        stop: bool,
        requests: &mut impl BufRead,
        answers: &mut impl Write,
    ) -> io::Result<()>;
}

/// Starts a thread that accepts clients until the process ends.
pub fn serve<M: ServedVm>(listener: UnixListener, machine: Arc<M>) -> io::Result<()> {
    let clients = Arc::new(AtomicUsize::new(0));
    let confinement = Confinement::new(Thread::Control, Vec::new());
    let wait = move || {
        // The threads of clients inherit this.
        confinement.enter();
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => accept(stream, &machine, &clients),
                Err(error) => {
                    debug!("a client is not taken: {error}");
                    thread::sleep(RETRY_AFTER);
                }
            }
        }
    };
    thread::Builder::new().name("control".into()).spawn(wait).map(drop)
}

/// Starts a thread for a client, unless there are too many clients.
fn accept<M: ServedVm>(mut stream: UnixStream, machine: &Arc<M>, clients: &Arc<AtomicUsize>) {
    let slot = Slot::take(clients);
    let limits = stream
        .set_read_timeout(Some(READ_TIMEOUT))
        .and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)))
        .and_then(|()| if slot.is_none() { refuse(&mut stream) } else { Ok(()) });
    let (Some(slot), Ok(())) = (slot, limits) else { return };
    let machine = Arc::clone(machine);
    let converse = move || {
        let _slot = slot;
        if let Err(error) = converse(&stream, &*machine) {
            debug!("a client is sent away: {error}");
        }
    };
    if let Err(error) = thread::Builder::new().name("control".into()).spawn(converse) {
        debug!("a client is not taken: {error}");
    }
}

fn refuse(stream: &mut UnixStream) -> io::Result<()> {
    message::send(stream, &Answer::Error(format!("{MAX_CLIENTS} clients are connected already")))
}

fn converse<M: ServedVm>(stream: &UnixStream, machine: &M) -> io::Result<()> {
    let mut session = M::Session::default();
    let (mut requests, mut answers) = (BufReader::new(stream), stream);
    loop {
        let request = match message::receive(&mut requests) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(error) => {
                message::send(&mut answers, &Answer::Error(format!("not understood: {error}")))?;
                return Err(error);
            }
        };
        if let Request::Snapshot { stop } = request {
            machine.send_snapshot(stop, &mut requests, &mut answers)?;
        } else {
            let answer = machine.answer(&mut session, request);
            message::send(&mut answers, &answer)?;
        }
    }
}

/// One of the [`MAX_CLIENTS`] slots, which is free again when this is dropped.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Self> {
        let slot = Self(Arc::clone(clients));
        // If there is none free, this gives the slot back at once when it is dropped.
        (clients.fetch_add(1, Ordering::Relaxed) < MAX_CLIENTS).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// Answers with the number of requests on this connection.
    struct Counts;

    impl ServedVm for Counts {
        type Session = usize;

        fn answer(&self, session: &mut usize, _request: Request) -> Answer {
            *session += 1;
            Answer::Error(session.to_string())
        }

        fn send_snapshot(&self, _: bool, _: &mut impl BufRead, _: &mut impl Write) -> io::Result<()> {
            Ok(())
        }
    }

    struct Listening(tempfile::TempDir);

    impl Listening {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            serve(UnixListener::bind(folder.path().join("socket")).unwrap(), Arc::new(Counts)).unwrap();
            Self(folder)
        }

        fn connect(&self) -> UnixStream {
            UnixStream::connect(self.0.path().join("socket")).unwrap()
        }
    }

    fn ask(mut stream: &UnixStream) -> Answer {
        message::send(&mut stream, &Request::Hello).unwrap();
        message::receive(&mut BufReader::new(stream)).unwrap().unwrap()
    }

    fn number(number: usize) -> Answer {
        Answer::Error(number.to_string())
    }

    #[test]
    fn a_client_may_ask_again_and_has_its_own_session() {
        let listening = Listening::new();
        let (one, other) = (listening.connect(), listening.connect());
        assert_eq!([ask(&one), ask(&one), ask(&other)], [number(1), number(2), number(1)]);
    }

    #[test]
    fn a_client_that_stalls_does_not_delay_others() {
        let listening = Listening::new();
        let mut stalled = listening.connect();
        stalled.write_all(b"\"hel").unwrap();
        assert_eq!(ask(&listening.connect()), number(1));
        stalled.write_all(b"lo\"\n").unwrap();
        let answer: Answer = message::receive(&mut BufReader::new(&stalled)).unwrap().unwrap();
        assert_eq!(answer, number(1));
    }

    #[test]
    fn a_client_that_sends_garbage_gets_an_error_and_is_disconnected() {
        let listening = Listening::new();
        let mut stream = listening.connect();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut said = String::new();
        // The server closes without reading the rest, which may reset the connection.
        let _ = stream.read_to_string(&mut said);
        assert!(said.contains("not understood"), "{said}");
        assert_eq!(ask(&listening.connect()), number(1));
    }

    #[test]
    fn one_client_too_many_is_refused_until_another_disconnects() {
        let listening = Listening::new();
        let mut clients: Vec<UnixStream> = (0..MAX_CLIENTS).map(|_| listening.connect()).collect();
        for client in &clients {
            assert_eq!(ask(client), number(1));
        }
        let refused: Option<Answer> = message::receive(&mut BufReader::new(listening.connect())).unwrap();
        assert_eq!(refused, Some(Answer::Error(format!("{MAX_CLIENTS} clients are connected already"))));
        clients.pop();
        // The server's thread has to notice first.
        let again = (0..).find_map(|_| try_ask(&listening.connect()).filter(|answer| *answer == number(1)));
        assert_eq!(again, Some(number(1)));
    }

    fn try_ask(mut stream: &UnixStream) -> Option<Answer> {
        message::send(&mut stream, &Request::Hello).ok()?;
        message::receive(&mut BufReader::new(stream)).ok()?
    }
}
