//! Runs other programs and turns their failures into errors that show what they said.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use crate::child::{self, Death};
use crate::{Error, Result};

/// How much of a failed program's output an error repeats.
const TAIL_LINES: usize = 6;

/// Runs `command` to its end and returns what it wrote to its standard output.
/// `package` is where the program comes from, for the message when it is missing.
pub fn run(command: &mut Command, package: &'static str) -> Result<String> {
    child::die_with_this_process(command, Death::Asked);
    let output = command.stdin(Stdio::null()).output().map_err(|source| {
        let program = command.get_program().to_string_lossy().into_owned();
        if source.kind() == ErrorKind::NotFound {
            Error::MissingProgram { program, package }
        } else {
            Error::Io { action: "run", path: program.into(), source }
        }
    })?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = if stderr.trim().is_empty() { &stdout } else { &stderr };
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    Err(Error::Command {
        command: describe(command),
        status: output.status.to_string(),
        tail: lines[lines.len().saturating_sub(TAIL_LINES)..].join("; "),
    })
}

/// The program and its first arguments; the long lists of packages that may follow say little.
fn describe(command: &Command) -> String {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if words.len() > 6 { format!("{} ...", words[..6].join(" ")) } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let error = run(&mut Command::new("no-such-program-here"), "its-package").unwrap_err();
        assert!(error.to_string().contains("apt-get install its-package"), "{error}");
    }

    #[test]
    fn a_failure_repeats_what_the_program_said() {
        let error = run(Command::new("sh").args(["-c", "echo broken >&2; exit 3"]), "dash").unwrap_err();
        assert!(error.to_string().ends_with("broken"), "{error}");
    }
}
