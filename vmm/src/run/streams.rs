//! Connects a command's standard streams to those of this process. Streams that are terminals here are terminals in the
//! guest too.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use guest_agent::protocol::{self, Terminals};

use crate::agent::{Input, OnClose, Sink, Streams};
use crate::console::standard_stream;
use crate::terminal::Raw;

/// The streams for a command.
pub struct Chosen {
    /// Streams for the agent's thread.
    pub streams: Streams,
    /// Which of the command's streams are terminals in the guest.
    pub terminals: Terminals,
    /// The terminal in raw mode, if the user types into the guest.
    pub raw: Option<Raw>,
}

/// Chooses the streams by the types of this process's standard streams.
pub fn choose() -> io::Result<Chosen> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    // If the output is a pipe, its reader may read the keyboard itself, as a pager does.
    let keyboard = stdin.is_terminal() && !is_pipe(&stdout)?;
    let raw = if keyboard { Raw::enter()? } else { None };
    let terminals =
        Terminals { stdin: raw.is_some(), stdout: stdout.is_terminal(), stderr: stderr.is_terminal() };

    let mut streams = Streams::default();
    if raw.is_some() {
        streams.input = Some((protocol::TERMINAL as usize, Input::terminal(standard_stream(&stdin)?)));
    } else if !stdin.is_terminal() {
        streams.input = Some((protocol::STDIN as usize, Input::file(standard_stream(&stdin)?)));
    }
    if !terminals.stdout {
        let sink = Sink::new(standard_stream(&stdout)?, OnClose::End);
        streams.outputs.push((protocol::STDOUT as usize, sink));
    }
    if !terminals.stderr {
        let sink = Sink::new(standard_stream(&stderr)?, OnClose::Discard);
        streams.outputs.push((protocol::STDERR as usize, sink));
    }
    if terminals.any() {
        let file = match (terminals.stdout, terminals.stderr) {
            (true, _) => standard_stream(&stdout)?,
            (false, true) => standard_stream(&stderr)?,
            (false, false) => standard_stream(&stdin)?,
        };
        streams.outputs.push((protocol::TERMINAL as usize, Sink::new(file, OnClose::Discard)));
    }
    Ok(Chosen { streams, terminals, raw })
}

fn is_pipe(stream: &impl AsFd) -> io::Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    let kind = standard_stream(stream)?.metadata()?.file_type();
    Ok(kind.is_fifo() || kind.is_socket())
}
