//! A client of running VMs: finds their control sockets and sends requests.

mod limits;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::panic;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use tally_machine::{Function, Module};
use vpmu::policy::{Change, Policy};

use crate::commands::client::limits::Exceeded;
use crate::protocol::deadline::Deadlined;
use crate::protocol::message::{self, Answer, Request};
use crate::protocol::printable::short;
use crate::protocol::recording::{Begun, MAX_ADDRESSES, RecordOptions, Samples};
use crate::protocol::socket_dir::{Connection, SocketDir, user};
use crate::protocol::status::{Report, Summary, VmStatus};
use crate::protocol::stream;

/// Timeout for an answer. A VM that exceeds it is stopped, or its host is overloaded.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for an answer for which the guest's memory is searched.
const SYMBOLS_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum size of a kernel's symbols.
const MAX_SYMBOLS: usize = 128 << 20;
/// Timeout for the search and the greetings of all VMs together: a command that lists VMs waits for the slowest.
const GREETING_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of this user's VMs.
const MAX_OWN_VMS: usize = 4096;
/// Maximum number of VMs of another user. Each takes a thread, and memory for an answer.
const MAX_VMS_OF_ANOTHER: usize = 256;
/// Maximum number of VMs of all other users.
const MAX_VMS_OF_OTHERS: usize = 1024;
/// Maximum number of another user's sockets whose errors are printed.
const MAX_ERRORS_OF_ANOTHER: usize = 4;

/// Connection to a VM.
type Stream = BufReader<Deadlined<UnixStream>>;

/// A running VM, and a connection to it.
#[derive(Debug)]
pub struct Vm {
    pub about: Summary,
    owner: u32,
    stream: Stream,
}

/// Symbols of a guest's kernel.
#[derive(Debug, Default)]
pub struct GuestSymbols {
    /// As `/proc/kallsyms` has them. Empty if none were found.
    pub text: String,
    pub modules: Vec<Module>,
}

/// A VM that has not said yet what it is.
struct Connected {
    process: u32,
    owner: u32,
    stream: UnixStream,
}

/// Running VMs.
#[derive(Debug, Default)]
pub struct Found {
    /// The VMs that answer, in the order of their process ids.
    pub vms: Vec<Vm>,
    /// Why others do not answer.
    pub silent: Vec<ClientError>,
    /// The first one of this user's that does not.
    mine: Option<usize>,
}

/// A VM that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no VM of this user's runs here")]
    NoneRuns,
    #[error("no VM `{0}` runs here; those that do: {1}")]
    NoSuch(String, String),
    #[error("several VMs are called `{0}`: {1}; name one by its process")]
    Ambiguous(String, String),
    #[error("the VM {0} has ended")]
    Ended(u32),
    #[error("the VM {0} does not answer: {1}")]
    Silent(u32, io::Error),
    #[error("the VM {0} has too many clients")]
    Busy(u32),
    #[error("the VM {0} says: {1}")]
    Refused(u32, String),
    #[error("the VM {0} answers with {1}")]
    Excessive(u32, Exceeded),
    #[error("user {0} has more sockets than {1} of VMs; the others are not asked")]
    TooMany(u32, usize),
    #[error("user {0} has more sockets that lead to no VM")]
    MoreSilent(u32),
    #[error("no VM `{0}` of this user's runs here; user {1} has one: name it by its process, {2}")]
    Anothers(String, u32, u32),
}

/// Finds all running VMs. Sockets that killed VMs have left behind are removed.
pub fn find() -> Found {
    let end = Instant::now() + GREETING_TIMEOUT;
    let mut search = Search::new(user());
    for dir in SocketDir::all(end) {
        for process in dir.processes() {
            if !search.is_wanted(process, dir.owner()) {
                continue;
            }
            if dir.owner() != user() && Instant::now() >= end {
                break;
            }
            match dir.connect(process) {
                Ok(Connection::Vm(stream)) => {
                    search.connects(Connected { process, owner: dir.owner(), stream });
                }
                Ok(Connection::Stale) => dir.remove_stale(process),
                Ok(Connection::Busy) => search.fails(dir.owner(), ClientError::Busy(process)),
                Err(error) => search.fails(dir.owner(), ClientError::Silent(process, error)),
            }
        }
    }
    let owners: Vec<u32> = search.connected.iter().map(|one| one.owner).collect();
    for (greeted, owner) in greet(std::mem::take(&mut search.connected), end).into_iter().zip(owners) {
        match greeted {
            Ok(vm) => search.found.vms.push(vm),
            Err(ClientError::Ended(_)) => {}
            Err(error) => search.fails(owner, error),
        }
    }
    search.found.vms.sort_by_key(|vm| vm.about.pid);
    search.found
}

