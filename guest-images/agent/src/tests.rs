//! Tests that run the agent on this machine, with sockets as the ports.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::thread::{self, JoinHandle};

use guest_agent::protocol::{Access, Decoder, Message, Share, Size, Start, Terminals, ToGuest, ToHost};

use crate::ports::Ports;
use crate::session::{self, End};
use crate::sys;

const ALL_TERMINAL: Terminals = Terminals { stdin: true, stdout: true, stderr: true };
const MEBIBYTE: usize = 1 << 20;

/// The host's ends of the ports, and the agent.
struct Host {
    control: UnixStream,
    decoder: Decoder<ToHost>,
    stdin: Option<UnixStream>,
    stdout: UnixStream,
    stderr: UnixStream,
    terminal: UnixStream,
    agent: JoinHandle<End>,
}

impl Host {
    /// Starts an agent, which waits for its first message.
    fn new() -> Self {
        let [control, stdin, stdout, stderr, terminal] = [(); 5].map(|()| UnixStream::pair().unwrap());
        let guest_ends = [control.0, stdin.0, stdout.0, stderr.0, terminal.0];
        let agent = thread::spawn(move || {
            let [control, stdin, stdout, stderr, terminal] = guest_ends.map(|socket| {
                sys::set_nonblocking(&socket).unwrap();
                Rc::new(File::from(OwnedFd::from(socket)))
            });
            session::serve(&Ports { control, stdin, stdout, stderr, terminal }, None).unwrap()
        });
        let mut host = Self {
            control: control.1,
            decoder: Decoder::new(),
            stdin: Some(stdin.1),
            stdout: stdout.1,
            stderr: stderr.1,
            terminal: terminal.1,
            agent,
        };
        assert_eq!(host.receive(), ToHost::Ready);
        host
    }

    /// Starts an agent that runs this script.
    fn run(script: &str, terminals: Terminals) -> Self {
        let command = ["sh", "-c", script].map(OsString::from).to_vec();
        Self::start(Start { terminals, command, ..in_tmp() })
    }

    fn start(start: Start) -> Self {
        let mut host = Self::new();
        host.send(&ToGuest::Start(start));
        host
    }

    fn send(&mut self, message: &ToGuest) {
        self.control.write_all(&message.encode().unwrap()).unwrap();
    }

    fn receive(&mut self) -> ToHost {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return message;
            }
            let mut bytes = [0; 100];
            let length = self.control.read(&mut bytes).unwrap();
            assert_ne!(length, 0, "the agent has closed the port");
            self.decoder.feed(&bytes[..length]);
        }
    }

    /// Reads the expected text from a stream.
    fn expect(mut stream: &UnixStream, expected: &str) {
        let mut bytes = vec![0; expected.len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), expected);
    }

    /// Waits for the command's end. Returns its status, and its output on standard output, standard error and the
    /// terminal.
    fn finish(mut self) -> (u8, [Vec<u8>; 3]) {
        // The output does not fit into the sockets' buffers, so it is read while the command runs.
        let readers = [&self.stdout, &self.stderr, &self.terminal].map(read_all);
        let message = self.receive();
        let ToHost::Exited(status) = message else { panic!("{message:?}") };
        assert_eq!(self.agent.join().unwrap(), End::Reported);
        (status, readers.map(|reader| reader.join().unwrap()))
    }

    /// Does the same as [`Self::finish`], and returns the output as text.
    fn finish_with_text(self) -> (u8, [String; 3]) {
        let (status, streams) = self.finish();
        (status, streams.map(|bytes| String::from_utf8(bytes).unwrap()))
    }
}

