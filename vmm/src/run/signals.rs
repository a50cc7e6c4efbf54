//! What signals to a run do: one ends the machine, unless the guest's agent passes it on to the command, or it is about
//! the terminal.

use crate::host::signals;
use crate::host::terminal;
use crate::protocol::ending::Ending;
use crate::run::event_loop::{Next, Ready, Subscriber, input_of};
use crate::run::signal_thread::Signals;
use crate::run::streams::agent::Handle;

/// Handles the signals that arrive.
pub struct SignalHandler {
    signals: Signals,
    agent: Option<Handle>,
}

impl SignalHandler {
    /// Creates a handler. Without an agent, no signal is passed on.
    pub fn new(signals: Signals, agent: Option<Handle>) -> Self {
        Self { signals, agent }
    }

    /// Passes the terminal's size on to the guest. A process in the background is not told when it changes.
    fn resize(&self) {
        if let (Some(agent), Some(size)) = (&self.agent, terminal::size()) {
            agent.resize(size);
        }
    }

    /// Handles a signal. Returns false if it ends the machine.
    fn handle(&self, signal: i32) -> bool {
        match (signal, &self.agent) {
            (libc::SIGWINCH, _) => self.resize(),
            (libc::SIGTSTP, _) => {
                terminal::stop();
                self.resize();
            }
            (libc::SIGCONT, _) => {
                terminal::resume();
                self.resize();
            }
            (_, Some(agent)) if signals::FOR_THE_COMMAND.contains(&signal) => return agent.signal(signal),
            _ => return false,
        }
        true
    }
}

impl Subscriber for SignalHandler {
    type End = Ending;

    fn files(&self) -> Vec<libc::pollfd> {
        vec![input_of(&self.signals)]
    }

    fn process(&mut self, ready: &Ready) -> Next<Ending> {
        if ready.has(&self.signals)
            && let Some(signal) = self.signals.next()
            && !self.handle(signal)
        {
            return Next::End(Ending::Signal(signal));
        }
        Next::Wait
    }
}
