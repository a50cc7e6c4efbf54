//! Connects a command's standard streams to those of this process. Streams that are terminals here are terminals in the
//! guest too.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use guest_agent::protocol::{self, Terminals};

use crate::host::terminal::Raw;
use crate::host::terminal::standard_stream;
use crate::run::streams::agent::{OnClose, Sink, Streams};
use crate::run::streams::input::Input;

/// The streams for a command.
pub struct Chosen {
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
    let input = if raw.is_some() {
        Some((protocol::TERMINAL as usize, Input::terminal(standard_stream(&stdin)?)))
    } else if !stdin.is_terminal() {
        Some((protocol::STDIN as usize, Input::file(standard_stream(&stdin)?)))
    } else {
        None
    };
    let streams = Streams { input, outputs: outputs(terminals)? };
    Ok(Chosen { streams, terminals, raw })
}

/// Connects the streams of a command that runs already. Those that are its terminal stay that, whatever they are here;
/// a keyboard is missing if there is none here.
pub fn continued(terminals: Terminals, has_input: bool) -> io::Result<Chosen> {
    let stdin = io::stdin();
    let (mut input, mut raw) = (None, None);
    if has_input && terminals.stdin {
        raw = Raw::enter()?;
        if raw.is_some() {
            input = Some((protocol::TERMINAL as usize, Input::terminal(standard_stream(&stdin)?)));
        }
    } else if has_input {
        input = Some((protocol::STDIN as usize, Input::file(standard_stream(&stdin)?)));
    }
    let streams = Streams { input, outputs: outputs(terminals)? };
    Ok(Chosen { streams, terminals, raw })
}

/// Returns the input of a guest's console.
pub fn for_console() -> io::Result<Input> {
    let stdin = io::stdin();
    let input = if stdin.is_terminal() { Input::terminal } else { Input::file };
    standard_stream(&stdin).map(input)
}

/// Returns where the command's output goes.
fn outputs(terminals: Terminals) -> io::Result<Vec<(usize, Sink)>> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let mut outputs = Vec::new();
    if !terminals.stdout {
        outputs.push((protocol::STDOUT as usize, Sink::new(standard_stream(&stdout)?, OnClose::End)));
    }
    if !terminals.stderr {
        outputs.push((protocol::STDERR as usize, Sink::new(standard_stream(&stderr)?, OnClose::Discard)));
    }
    if terminals.any() {
        let file = match (terminals.stdout, terminals.stderr) {
            (true, _) => standard_stream(&stdout)?,
            (false, true) => standard_stream(&stderr)?,
            (false, false) => standard_stream(&stdin)?,
        };
        outputs.push((protocol::TERMINAL as usize, Sink::new(file, OnClose::Discard)));
    }
    Ok(outputs)
}

fn is_pipe(stream: &impl AsFd) -> io::Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    let kind = standard_stream(stream)?.metadata()?.file_type();
    Ok(kind.is_fifo() || kind.is_socket())
}