fn read_all(socket: &UnixStream) -> JoinHandle<Vec<u8>> {
    let mut socket = socket.try_clone().unwrap();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

fn in_tmp() -> Start {
    Start { folder: Some("/tmp".into()), ..Start::default() }
}

/// Returns a mebibyte of data with all values of a byte.
fn noise() -> Vec<u8> {
    (0..MEBIBYTE).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect()
}

#[test]
fn output_and_errors_are_separate_and_the_status_is_reported() {
    let (status, streams) =
        Host::run("echo out; echo err >&2; exit 3", Terminals::default()).finish_with_text();
    assert_eq!((status, streams), (3, ["out\n".into(), "err\n".into(), String::new()]));
}

#[test]
fn pipes_carry_every_byte_and_the_end_of_the_input() {
    let mut host = Host::run("tee /dev/stderr", Terminals::default());
    let mut stdin = host.stdin.take().unwrap();
    let writer = thread::spawn(move || stdin.write_all(&noise()).unwrap());
    let (status, [stdout, stderr, terminal]) = host.finish();
    writer.join().unwrap();
    assert_eq!((status, terminal.len()), (0, 0));
    assert!(stdout == noise() && stderr == noise(), "{} and {} bytes", stdout.len(), stderr.len());
}

#[test]
fn a_terminal_carries_every_byte_both_ways() {
    let host = Host::run("stty raw -echo; echo ready; head -c 1048576", ALL_TERMINAL);
    Host::expect(&host.terminal, "ready\n");
    let mut terminal = host.terminal.try_clone().unwrap();
    let writer = thread::spawn(move || terminal.write_all(&noise()).unwrap());
    let (status, [_, _, terminal]) = host.finish();
    writer.join().unwrap();
    assert!(status == 0 && terminal == noise(), "{} bytes", terminal.len());
}

#[test]
fn only_the_selected_streams_are_a_terminal() {
    let script = "[ ! -t 0 ] || [ -t 1 ] || [ -t 2 ] || echo input";
    let terminals = Terminals { stdin: true, ..Terminals::default() };
    let (status, [stdout, _, _]) = Host::run(script, terminals).finish_with_text();
    assert_eq!((status, stdout.as_str()), (0, "input\n"));
    let terminals = Terminals { stdout: true, stderr: true, ..Terminals::default() };
    let (status, [_, _, terminal]) =
        Host::run("[ -t 0 ] || [ ! -t 1 ] || [ ! -t 2 ] || echo both", terminals).finish_with_text();
    assert_eq!((status, terminal.as_str()), (0, "both\r\n"));
}

#[test]
fn a_terminal_has_the_size_of_the_hosts_and_follows_it() {
    let script = "trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.01; done";
    let command = ["sh", "-c", script].map(OsString::from).to_vec();
    let size = Some(Size { rows: 33, columns: 101 });
    let mut host = Host::start(Start { terminals: ALL_TERMINAL, size, command, ..in_tmp() });
    Host::expect(&host.terminal, "33 101\r\n");
    host.send(&ToGuest::Size(Size { rows: 20, columns: 70 }));
    let (status, [_, _, terminal]) = host.finish_with_text();
    assert_eq!((status, terminal.as_str()), (0, "20 70\r\n"));
}

#[test]
fn ctrl_c_on_the_terminal_ends_the_command() {
    let mut host = Host::run("echo ready; exec cat", ALL_TERMINAL);
    Host::expect(&host.terminal, "ready\r\n");
    host.terminal.write_all(&[3]).unwrap();
    let (status, [_, _, terminal]) = host.finish_with_text();
    assert_eq!((status, terminal.as_str()), (128 + 2, "^C"));
}

#[test]
fn a_signal_reaches_the_command_and_is_answered() {
    let mut host =
        Host::run("trap 'echo terminated; exit 5' TERM; echo ready; read line", Terminals::default());
    Host::expect(&host.stdout, "ready\n");
    host.send(&ToGuest::Signal(15));
    assert_eq!(host.receive(), ToHost::SignalSent(15));
    let (status, [stdout, _, _]) = host.finish_with_text();
    assert_eq!((status, stdout.as_str()), (5, "terminated\n"));
}

#[test]
fn a_command_that_a_signal_ends_has_a_shells_status_for_it() {
    let mut host = Host::run("exec cat", Terminals::default());
    host.send(&ToGuest::Signal(9));
    assert_eq!(host.receive(), ToHost::SignalSent(9));
    assert_eq!(host.finish().0, 128 + 9);
}

#[test]
fn a_signal_that_does_not_exist_is_not_answered() {
    let mut host = Host::run("exec cat", Terminals::default());
    host.send(&ToGuest::Signal(200));
    host.send(&ToGuest::Signal(15));
    assert_eq!(host.receive(), ToHost::SignalSent(15));
    host.finish();
}

#[test]
fn unread_output_does_not_block_other_streams_or_signals() {
    let script = "cat /dev/zero & trap 'kill $!; exit 7' TERM; sleep 0.1; echo still here >&2; wait";
    let mut host = Host::run(script, Terminals::default());
    Host::expect(&host.stderr, "still here\n");
    host.send(&ToGuest::Signal(15));
    assert_eq!(host.receive(), ToHost::SignalSent(15));
    assert_eq!(host.finish().0, 7);
}

#[test]
fn unread_input_does_not_block_signals() {
    let mut host = Host::run("trap 'exit 7' TERM; echo ready; sleep 1000 & wait", Terminals::default());
    Host::expect(&host.stdout, "ready\n");
    let mut stdin = host.stdin.take().unwrap();
    let writer = thread::spawn(move || stdin.write_all(&noise()));
    host.send(&ToGuest::Signal(15));
    assert_eq!(host.receive(), ToHost::SignalSent(15));
    assert_eq!(host.finish().0, 7);
    // The agent has closed the port.
    assert!(writer.join().unwrap().is_err());
}

#[test]
fn a_command_gets_sigpipe_when_the_host_closes_its_output() {
    let host = Host::run("exec cat /dev/zero", Terminals::default());
    host.stdout.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(host.finish().0, 128 + 13);
}

#[test]
fn background_processes_are_not_waited_for_and_all_output_arrives() {
    let script = "sleep 1000 & echo $!; head -c 60000 /dev/zero >&2";
    let (status, [stdout, stderr, _]) = Host::run(script, Terminals::default()).finish_with_text();
    assert_eq!((status, stderr.len()), (0, 60000));
    let left: libc::pid_t = stdout.trim().parse().unwrap();
    // SAFETY: the call takes two numbers, and the process is the one that the script left.
    assert_eq!(unsafe { libc::kill(left, libc::SIGKILL) }, 0);
}

#[test]
fn the_last_lines_on_a_terminal_arrive() {
    let (status, [_, _, terminal]) = Host::run("seq 3000", ALL_TERMINAL).finish_with_text();
    let lines: String = (1..=3000).flat_map(|number| [number.to_string(), "\r\n".to_owned()]).collect();
    assert!(status == 0 && terminal == lines, "{} bytes of {}", terminal.len(), lines.len());
}

#[test]
fn a_program_that_does_not_exist_is_reported_as_not_found() {
    let start = Start { command: vec!["no-such-program".into()], ..in_tmp() };
    let (status, [_, stderr, _]) = Host::start(start.clone()).finish_with_text();
    assert_eq!((status, stderr.as_str()), (127, "no-such-program: command not found\n"));
    let (status, [_, _, terminal]) =
        Host::start(Start { terminals: ALL_TERMINAL, ..start }).finish_with_text();
    assert_eq!((status, terminal.as_str()), (127, "no-such-program: command not found\r\n"));
}

#[test]
fn a_missing_interpreter_is_reported_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    for name in ["./script".as_ref(), script.as_os_str()] {
        let start = Start {
            command: vec![name.to_owned()],
            folder: Some(folder.path().as_os_str().to_owned()),
            ..Start::default()
        };
        let (status, [_, stderr, _]) = Host::start(start).finish_with_text();
        let expected = format!("{}: its interpreter or loader is not in the guest\n", name.display());
        assert_eq!((status, stderr), (126, expected));
    }
}

