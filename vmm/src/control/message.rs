//! What is said over a VM's socket: a request and its answer, each one line of JSON.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vpmu::Switch;
use vpmu::policy::{Change, Policy};
use vpmu_perf::Attributed;

use tally_machine::VcpuReport;

/// What a VM can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// Who it is.
    Hello,
    /// How it does. While who has asked once stays connected, the VM also watches whom its vCPUs' threads work for.
    Look,
    /// To withhold counters from the guest, or to give them back: all of these or, if there is no such counter, none.
    Switch(Vec<Switched>),
    /// To change its policy, and to say what that is then.
    Policy(Change),
    /// To write its log out, with this note in it, if there is one.
    Log(Option<String>),
}

/// What becomes of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switched {
    /// Which vCPU's.
    pub vcpu: u8,
    /// Which of its counters.
    pub counter: usize,
    /// What becomes of it.
    pub to: Switch,
}

/// What a VM answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// Who it is.
    Hello(Summary),
    /// How it does.
    Look(Box<Snapshot>),
    /// What its policy is.
    Policy(Policy),
    /// That was done.
    Done,
    /// That was not done, for this reason.
    Error(String),
}

/// A VM in a few words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its process.
    pub pid: u32,
    /// What its user calls it.
    pub name: String,
    /// What it runs: a command in the default guest, or else a kernel.
    pub runs: String,
    /// The PMU that its guest sees.
    pub pmu: String,
    /// How many vCPUs it has.
    pub cpus: u8,
    /// How much memory, in bytes.
    pub memory: u64,
    /// When it was started, in seconds since 1970.
    pub started: u64,
    /// How long ago that was, in milliseconds.
    pub age_ms: u64,
}

/// How a VM does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Who it is.
    pub vm: Summary,
    /// When that was, in nanoseconds from some moment on.
    pub at_ns: u64,
    /// The vCPUs because of whose counters it stands still, if it does.
    pub paused_by: Vec<u8>,
    /// Its vCPUs.
    pub vcpus: Vec<Vcpu>,
}

/// How a vCPU does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// What its own thread says.
    pub report: VcpuReport,
    /// What KVM counts for it, by KVM's names, where KVM does.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// Whom its thread works for, where that may be counted.
    pub work: Option<Attributed>,
    /// Where it ran when it was last looked, and whose the counters are there.
    pub hardware: Option<Hardware>,
}

/// A host CPU's counters, those for any events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// Which CPU.
    pub cpu: usize,
    /// How many counters it has.
    pub counters: usize,
    /// How many of them no others keep to themselves: the guest's may be among these.
    pub available: usize,
    /// Who may keep the rest, as far as this user can see.
    pub holders: Vec<String>,
}

/// A line longer than this is none of ours.
const LONGEST: u64 = 1 << 20;

/// Sends a line.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Takes a line; nothing if there is no more.
pub fn receive<T: DeserializeOwned>(stream: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    stream.take(LONGEST).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        // It is too long, or was broken off.
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(message: &impl Serialize) -> String {
        let mut line = Vec::new();
        send(&mut line, message).unwrap();
        String::from_utf8(line).unwrap()
    }

    #[test]
    fn requests_can_be_typed_by_hand() {
        assert_eq!(said(&Request::Hello), "\"hello\"\n");
        let request = Request::Switch(vec![Switched { vcpu: 0, counter: 3, to: Switch::Off }]);
        let line = said(&request);
        assert_eq!(line, "{\"switch\":[{\"vcpu\":0,\"counter\":3,\"to\":\"off\"}]}\n");
        assert_eq!(receive(&mut line.as_bytes()).unwrap(), Some(request));
    }

    #[test]
    fn a_line_break_in_a_name_stays_in_its_line() {
        let line = said(&Answer::Error("one\ntwo".into()));
        assert_eq!(line.lines().count(), 1);
        assert_eq!(receive(&mut line.as_bytes()).unwrap(), Some(Answer::Error("one\ntwo".into())));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let receive = |bytes: &[u8]| receive::<Request>(&mut &*bytes);
        assert!(receive(b"").unwrap().is_none());
        assert!(receive(b"\"hello\"").is_err(), "it was broken off");
        assert!(receive(b"{\"bogus\":1}\n").is_err());
        assert!(receive(b"\xff\n").is_err());
        let endless = vec![b'x'; usize::try_from(LONGEST).unwrap() + 1];
        assert!(receive(&endless).is_err());
    }
}