/// A search for VMs, which another user cannot make long.
struct Search {
    /// The user who searches.
    user: u32,
    connected: Vec<Connected>,
    found: Found,
    /// The processes that were connected to. One process may have sockets in several directories.
    seen: BTreeSet<u32>,
    /// Numbers of the sockets that were found, and of those that lead to no VM, by their users.
    sockets: BTreeMap<u32, (usize, usize)>,
}

impl Search {
    fn new(user: u32) -> Self {
        Self {
            user,
            connected: Vec::new(),
            found: Found::default(),
            seen: BTreeSet::new(),
            sockets: BTreeMap::new(),
        }
    }

    /// Returns whether to connect to the socket of a process.
    fn is_wanted(&mut self, process: u32, owner: u32) -> bool {
        if self.seen.contains(&process) {
            return false;
        }
        let others = self.sockets.iter().filter(|(of, _)| **of != self.user);
        let others: usize = others.map(|(_, (found, _))| (*found).min(MAX_VMS_OF_ANOTHER)).sum();
        let limit = if owner == self.user { MAX_OWN_VMS } else { MAX_VMS_OF_ANOTHER };
        let (found, _) = self.sockets.entry(owner).or_default();
        *found += 1;
        if *found == limit + 1 {
            self.found.silent.push(ClientError::TooMany(owner, limit));
        }
        *found <= limit && (owner == self.user || others < MAX_VMS_OF_OTHERS)
    }

    /// Records a process whose socket it is.
    fn connects(&mut self, connected: Connected) {
        self.seen.insert(connected.process);
        self.connected.push(connected);
    }

    /// Records a socket that leads to no VM.
    fn fails(&mut self, owner: u32, error: ClientError) {
        let (_, failed) = self.sockets.entry(owner).or_default();
        *failed += 1;
        let silent = &mut self.found.silent;
        if owner == self.user {
            self.found.mine.get_or_insert(silent.len());
        }
        if owner == self.user || *failed <= MAX_ERRORS_OF_ANOTHER {
            silent.push(error);
        } else if *failed == MAX_ERRORS_OF_ANOTHER + 1 {
            silent.push(ClientError::MoreSilent(owner));
        }
    }
}

/// Greets VMs, with one deadline for all.
fn greet(connected: Vec<Connected>, end: Instant) -> Vec<Result<Vm, ClientError>> {
    at_once(connected.into_iter().map(|one| (one.process, one)), |one| Vm::greet(one, end))
}

/// Asks all of these VMs at once, so that one that is slow to answer delays no other. Each comes with its process id.
/// Returns the answers in the order of the VMs.
pub fn at_once<V: Send, T: Send>(
    vms: impl Iterator<Item = (u32, V)>,
    ask: impl Fn(V) -> Result<T, ClientError> + Sync,
) -> Vec<Result<T, ClientError>> {
    let ask = &ask;
    thread::scope(|scope| {
        let start = |(process, vm)| {
            thread::Builder::new()
                .spawn_scoped(scope, move || ask(vm))
                .map_err(|error| ClientError::Silent(process, error))
        };
        // This thread asks the last one.
        let mut vms: Vec<_> = vms.collect();
        let last = vms.pop();
        let asking: Vec<_> = vms.into_iter().map(start).collect();
        let answer = last.map(|(_, vm)| ask(vm));
        let join = |thread: Result<ScopedJoinHandle<_>, _>| {
            thread?.join().unwrap_or_else(|why| panic::resume_unwind(why))
        };
        asking.into_iter().map(join).chain(answer).collect()
    })
}

/// Returns the running VM with this process id, or else this user's with this name: another user may give a VM any
/// name.
pub fn find_one(who: &str) -> Result<Vm, ClientError> {
    let Found { mut vms, mut silent, mine } = find();
    let about: Vec<(&Summary, u32)> = vms.iter().map(|vm| (&vm.about, vm.owner)).collect();
    match pick(who, &about, user()) {
        Ok(number) => Ok(vms.swap_remove(number)),
        // A VM that does not answer may be the one that is meant, but not by its name if it is another user's.
        Err(error) => {
            let meant = silent.iter().position(|error| error.is_of(who)).or(mine);
            Err(meant.map_or(error, |number| silent.swap_remove(number)))
        }
    }
}

