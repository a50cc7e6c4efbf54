//! `cargo dist`: makes Tally's Debian package, or its release archives.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use guest_images::{Arch, Progress};
use tally_packaging::build::{self, Commit};
use tally_packaging::{archive, deb};

/// Make Tally's Debian package or its release archives
#[derive(Parser)]
#[command(after_help = "Examples:\n  cargo dist deb .\n  cargo dist archives dist")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A Debian package for this machine's architecture
    Deb {
        /// Where to write it
        folder: PathBuf,
    },
    /// An archive for each architecture, their checksums, and a bill of materials
    Archives {
        /// Where to write them
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    match make(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dist: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn make(Cli { command }: &Cli) -> Result<()> {
    let (Command::Deb { folder } | Command::Archives { folder }) = command;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let (commit, mut progress) = (Commit::of_the_checkout()?, Progress::stderr("dist"));
    let programs = build::programs(Arch::X86_64, &mut progress)?;
    let made = match command {
        Command::Deb { .. } => vec![deb::write(&programs, &commit, folder)?],
        Command::Archives { .. } => {
            let riscv = build::programs(Arch::Riscv64, &mut progress)?;
            archive::write(&[(Arch::X86_64, &programs), (Arch::Riscv64, &riscv)], &commit, folder)?
        }
    };
    progress.done();
    for path in made {
        println!("{}", path.display());
    }
    Ok(())
}