#[test]
fn a_file_that_is_not_executable_is_not_run() {
    let start = Start { command: vec!["/etc/passwd".into()], ..in_tmp() };
    let (status, [_, stderr, _]) = Host::start(start).finish_with_text();
    assert_eq!((status, stderr.as_str()), (126, "/etc/passwd: permission denied\n"));
}

#[test]
fn a_command_starts_with_no_blocked_or_ignored_signals() {
    let script = "while read -r key value; do case $key in SigBlk: | SigIgn:) echo $value ;; esac; done \
                  </proc/self/status";
    let (status, [stdout, _, _]) = Host::run(script, Terminals::default()).finish_with_text();
    let sets: Vec<u64> = stdout.lines().map(|set| u64::from_str_radix(set, 16).unwrap()).collect();
    // Signals 32 and above may be used by the C library.
    let ordinary = sets.iter().map(|set| set & 0x7fff_ffff);
    assert!(status == 0 && ordinary.eq([0, 0]), "{stdout}");
}

#[test]
fn a_command_leads_a_session_and_has_its_directory_and_environment() {
    let script = "read -r pid name state parent group session rest </proc/self/stat; \
                  [ $$ = $group ] && [ $$ = $session ] && pwd && echo $PATH $HOME $TERM";
    let (status, [stdout, stderr, _]) = Host::run(script, Terminals::default()).finish_with_text();
    let expected = "/tmp\n/bin:/usr/bin:/sbin:/usr/sbin /root linux\n";
    assert_eq!((status, stdout.as_str(), stderr.as_str()), (0, expected, ""));
}

#[test]
fn a_bad_directory_or_mount_point_is_reported_to_the_user() {
    let command = vec![OsString::from("true")];
    let mut host = Host::start(Start {
        folder: Some("/no/folder".into()),
        command: command.clone(),
        ..Start::default()
    });
    let ToHost::Failed(reason) = host.receive() else { panic!("the command was run") };
    assert!(reason.starts_with("cannot start in /no/folder: "), "{reason}");
    let path = OsString::from("/proc/cannot/be/made");
    let share = Share { tag: "tag".into(), path, access: Access::ReadOnly };
    let mut host = Host::start(Start { shares: vec![share], command, ..in_tmp() });
    let ToHost::Failed(reason) = host.receive() else { panic!("the command was run") };
    assert!(reason.starts_with("cannot mount /proc/cannot/be/made: "), "{reason}");
}
