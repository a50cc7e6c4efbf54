//! What a guest does in a shared folder that no program of its own does.
//!
//! - `share-workload random FILE NUMBER`: reads 4 KiB of the file so often, at places all over it.
//! - `share-workload stat FOLDER FOLDERS FILES`: looks at each of so many files in each of so many folders, which have
//!   numbers as names, from 1.

use std::env;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PIECE: usize = 4096;

fn main() -> io::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["random", file, number] => read(&File::open(file)?, number_of(number)?),
        ["stat", folder, folders, files] => look(Path::new(folder), number_of(folders)?, number_of(files)?),
        _ => Err(io::Error::other("random or stat?")),
    }
}

fn number_of(word: &str) -> io::Result<u64> {
    word.parse().map_err(io::Error::other)
}

fn read(file: &File, number: u64) -> io::Result<()> {
    /// Coprime to the number of pieces, and about the golden ratio of it: no place comes twice before all have come,
    /// and none is near the last ones.
    const STEP: u64 = 15_821;
    let pieces = file.metadata()?.len() / PIECE as u64;
    let mut piece = [0; PIECE];
    (0..number).try_for_each(|at| file.read_exact_at(&mut piece, at * STEP % pieces * PIECE as u64))
}

fn look(folder: &Path, folders: u64, files: u64) -> io::Result<()> {
    for number in 1..=folders {
        let folder = folder.join(number.to_string());
        for file in 1..=files {
            fs::symlink_metadata(folder.join(file.to_string()))?;
        }
    }
    Ok(())
}
