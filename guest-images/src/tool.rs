//! Runs other programs. Their failures become errors that contain their output.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use crate::child::{self, Death};
use crate::error::{Error, Result};

/// Number of lines of a failed program's output that an error contains.
const TAIL_LINES: usize = 6;

/// Runs `command` to its end and returns its standard output. `package` is Debian's name of the program's package, for
/// the message if the program is missing.
pub fn run(command: &mut Command, package: &'static str) -> Result<String> {
    child::die_with_this_process(command, Death::Terminate);
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
    let text = if stderr.trim().is_empty() { &stdout } else { &stderr };
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    Err(Error::Command {
        command: describe(command),
        status: output.status.to_string(),
        tail: lines[lines.len().saturating_sub(TAIL_LINES)..].join("; "),
    })
}

/// Returns the program and its first arguments, without the long lists of packages that may follow.
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
        assert!(error.to_string().ends_with(" install its-package"), "{error}");
    }

    #[test]
    fn a_failure_contains_the_program_s_output() {
        let error = run(Command::new("sh").args(["-c", "echo broken >&2; exit 3"]), "dash").unwrap_err();
        assert!(error.to_string().ends_with("broken"), "{error}");
    }
}
