//! Carries a program's streams, and what the host wants of it, until it has ended.

use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use guest_agent::protocol::{ToGuest, ToHost};
use libc::{POLLIN, pid_t, pollfd};

use crate::control::Control;
use crate::flow::{Ending, Flow, State};
use crate::orphans::Orphans;
use crate::program::Program;
use crate::sys;

/// What a shell adds to the number of the signal that ended a program.
const KILLED: i32 = 128;

/// Carries everything until the program has ended, and gives its status. Its last output is in the streams then: see
/// [`finish`].
pub fn run(program: &mut Program, control: &mut Control, orphans: Option<&Orphans>) -> Result<u8> {
    let process = pid_t::try_from(program.child.id()).map_err(Error::other)?;
    let mut waiting = Vec::new();
    loop {
        // There may be messages that arrived together with the first one.
        while let Some(message) = control.next()? {
            obey(&message, process, program, control)?;
        }
        waiting.clear();
        waiting.push(to_read(program.end.as_raw_fd()));
        // A negative descriptor is passed over.
        waiting.push(to_read(orphans.map_or(-1, |orphans| orphans.signals().as_raw_fd())));
        waiting.push(control.waits_for());
        waiting.extend(program.inputs.iter().map(Flow::waits_for));
        waiting.extend(program.outputs.iter().map(Flow::waits_for));
        sys::poll(&mut waiting)?;

        let [end, orphaned, told, streams @ ..] = waiting.as_slice() else {
            unreachable!("three descriptors were pushed first");
        };
        control.go_on(*told)?;
        let (inputs, outputs) = streams.split_at(program.inputs.len());
        go_on(&mut program.inputs, inputs, Flow::go_on);
        go_on(&mut program.outputs, outputs, Flow::go_on);
        if let Some(orphans) = orphans.filter(|_| orphaned.revents != 0) {
            orphans.reap(process)?;
        }
        if end.revents != 0 {
            return program.child.wait().map(status);
        }
    }
}

/// Sends what is left in the streams from a program that has ended, however long the host takes for it. What other
/// processes may still write to them is not waited for.
pub fn finish(outputs: Vec<Flow>) -> Result<()> {
    let mut outputs: Vec<Ending> = outputs.into_iter().map(Ending::new).collect();
    let mut waiting: Vec<pollfd> = outputs.iter().map(Ending::waits_for).collect();
    loop {
        go_on(&mut outputs, &waiting, Ending::go_on);
        if outputs.is_empty() {
            return Ok(());
        }
        waiting.clear();
        waiting.extend(outputs.iter().map(Ending::waits_for));
        sys::poll(&mut waiting)?;
    }
}

fn to_read(fd: i32) -> pollfd {
    pollfd { fd, events: POLLIN, revents: 0 }
}

/// Lets each stream go on, and closes those that are over.
fn go_on<T>(streams: &mut Vec<T>, happened: &[pollfd], go_on: impl Fn(&mut T, pollfd) -> State) {
    let mut happened = happened.iter();
    streams
        .retain_mut(|stream| happened.next().is_none_or(|happened| go_on(stream, *happened) == State::Open));
}

fn obey(message: &ToGuest, process: pid_t, program: &Program, control: &mut Control) -> Result<()> {
    match message {
        ToGuest::Start(_) => Err(Error::other("the host has said what to run a second time")),
        ToGuest::Size(size) => program.screen.as_ref().map_or(Ok(()), |screen| sys::set_size(screen, *size)),
        ToGuest::Signal(signal) => match sys::signal_group(process, *signal) {
            Ok(()) => control.send(&ToHost::Took(*signal)),
            // There is no such signal, or nobody left to take it: the host hears nothing of it.
            Err(_) => Ok(()),
        },
    }
}

fn status(status: ExitStatus) -> u8 {
    let number = status.code().or_else(|| status.signal().map(|signal| KILLED + signal));
    number.and_then(|number| u8::try_from(number).ok()).unwrap_or(u8::MAX)
}
