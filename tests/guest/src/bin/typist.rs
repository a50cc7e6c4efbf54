//! Runs a command on a pseudo-terminal and executes scripted steps there.
//!
//! Usage: `typist STEP... -- COMMAND ARGUMENT...`
//!
//! - `expect:TEXT` waits for text to appear.
//! - `type:KEYS` types.
//! - `size:ROWSxCOLUMNS` sets the terminal's size.
//!
//! In text and keys, `\n`, `\r`, `\\` and `\xHH` stand for a byte. The terminal's output goes to standard output. The
//! exit status is the command's, or 124 if a step failed or timed out after a minute.

use std::process::{Command, ExitCode};
use std::time::Duration;

use guest_tests::terminal::Session;

const LIMIT: Duration = Duration::from_mins(1);
const FAILED: u8 = 124;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(message) => {
            eprintln!("typist: {message}");
            ExitCode::from(FAILED)
        }
    }
}

fn run(arguments: &[String]) -> Result<ExitCode, String> {
    let end = arguments.iter().position(|word| word == "--").ok_or("no `--` before the command")?;
    let (steps, command) = (&arguments[..end], &arguments[end + 1..]);
    let (name, rest) = command.split_first().ok_or("no command")?;
    let mut command = Command::new(name);
    command.args(rest);
    let mut session = Session::start(command).map_err(|error| error.to_string())?;
    for step in steps {
        match step.split_once(':') {
            Some(("expect", text)) => session.expect(&String::from_utf8_lossy(&bytes(text)?), LIMIT)?,
            Some(("type", keys)) => session.type_in(&bytes(keys)?).map_err(|error| error.to_string())?,
            Some(("size", size)) => {
                let (rows, columns) = size.split_once('x').ok_or("a size is ROWSxCOLUMNS")?;
                let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number"));
                session.resize(number(rows)?, number(columns)?).map_err(|error| error.to_string())?;
            }
            _ => return Err(format!("`{step}` is neither expect: nor type: nor size:")),
        }
    }
    let status = session.wait(LIMIT).map_err(|error| error.to_string())?;
    print!("{}", session.seen());
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)))
}

/// Replaces the escapes in a text.
fn bytes(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            bytes.extend(c.encode_utf8(&mut [0; 4]).bytes());
            continue;
        }
        match rest.next() {
            Some('n') => bytes.push(b'\n'),
            Some('r') => bytes.push(b'\r'),
            Some('\\') => bytes.push(b'\\'),
            Some('x') => {
                let digits: String = rest.by_ref().take(2).collect();
                let byte = u8::from_str_radix(&digits, 16);
                bytes.push(byte.map_err(|_| format!("`\\x{digits}` is no byte"))?);
            }
            _ => return Err(format!("`{text}`: unknown escape")),
        }
    }
    Ok(bytes)
}