impl ClientError {
    /// Returns whether the VM that does not answer has this process id.
    fn is_of(&self, who: &str) -> bool {
        let (Self::Ended(process)
        | Self::Silent(process, _)
        | Self::Busy(process)
        | Self::Refused(process, _)
        | Self::Excessive(process, _)) = self
        else {
            return false;
        };
        process.to_string() == who
    }
}

impl Found {
    /// Returns the VMs that answer, at least one. `say` is told why others do not.
    pub fn answering(self, say: impl FnMut(ClientError)) -> Result<Vec<Vm>, ClientError> {
        some_of(self.vms.into_iter().map(Ok).chain(self.silent.into_iter().map(Err)), say)
    }
}

/// Returns the results of the VMs that answered, at least one. `say` is told why others did not.
pub fn some_of<T>(
    answers: impl IntoIterator<Item = Result<T, ClientError>>,
    say: impl FnMut(ClientError),
) -> Result<Vec<T>, ClientError> {
    let (mut given, mut silent) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Ok(answer) => given.push(answer),
            Err(error) => silent.push(error),
        }
    }
    // The error with which a command fails is printed at its end.
    let failure = if given.is_empty() { silent.pop().or(Some(ClientError::NoneRuns)) } else { None };
    silent.into_iter().for_each(say);
    failure.map_or(Ok(given), Err)
}

/// Returns the position of the VM with this process id, or of the VM of this user's with this name. Each VM comes with
/// the user that runs it.
fn pick(who: &str, vms: &[(&Summary, u32)], user: u32) -> Result<usize, ClientError> {
    if vms.is_empty() {
        return Err(ClientError::NoneRuns);
    }
    let of_process = vms.iter().position(|(vm, _)| vm.pid.to_string() == who);
    if let Some(number) = of_process.filter(|number| vms[*number].1 == user) {
        return Ok(number);
    }
    let (mine, others): (Vec<usize>, Vec<usize>) =
        (0..vms.len()).filter(|number| vms[*number].0.name == who).partition(|number| vms[*number].1 == user);
    match (&mine[..], of_process) {
        ([number], _) => Ok(*number),
        ([], Some(number)) => Ok(number),
        ([], None) => {
            if let Some((vm, owner)) = others.first().map(|number| vms[*number]) {
                return Err(ClientError::Anothers(who.to_owned(), owner, vm.pid));
            }
            let running = vms.iter().map(|(vm, _)| format!("{} ({})", vm.pid, vm.name));
            Err(ClientError::NoSuch(who.to_owned(), running.collect::<Vec<_>>().join(", ")))
        }
        _ => {
            let processes = mine.iter().map(|number| vms[*number].0.pid.to_string());
            Err(ClientError::Ambiguous(who.to_owned(), processes.collect::<Vec<_>>().join(", ")))
        }
    }
}

impl Vm {
    fn greet(connected: Connected, end: Instant) -> Result<Self, ClientError> {
        let Connected { process, owner, stream } = connected;
        let mut stream = BufReader::new(Deadlined::new(stream, end));
        match ask(process, &mut stream, &Request::Hello)? {
            // The process id is that of the socket's name, by which the VM was found.
            Answer::Hello(about) => Ok(Self { about: Summary { pid: process, ..about }, owner, stream }),
            _ => Err(unexpected(process)),
        }
    }

    /// Returns the user that runs the VM, if that is another one than this process's.
    pub fn other_owner(&self) -> Option<u32> {
        (self.owner != user()).then_some(self.owner)
    }

