//! QEMU's monitor (QMP): it saves a machine that has stopped itself, lets a saved one go on, and
//! has what is executed logged.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::shell::quoted;

/// Interval at which the end of something that has no event is looked for.
const INTERVAL: Duration = Duration::from_millis(5);

/// A connection to the monitor.
pub struct Monitor<'a> {
    stream: &'a UnixStream,
    lines: BufReader<&'a UnixStream>,
    deadline: Instant,
}

impl<'a> Monitor<'a> {
    /// Talks to a monitor, whose every answer has to come before the limit is over.
    pub fn new(stream: &'a UnixStream, limit: Duration) -> Self {
        Self { stream, lines: BufReader::new(stream), deadline: Instant::now() + limit }
    }

    /// Begins the connection of a machine that is saved or was. Memory that several machines can share is not saved.
    pub fn begin(&mut self) -> io::Result<()> {
        self.execute("qmp_capabilities", &json!({}))?;
        let shared = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
        self.execute("migrate-set-capabilities", &shared).map(drop)
    }

    /// Waits until the machine has stopped itself, saves its state in a file, and ends it.
    pub fn save(&mut self, state: &Path) -> io::Result<()> {
        // Nothing is asked meanwhile: an answer could change at which instructions the machine sees its interrupts.
        while self.line()?["event"] != "STOP" {}
        let mut destination = b"exec:cat >".to_vec();
        destination.extend(quoted(state.as_os_str()));
        self.execute("migrate", &json!({ "uri": String::from_utf8_lossy(&destination) }))?;
        loop {
            match self.status("query-migrate")?.as_str() {
                "completed" => break,
                "failed" => return Err(io::Error::other("QEMU cannot save it")),
                _ => thread::sleep(INTERVAL),
            }
        }
        self.execute("quit", &json!({}))?;
        Ok(())
    }

    /// Loads a saved state from a file, and lets the machine go on.
    pub fn load(&mut self, state: &Path) -> io::Result<()> {
        let mut source = b"exec:cat ".to_vec();
        source.extend(quoted(state.as_os_str()));
        self.execute("migrate-incoming", &json!({ "uri": String::from_utf8_lossy(&source) }))?;
        while self.status("query-status")? == "inmigrate" {
            thread::sleep(INTERVAL);
        }
        self.execute("cont", &json!({})).map(drop)
    }

    /// Begins or ends the log of all instructions that are executed.
    pub fn set_trace(&mut self, is_on: bool) -> io::Result<()> {
        // It fails if that is done already, as for a machine that was saved.
        let _ = self.execute("qmp_capabilities", &json!({}));
        let commands =
            if is_on { ["singlestep on", "log exec,nochain"] } else { ["log none", "singlestep off"] };
        for command in commands {
            self.execute("human-monitor-command", &json!({ "command-line": command }))?;
        }
        Ok(())
    }

    fn status(&mut self, command: &str) -> io::Result<String> {
        let answer = self.execute(command, &json!({}))?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        // In one piece: QEMU carries a command out when its last brace has come, and may be gone then.
        let request = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.stream.write_all(request.as_bytes())?;
        loop {
            // Other lines are the greeting and events.
            let mut answer = self.line()?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer["error"]["desc"].as_str() {
                return Err(io::Error::other(format!("{command}: {error}")));
            }
        }
    }

    fn line(&mut self) -> io::Result<Value> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(serde_json::from_str(&line)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
            Err(error) => Err(error),
        }
    }
}
