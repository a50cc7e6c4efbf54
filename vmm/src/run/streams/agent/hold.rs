//! The host's side of the agent in a snapshot. The thread stands still while the machine is saved, and its state goes
//! on in another process.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use devices::virtio::ConsoleState;
use guest_agent::protocol::{Decoder, Message, Size, Terminals, ToGuest, ToHost};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::{Agent, since_saved};

/// Time in which the thread has to stand still: it never waits for long.
const LIMIT: Duration = Duration::from_secs(5);

/// What the host's side knows while a command runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentState {
    /// The agent's device.
    pub console: ConsoleState,
    /// The command has a terminal as its standard input, output or error.
    pub terminals: [bool; 3],
    /// The command's input has not ended.
    pub has_input: bool,
    /// Input that was read and not given to the guest.
    input: Vec<u8>,
    /// Messages that wait for room in the guest's queue.
    outgoing: Vec<u8>,
    /// The beginning of the agent's next message; none after an invalid message.
    incoming: Option<Vec<u8>>,
}

impl AgentState {
    /// Returns which of the command's streams are terminals.
    pub fn terminals(&self) -> Terminals {
        let [stdin, stdout, stderr] = self.terminals;
        Terminals { stdin, stdout, stderr }
    }
}

/// Makes the agent's thread stand still.
pub struct Holder {
    holds: Sender<Hold>,
    wake: EventFd,
}

/// The thread's end of a [`Holder`].
pub struct Holds {
    holds: Receiver<Hold>,
    /// Wakes the thread.
    pub wake: EventFd,
}

struct Hold {
    /// Is told the state, or why there is none.
    state: Sender<Result<AgentState, &'static str>>,
    /// Is dropped when the thread may go on, or else says that it has to end.
    leave: Receiver<()>,
}

/// The agent's thread stands still until this is dropped.
pub struct HeldAgent {
    /// What it knows.
    pub state: AgentState,
    leave: Sender<()>,
}

impl HeldAgent {
    /// Ends the thread.
    pub fn end(self) {
        // An error means that it has ended.
        let _ = self.leave.send(());
    }
}

impl Holder {
    /// Creates both ends.
    pub fn new() -> io::Result<(Self, Holds)> {
        let wake = EventFd::new(libc::EFD_NONBLOCK)?;
        let (sender, holds) = channel();
        Ok((Self { holds: sender, wake: wake.try_clone()? }, Holds { holds, wake }))
    }

    /// Makes the thread stand still. The error is why it cannot be saved now.
    pub fn hold(&self) -> Result<HeldAgent, &'static str> {
        const SILENT: &str = "the thread of its command's streams does not answer";
        let ((state, told), (leave, left)) = (channel(), channel());
        // Errors mean that the thread has ended.
        let _ = self.holds.send(Hold { state, leave: left });
        let _ = self.wake.write(1);
        let state = told.recv_timeout(LIMIT).unwrap_or(Err(SILENT))?;
        Ok(HeldAgent { state, leave })
    }
}

impl Agent {
    /// Stands still if another thread wants that. Returns true if the thread has to end.
    pub(super) fn stand_still_if_wanted(&mut self) -> bool {
        while let Ok(Hold { state, leave }) = self.holds.holds.try_recv() {
            // An error means that the other thread has given up.
            if state.send(self.state()).is_ok() && leave.recv().is_ok() {
                return true;
            }
        }
        false
    }

    fn state(&self) -> Result<AgentState, &'static str> {
        if self.start.is_some() || !self.is_ready {
            return Err("it is not up yet");
        }
        if self.status.is_some() {
            return Err("its command has ended");
        }
        let Terminals { stdin, stdout, stderr } = self.terminals;
        let input = self.streams.input.as_ref();
        let mut outgoing = self.outgoing.clone();
        for message in self.shared.orders().messages() {
            outgoing.extend(message.encode().expect("sizes and signals are short"));
        }
        Ok(AgentState {
            console: self.console.save(),
            terminals: [stdin, stdout, stderr],
            has_input: input.is_some(),
            input: input.map(|(_, input)| input.rest()).unwrap_or_default(),
            outgoing,
            incoming: self.decoder.as_ref().map(|decoder| decoder.rest().to_vec()),
        })
    }

    /// Goes on where another thread stood still. The command's terminal, if it has one, has this size now.
    pub(super) fn continue_from(&mut self, state: AgentState, size: Option<Size>) -> io::Result<()> {
        self.terminals = state.terminals();
        let AgentState { input, outgoing, incoming, .. } = state;
        (self.is_ready, self.outgoing) = (true, outgoing);
        self.decoder = incoming.map(|bytes| begun(&bytes)).transpose()?;
        if let Some((_, to)) = &mut self.streams.input {
            to.put_first(&input);
        }
        self.shared.command_started();
        self.send(&ToGuest::Restored(since_saved()?));
        if let Some(size) = size {
            self.send(&ToGuest::Size(size));
        }
        Ok(())
    }
}

/// Returns a decoder that has the beginning of a message. Whole messages are refused: they would have been decoded, and
/// a file may have any number of them.
fn begun(bytes: &[u8]) -> io::Result<Decoder<ToHost>> {
    let mut decoder = Decoder::new();
    decoder.feed(bytes);
    match decoder.next() {
        Ok(None) => Ok(decoder),
        _ => Err(io::Error::other("the saved beginning of the agent's message is not valid")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_beginning_of_a_message_is_continued() {
        let message = ToHost::Exited(7).encode().unwrap();
        for length in 0..message.len() {
            assert!(begun(&message[..length]).is_ok());
        }
        assert!(begun(&message).is_err() && begun(&message.repeat(1000)).is_err());
        assert!(begun(&[0xff; 100]).is_err(), "no message is so long");
    }
}
