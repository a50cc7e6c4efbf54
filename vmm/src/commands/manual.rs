//! Shell completions and manual pages for a package of Tally, generated from the command line's definition.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::Cli;
use crate::host::printer;

/// Prints a completion script for a shell.
pub fn completions(shell: Shell) -> Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tally", &mut text);
    print(&text)
}

/// Prints the manual page of `tally`, or writes those of all commands into a directory.
pub fn manual(folder: Option<&Path>) -> Result<ExitCode> {
    let Some(folder) = folder else {
        let (_, page) = pages()?.swap_remove(0);
        return print(&page);
    };
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, page) in pages()? {
        let path = folder.join(name);
        fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the files' names and contents, that of `tally` first.
fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut tally = Cli::command().disable_help_subcommand(true);
    tally.build();
    let commands: Vec<_> = tally.get_subcommands().cloned().collect();
    let page = |command: clap::Command| {
        let man = Man::new(command).source(concat!("tally ", env!("CARGO_PKG_VERSION")));
        let mut text = Vec::new();
        man.render(&mut text)?;
        Ok((man.get_filename(), text))
    };
    std::iter::once(tally).chain(commands).map(page).collect()
}

fn print(text: &[u8]) -> Result<ExitCode> {
    let mut out = printer::out();
    out.write_all(text).and_then(|()| out.flush()).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}