    /// Returns the user that runs the VM.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Returns the VM's status, and what it did since this client's last request.
    pub fn status(&mut self) -> Result<VmStatus, ClientError> {
        match self.ask(&Request::Status)? {
            Answer::Status(status) => Ok(*status),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Returns the VM's counters and exits, if it answers before this timeout.
    pub fn report_within(&mut self, timeout: Duration) -> Result<Report, ClientError> {
        match self.ask_within(timeout, &Request::Report)? {
            Answer::Report(report) => Ok(report),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Changes the VM's policy, and returns the new one.
    pub fn change(&mut self, change: Change) -> Result<Policy, ClientError> {
        match self.ask(&Request::Policy(change))? {
            Answer::Policy(policy) => Ok(policy),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Returns the symbols of the guest's kernel and of its modules.
    pub fn symbols(&mut self) -> Result<GuestSymbols, ClientError> {
        self.parts(Request::Symbols)
    }

    /// Returns the modules that the guest's kernel has now and their symbols, while the VM is sampled.
    pub fn modules(&mut self) -> Result<GuestSymbols, ClientError> {
        self.parts(Request::Modules)
    }

    fn parts(&mut self, request: fn(usize) -> Request) -> Result<GuestSymbols, ClientError> {
        let (mut symbols, mut asked) = (GuestSymbols::default(), 0);
        let until = Instant::now() + SYMBOLS_TIMEOUT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Answer::Symbols(part) = self.ask_within(left, &request(asked))? else {
                return Err(unexpected(self.about.pid));
            };
            if part.more && part.text.is_empty() {
                return Err(unexpected(self.about.pid));
            }
            if asked == 0 {
                symbols.modules = part.modules;
            }
            asked += part.text.len();
            symbols.text += &part.text;
            if !part.more || asked > MAX_SYMBOLS {
                return Ok(symbols);
            }
        }
    }

    /// Begins to sample the VM.
    pub fn record(&mut self, options: RecordOptions) -> Result<Begun, ClientError> {
        match self.ask_within(SYMBOLS_TIMEOUT, &Request::Record(options))? {
            Answer::Recording(begun) => Ok(begun),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Returns the samples since the last ones.
    pub fn samples(&mut self) -> Result<Samples, ClientError> {
        match self.ask(&Request::Samples)? {
            Answer::Samples(samples) => Ok(samples),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Returns functions of the guest's kernel at these addresses, while the VM is sampled.
    pub fn functions(&mut self, addresses: &[u64]) -> Result<Vec<Function>, ClientError> {
        let mut found = Vec::new();
        for some in addresses.chunks(MAX_ADDRESSES) {
            let Answer::Functions(functions) = self.ask(&Request::Functions(some.to_vec()))? else {
                return Err(unexpected(self.about.pid));
            };
            found.extend(functions.found);
        }
        Ok(found)
    }

    /// Ends a recording. Returns for each vCPU in which part of the time there was a counter, in thousandths.
    pub fn stop_recording(&mut self) -> Result<Vec<u64>, ClientError> {
        match self.ask(&Request::StopRecording)? {
            Answer::Recorded(shares) => Ok(shares),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Sends a request that has no answer but its success.
    pub fn request(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.ask(request)? {
            Answer::Done => Ok(()),
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Ends the VM after a snapshot, and waits until it has ended: what it used is free then.
    pub fn end(&mut self) -> Result<(), ClientError> {
        self.request(&Request::End)?;
        self.stream.get_mut().allow(TIMEOUT);
        // It has nothing more to say. That it takes longer is no failure.
        let _ = self.stream.read(&mut [0]);
        Ok(())
    }

    /// Requests a snapshot, and returns the state. The parts of the memory follow.
    pub fn begin_snapshot(&mut self, stop: bool) -> Result<Vec<u8>, ClientError> {
        match self.ask(&Request::Snapshot { stop })? {
            Answer::Snapshot(len) => {
                self.stream.get_mut().allow(TIMEOUT);
                stream::receive_state(&mut self.stream, len).map_err(|error| failed(self.about.pid, &error))
            }
            _ => Err(unexpected(self.about.pid)),
        }
    }

    /// Receives the next part of the memory in a snapshot, and returns where it belongs. Returns `None` at the end.
    pub fn next_part(&mut self, part: &mut Vec<u8>) -> Result<Option<u64>, ClientError> {
        self.stream.get_mut().allow(TIMEOUT);
        stream::receive_part(&mut self.stream, part).map_err(|error| failed(self.about.pid, &error))
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, ClientError> {
        self.ask_within(TIMEOUT, request)
    }

    fn ask_within(&mut self, timeout: Duration, request: &Request) -> Result<Answer, ClientError> {
        self.stream.get_mut().allow(timeout);
        ask(self.about.pid, &mut self.stream, request)
    }
}

fn ask(process: u32, stream: &mut Stream, request: &Request) -> Result<Answer, ClientError> {
    message::send(stream.get_mut(), request).map_err(|error| failed(process, &error))?;
    answer(process, stream)
}

/// Receives the answer of a VM.
pub fn answer(process: u32, stream: &mut impl BufRead) -> Result<Answer, ClientError> {
    match message::receive(stream).map_err(|error| failed(process, &error))? {
        Some(Answer::Error(why)) => Err(ClientError::Refused(process, short(&why))),
        Some(answer) => answer.limited().map_err(|error| ClientError::Excessive(process, error)),
        None => Err(ClientError::Ended(process)),
    }
}

fn failed(process: u32, error: &io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
            ClientError::Ended(process)
        }
        // The error may quote what the VM has said.
        kind => ClientError::Silent(process, io::Error::new(kind, short(&error.to_string()))),
    }
}

fn unexpected(process: u32) -> ClientError {
    ClientError::Refused(process, "an unexpected answer: it is of another version of Tally".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(pid: u32, name: &str) -> Summary {
        Summary {
            pid,
            name: name.into(),
            runs: "true".into(),
            pmu: "none".into(),
            leaves_out_entries: false,
            cpus: 1,
            memory: 1 << 29,
            started: 0,
            age: 0.0,
        }
    }

    fn connected(process: u32, stream: UnixStream) -> Connected {
        Connected { process, owner: 0, stream }
    }

    fn picked(who: &str, vms: &[Summary]) -> Result<u32, String> {
        let vms: Vec<(&Summary, u32)> = vms.iter().map(|vm| (vm, 1000)).collect();
        pick(who, &vms, 1000).map(|number| vms[number].0.pid).map_err(|error| error.to_string())
    }

    #[test]
    fn a_vm_is_named_by_its_process_or_its_name() {
        let vms = [vm(71, "perf"), vm(72, "make"), vm(73, "71")];
        assert_eq!(picked("72", &vms), Ok(72));
        assert_eq!(picked("make", &vms), Ok(72));
        assert_eq!(picked("71", &vms), Ok(71), "a process goes before a name");
    }

    #[test]
    fn a_name_of_no_vm_or_of_several_is_one_line() {
        let vms = [vm(71, "perf"), vm(72, "perf")];
        assert_eq!(
            picked("make", &vms).unwrap_err(),
            "no VM `make` runs here; those that do: 71 (perf), 72 (perf)"
        );
        assert_eq!(
            picked("perf", &vms).unwrap_err(),
            "several VMs are called `perf`: 71, 72; name one by its process"
        );
        assert_eq!(picked("perf", &[]).unwrap_err(), "no VM of this user's runs here");
    }

    #[test]
    fn another_users_vm_is_named_by_its_process_only() {
        let (roots, anothers) = (vm(71, "perf"), vm(72, "perf"));
        let picked = |who: &str, vms: &[(&Summary, u32)]| {
            pick(who, vms, 0).map(|number| vms[number].0.pid).map_err(|error| error.to_string())
        };
        assert_eq!(picked("perf", &[(&anothers, 1000), (&roots, 0)]), Ok(71), "its name does no harm");
        assert_eq!(
            picked("perf", &[(&anothers, 1000)]).unwrap_err(),
            "no VM `perf` of this user's runs here; user 1000 has one: name it by its process, 72"
        );
        assert_eq!(picked("72", &[(&anothers, 1000), (&roots, 0)]), Ok(72));
        let looks_like_a_process = vm(73, "72");
        assert_eq!(picked("72", &[(&anothers, 1000), (&looks_like_a_process, 0)]), Ok(73));
    }

    #[test]
    fn another_users_sockets_are_asked_and_told_of_in_bounded_numbers() {
        let mut search = Search::new(0);
        let others = (0..4 * MAX_VMS_OF_OTHERS).zip(1_u32..);
        let mut wanted = BTreeMap::<u32, usize>::new();
        for (number, process) in others {
            let owner = if number < MAX_VMS_OF_OTHERS { 1000 } else { 1001 + process % 16 };
            if search.is_wanted(process, owner) {
                *wanted.entry(owner).or_default() += 1;
                search.fails(owner, ClientError::Busy(process));
            }
        }
        assert_eq!(wanted[&1000], MAX_VMS_OF_ANOTHER);
        assert!(wanted.values().sum::<usize>() <= MAX_VMS_OF_OTHERS + MAX_VMS_OF_ANOTHER);
        let silent = search.found.silent.len();
        assert!(silent <= 17 * (MAX_ERRORS_OF_ANOTHER + 2), "{silent}");
        assert_eq!(search.found.mine, None);
        assert!(search.is_wanted(1_000_000, 0), "this user's own are asked all the same");
        let (here, _there) = UnixStream::pair().unwrap();
        search.connects(connected(1_000_000, here));
        assert!(!search.is_wanted(1_000_000, 0), "it was asked already");
    }

    /// Receives a request on a VM's end of a connection.
    fn asked(stream: &UnixStream) -> Request {
        message::receive(&mut BufReader::new(stream)).unwrap().unwrap()
    }

    #[test]
    fn a_vm_that_is_slow_to_answer_does_not_delay_others() {
        let ((ours, mut first), (ours_too, mut second)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let vms = thread::spawn(move || {
            // The first does not answer before the second is greeted.
            for (number, stream) in [(2, &mut second), (1, &mut first)] {
                assert_eq!(asked(stream), Request::Hello);
                message::send(stream, &Answer::Hello(vm(number, "perf"))).unwrap();
            }
        });
        let greeted =
            greet(vec![connected(1, ours), connected(2, ours_too)], Instant::now() + Duration::from_mins(1));
        let pids: Vec<u32> = greeted.into_iter().map(|vm| vm.unwrap().about.pid).collect();
        assert_eq!(pids, [1, 2]);
        vms.join().unwrap();
    }

    #[test]
    fn a_vm_that_does_not_answer_in_time_is_an_error() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let greeted = greet(vec![connected(71, ours)], Instant::now() + Duration::from_millis(50));
        let said: Vec<String> = greeted.into_iter().map(|vm| vm.unwrap_err().to_string()).collect();
        assert_eq!(said, ["the VM 71 does not answer: timed out"]);
    }

    #[test]
    fn a_vms_error_cannot_draw_on_the_terminal() {
        let (here, there) = UnixStream::pair().unwrap();
        message::send(&mut &there, &Answer::Error("no\x1b[2J\nmore".into())).unwrap();
        let said = Vm::greet(connected(1, here), Instant::now() + TIMEOUT).unwrap_err().to_string();
        assert_eq!(said, "the VM 1 says: no?[2J?more");
    }

    #[test]
    fn an_answer_that_is_none_cannot_draw_on_the_terminal() {
        // The parser's error quotes the name.
        let bytes = b"{\"\\u001b[2J\\u009b\":1}\n";
        let said = answer(1, &mut &bytes[..]).unwrap_err().to_string();
        assert!(said.contains("?[2J?") && !said.contains(char::is_control), "{said:?}");
    }

    #[test]
    fn a_command_for_all_vms_says_which_do_not_answer() {
        let answering = |vms: &[u32], silent: &[u32]| {
            let end = Instant::now();
            let vm = |pid: &u32| Vm {
                about: vm(*pid, "perf"),
                owner: 0,
                stream: BufReader::new(Deadlined::new(UnixStream::pair().unwrap().0, end)),
            };
            let silent = silent.iter().map(|pid| ClientError::Busy(*pid)).collect();
            let mut said = Vec::new();
            let vms = Found { vms: vms.iter().map(vm).collect(), silent, mine: None }
                .answering(|error| said.push(error.to_string()));
            let pids = vms.map(|vms| vms.iter().map(|vm| vm.about.pid).collect::<Vec<_>>());
            (pids.map_err(|error| error.to_string()), said)
        };
        let busy = |pid| format!("the VM {pid} has too many clients");
        assert_eq!(answering(&[1, 2], &[3, 4]), (Ok(vec![1, 2]), vec![busy(3), busy(4)]));
        assert_eq!(answering(&[], &[3, 4]), (Err(busy(4)), vec![busy(3)]));
        assert_eq!(answering(&[], &[]), (Err("no VM of this user's runs here".to_owned()), vec![]));
    }

    #[test]
    fn a_name_cannot_draw_on_the_terminal_or_be_endless() {
        assert_eq!(vm(1, "a\x1b[2Jb\n").printable().name, "a?[2Jb?");
        assert_eq!(vm(1, &"a".repeat(70_000)).printable().name.len(), 1000);
    }
}
