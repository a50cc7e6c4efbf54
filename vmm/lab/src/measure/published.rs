//! Tables in documentation that the commands which measure write themselves, each with its command, date and commit.
//!
//! A Markdown file marks where a table belongs:
//! ```text
//! <!-- begin: tally-lab figures pmu -->
//! <!-- end -->
//! ```

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result};

/// Measures, and prints the tables or writes them into a Markdown file as those of a command.
pub fn measure(file: Option<&Path>, command: &str, measure: impl FnOnce() -> Result<String>) -> Result<()> {
    let Some(file) = file else {
        println!("{}", measure()?.trim_end());
        return Ok(());
    };
    check(file, command)?;
    // Of what is measured, and not of what there is when that is done.
    let stamp = format!("```sh\n{command}  # {}, commit {}\n```", date()?, commit(file)?);
    publish(file, command, &stamp, &measure()?)
}

/// Checks that a file has the marks of a command. Measuring takes minutes, so this is checked first.
fn check(file: &Path, command: &str) -> Result<()> {
    replaced(file, command, "").map(drop)
}

/// Replaces what a file has between the marks of a command by what the command printed.
fn publish(file: &Path, command: &str, stamp: &str, printed: &str) -> Result<()> {
    let text = replaced(file, command, &format!("{stamp}\n\n{}\n", printed.trim_end()))?;
    fs::write(file, text).map_err(Error::file("write", file))
}

fn replaced(file: &Path, command: &str, content: &str) -> Result<String> {
    let text = fs::read_to_string(file).map_err(Error::file("read", file))?;
    let missing = || Error::Command(format!("finding `{}` in {}", begin(command).trim_end(), file.display()));
    replace(&text, command, content).ok_or_else(missing)
}

fn begin(command: &str) -> String {
    format!("<!-- begin: {command} -->\n")
}

/// Returns the text with `content` between the marks, or `None` if it has no such marks.
fn replace(text: &str, command: &str, content: &str) -> Option<String> {
    const END: &str = "<!-- end -->";
    let begin = begin(command);
    let (before, rest) = text.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}{content}{END}{after}"))
}

/// Returns today's date.
pub fn date() -> Result<String> {
    output(Command::new("date").args(["--utc", "+%F"]))
}

/// Returns the commit of the checkout that the file is in, marked if anything but the documentation has changed since.
pub fn commit(file: &Path) -> Result<String> {
    let directory = file.parent().filter(|directory| !directory.as_os_str().is_empty());
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(arguments).current_dir(directory.unwrap_or(Path::new(".")));
        git
    };
    let commit = output(&mut git(&["rev-parse", "--short", "HEAD"]))?;
    let changes = output(&mut git(&[
        "diff",
        "--name-only",
        "HEAD",
        "--",
        ":(top)",
        ":(top,exclude)docs",
        ":(top,exclude)*.md",
    ]))?;
    Ok(if changes.is_empty() { commit } else { commit + "-dirty" })
}

fn output(command: &mut Command) -> Result<String> {
    let failed = |command: &Command| Error::Command(command.get_program().to_string_lossy().into_owned());
    let output = command.output().map_err(Error::system("run a command"))?;
    if !output.status.success() {
        return Err(failed(command));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "# Costs\n<!-- begin: figures a -->\nold\n<!-- end -->\nmore\n<!-- begin: figures b -->\n<!-- end -->\n";

    #[test]
    fn only_the_table_of_the_command_is_replaced() {
        let replaced = replace(DOCUMENT, "figures a", "new\n").unwrap();
        assert_eq!(replaced, DOCUMENT.replace("old\n", "new\n"));
        let replaced = replace(DOCUMENT, "figures b", "new\n").unwrap();
        assert_eq!(replaced, DOCUMENT.replace("b -->\n", "b -->\nnew\n"));
    }

    #[test]
    fn a_document_without_the_marks_stays_as_it_is() {
        assert_eq!(replace(DOCUMENT, "figures", "new\n"), None);
        assert_eq!(replace("<!-- begin: figures a -->\n", "figures a", "new\n"), None);
    }
}
