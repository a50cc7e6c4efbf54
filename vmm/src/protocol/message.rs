//! The protocol on a VM's control socket: requests and answers, each one line of JSON. Both ends are of the same
//! version of Tally.

use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vpmu::Switch;
use vpmu::policy::{Change, Policy};

use crate::protocol::recording::{Begun, Functions, RecordOptions, Samples, SymbolsPart};
use crate::protocol::status::{Report, Summary, VmStatus};

/// Request to a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// Say what the VM is.
    Hello,
    /// Return the VM's status. From the first such request until the client disconnects, the VM also counts what its
    /// vCPUs' threads do in the guest and in the host.
    #[serde(rename = "look")]
    Status,
    /// Return the VM's counters and exits.
    Report,
    /// Disable or enable counters. If one of them does not exist, none is changed.
    Switch(Vec<CounterSwitch>),
    /// Change the policy, and return the new one.
    Policy(Change),
    /// Flush the event log, after writing this note into it if there is one.
    Log(Option<String>),
    /// Send a snapshot, behind the answer ([`crate::protocol::stream`]). If the VM is to end afterwards, it stands
    /// still until the client's next request or its end.
    Snapshot {
        /// The VM is to end afterwards.
        stop: bool,
    },
    /// End, after a snapshot was sent.
    End,
    /// Begin to sample the VM, until the client disconnects.
    Record(RecordOptions),
    /// Return the samples since the last such request.
    Samples,
    /// End that. The samples that are left can still be requested.
    StopRecording,
    /// Return the functions of the guest's kernel at these addresses, at most
    /// [`crate::protocol::recording::MAX_ADDRESSES`], while it is sampled.
    Functions(Vec<u64>),
    /// Return the modules that the guest's kernel has now, while it is sampled, with their symbols from this offset on
    /// in their text.
    Modules(usize),
    /// Return the symbols of the guest's kernel from this offset on in their text.
    Symbols(usize),
}

/// A counter to disable or enable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterSwitch {
    pub vcpu: u8,
    pub counter: usize,
    /// Whether to enable or disable the counter.
    pub to: Switch,
}

/// Answer of a VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// What the VM is.
    Hello(Summary),
    /// The VM's status, and what it did since the client's last request.
    #[serde(rename = "look")]
    Status(Box<VmStatus>),
    /// The VM's counters and exits.
    Report(Report),
    Policy(Policy),
    /// A state of this many bytes follows, and then the memory.
    Snapshot(u64),
    /// The VM is sampled.
    Recording(Begun),
    Samples(Samples),
    /// The VM is not sampled any more. For each vCPU, in which part of the time there was a counter, in thousandths.
    Recorded(Vec<u64>),
    Functions(Functions),
    Symbols(SymbolsPart),
    /// The request was carried out.
    Done,
    /// The request was not carried out, for this reason.
    Error(String),
}

/// Longest line that is accepted.
const MAX_LINE: u64 = 1 << 20;

pub fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Receives a message. Returns none at the end of the stream.
pub fn receive<T: DeserializeOwned>(stream: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    stream.take(MAX_LINE).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        // The line is too long, or ends without a line break.
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_of(message: &impl Serialize) -> String {
        let mut line = Vec::new();
        send(&mut line, message).unwrap();
        String::from_utf8(line).unwrap()
    }

    #[test]
    fn requests_can_be_typed_by_hand() {
        assert_eq!(line_of(&Request::Hello), "\"hello\"\n");
        assert_eq!(line_of(&Request::Status), "\"look\"\n");
        let request = Request::Switch(vec![CounterSwitch { vcpu: 0, counter: 3, to: Switch::Off }]);
        let line = line_of(&request);
        assert_eq!(line, "{\"switch\":[{\"vcpu\":0,\"counter\":3,\"to\":\"off\"}]}\n");
        assert_eq!(receive(&mut line.as_bytes()).unwrap(), Some(request));
    }

    #[test]
    fn a_line_break_in_a_name_stays_in_its_line() {
        let line = line_of(&Answer::Error("one\ntwo".into()));
        assert_eq!(line.lines().count(), 1);
        assert_eq!(receive(&mut line.as_bytes()).unwrap(), Some(Answer::Error("one\ntwo".into())));
    }

    #[test]
    fn a_line_that_is_no_message_is_refused() {
        let receive = |bytes: &[u8]| receive::<Request>(&mut &*bytes);
        assert!(receive(b"").unwrap().is_none());
        assert!(receive(b"\"hello\"").is_err(), "it was broken off");
        assert!(receive(b"{\"bogus\":1}\n").is_err());
        assert!(receive(b"\xff\n").is_err());
        let endless = vec![b'x'; usize::try_from(MAX_LINE).unwrap() + 1];
        assert!(receive(&endless).is_err());
    }
}
