//! Who answers: a thread that waits for clients, and one for each of them. What a client does or leaves undone is its own
//! thread's business; the VM's other threads do not wait for any of these.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use log::debug;

use super::message::{self, Answer, Request};

/// More are sent away.
const MOST_CLIENTS: usize = 16;
/// Who says nothing for so long is sent away; who looks again and again does so more often.
const PATIENCE: Duration = Duration::from_mins(2);
/// Who does not read for so long, too.
const TO_READ: Duration = Duration::from_secs(5);
/// When no client can be taken for now, for lack of files say.
const PAUSE: Duration = Duration::from_millis(100);

/// What can be asked.
pub trait Machine: Send + Sync + 'static {
    /// What is kept for a client while it is there.
    type Session: Default;

    /// Does what is asked, and says what came of it.
    fn answer(&self, session: &mut Self::Session, request: Request) -> Answer;
}

/// Answers those who connect, from now on until the process ends.
pub fn serve<M: Machine>(listener: UnixListener, machine: Arc<M>) -> io::Result<()> {
    let clients = Arc::new(AtomicUsize::new(0));
    let wait = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => attend(stream, &machine, &clients),
                Err(error) => {
                    debug!("a client is not taken: {error}");
                    thread::sleep(PAUSE);
                }
            }
        }
    };
    thread::Builder::new().name("control".into()).spawn(wait).map(drop)
}

/// Gives a client a thread of its own, if there is room for one more.
fn attend<M: Machine>(mut stream: UnixStream, machine: &Arc<M>, clients: &Arc<AtomicUsize>) {
    let place = Place::take(clients);
    let limits = stream
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| stream.set_write_timeout(Some(TO_READ)))
        .and_then(|()| if place.is_none() { refuse(&mut stream) } else { Ok(()) });
    let (Some(place), Ok(())) = (place, limits) else { return };
    let machine = Arc::clone(machine);
    let talk = move || {
        let _place = place;
        if let Err(error) = talk(&stream, &*machine) {
            debug!("a client is sent away: {error}");
        }
    };
    if let Err(error) = thread::Builder::new().name("control".into()).spawn(talk) {
        debug!("a client is not taken: {error}");
    }
}

fn refuse(stream: &mut UnixStream) -> io::Result<()> {
    message::send(stream, &Answer::Error(format!("{MOST_CLIENTS} clients are connected already")))
}

fn talk<M: Machine>(stream: &UnixStream, machine: &M) -> io::Result<()> {
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
        let answer = machine.answer(&mut session, request);
        message::send(&mut answers, &answer)?;
    }
}

/// A client's place among those there may be.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(Arc::clone(clients));
        // One too many gives its place back at once, when this is dropped.
        (clients.fetch_add(1, Ordering::Relaxed) < MOST_CLIENTS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    /// Says how often it was asked on this connection.
    struct Counts;

    impl Machine for Counts {
        type Session = usize;

        fn answer(&self, session: &mut usize, _request: Request) -> Answer {
            *session += 1;
            Answer::Error(session.to_string())
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
    fn a_client_that_stalls_keeps_nobody_waiting() {
        let listening = Listening::new();
        let mut stalled = listening.connect();
        stalled.write_all(b"\"hel").unwrap();
        assert_eq!(ask(&listening.connect()), number(1));
        stalled.write_all(b"lo\"\n").unwrap();
        let answer: Answer = message::receive(&mut BufReader::new(&stalled)).unwrap().unwrap();
        assert_eq!(answer, number(1));
    }

    #[test]
    fn a_client_that_talks_garbage_is_told_so_and_sent_away() {
        let listening = Listening::new();
        let mut stream = listening.connect();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut said = String::new();
        // What it had not read yet when it was sent away may make the end look abrupt.
        let _ = stream.read_to_string(&mut said);
        assert!(said.contains("not understood"), "{said}");
        assert_eq!(ask(&listening.connect()), number(1));
    }

    #[test]
    fn there_is_room_for_so_many_clients_and_again_when_one_has_gone() {
        let listening = Listening::new();
        let mut clients: Vec<UnixStream> = (0..MOST_CLIENTS).map(|_| listening.connect()).collect();
        for client in &clients {
            assert_eq!(ask(client), number(1));
        }
        let refused: Option<Answer> = message::receive(&mut BufReader::new(listening.connect())).unwrap();
        assert_eq!(refused, Some(Answer::Error(format!("{MOST_CLIENTS} clients are connected already"))));
        clients.pop();
        // Its thread has to notice first.
        let again = (0..).find_map(|_| try_ask(&listening.connect()).filter(|answer| *answer == number(1)));
        assert_eq!(again, Some(number(1)));
    }

    fn try_ask(mut stream: &UnixStream) -> Option<Answer> {
        message::send(&mut stream, &Request::Hello).ok()?;
        message::receive(&mut BufReader::new(stream)).ok()?
    }
}
