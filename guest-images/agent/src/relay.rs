//! Relays a program's streams, and handles the host's messages, until the program has ended.

use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use guest_agent::protocol::{ToGuest, ToHost};
use libc::{POLLIN, pid_t, pollfd};

use crate::control::Control;
use crate::flow::{DrainingFlow, Flow, State};
use crate::orphans::Orphans;
use crate::program::Program;
use crate::{connections, network, restored, sys};

/// Added to the number of the signal that ended a program, as shells do.
const KILLED: i32 = 128;

/// Relays streams and handles messages until the program has ended. Returns its status. The last output may still be in
/// the streams; [`finish`] sends it.
pub fn run(program: &mut Program, control: &mut Control, orphans: Option<&Orphans>) -> Result<u8> {
    let process = pid_t::try_from(program.child.id()).map_err(Error::other)?;
    let mut waiting = Vec::new();
    loop {
        // Several messages may have arrived together.
        while let Some(message) = control.next()? {
            handle_message(&message, process, program, control)?;
        }
        waiting.clear();
        waiting.push(to_read(program.pidfd.as_raw_fd()));
        // poll ignores negative descriptors.
        waiting.push(to_read(orphans.map_or(-1, |orphans| orphans.signals().as_raw_fd())));
        waiting.push(control.poll_fd());
        waiting.extend(program.inputs.iter().map(Flow::poll_fd));
        waiting.extend(program.outputs.iter().map(Flow::poll_fd));
        sys::poll(&mut waiting)?;

        let [exited, orphaned, message, streams @ ..] = waiting.as_slice() else {
            unreachable!("three descriptors were pushed first");
        };
        control.handle(*message)?;
        let (inputs, outputs) = streams.split_at(program.inputs.len());
        handle(&mut program.inputs, inputs, Flow::handle);
        handle(&mut program.outputs, outputs, Flow::handle);
        if let Some(orphans) = orphans.filter(|_| orphaned.revents != 0) {
            orphans.reap(process)?;
        }
        if exited.revents != 0 {
            return program.child.wait().map(status);
        }
    }
}

/// Sends the output that remains in the streams of a program that has ended. Waits for the host without a timeout, but
/// not for other processes that may still write to the streams.
pub fn finish(outputs: Vec<Flow>) -> Result<()> {
    let mut outputs: Vec<DrainingFlow> = outputs.into_iter().map(DrainingFlow::new).collect();
    let mut waiting: Vec<pollfd> = outputs.iter().map(DrainingFlow::poll_fd).collect();
    loop {
        handle(&mut outputs, &waiting, DrainingFlow::handle);
        if outputs.is_empty() {
            return Ok(());
        }
        waiting.clear();
        waiting.extend(outputs.iter().map(DrainingFlow::poll_fd));
        sys::poll(&mut waiting)?;
    }
}

fn to_read(fd: i32) -> pollfd {
    pollfd { fd, events: POLLIN, revents: 0 }
}

/// Copies data of each stream as the results of poll allow, and closes streams that have ended.
fn handle<T>(streams: &mut Vec<T>, polled: &[pollfd], handle: impl Fn(&mut T, pollfd) -> State) {
    let mut polled = polled.iter();
    streams.retain_mut(|stream| polled.next().is_none_or(|polled| handle(stream, *polled) == State::Open));
}

fn handle_message(message: &ToGuest, process: pid_t, program: &Program, control: &mut Control) -> Result<()> {
    match message {
        ToGuest::Start(_) => Err(Error::other("the host has sent a second Start message")),
        ToGuest::Size(size) => {
            program.terminal.as_ref().map_or(Ok(()), |terminal| sys::set_size(terminal, *size))
        }
        // What fails stays as it was: the program is worth more than the time of day.
        ToGuest::Restored(restored) => {
            let _ = restored::catch_up(restored);
            let _ = restored::renew_boot_id();
            if network::is_set_up() {
                connections::reset_all();
                network::set_up_again();
            }
            Ok(())
        }
        ToGuest::Signal(signal) => match sys::signal_group(process, *signal) {
            Ok(()) => control.send(&ToHost::SignalSent(*signal)),
            // The signal does not exist, or the processes have ended. The host gets no reply.
            Err(_) => Ok(()),
        },
    }
}

fn status(status: ExitStatus) -> u8 {
    let number = status.code().or_else(|| status.signal().map(|signal| KILLED + signal));
    number.and_then(|number| u8::try_from(number).ok()).unwrap_or(u8::MAX)
}
