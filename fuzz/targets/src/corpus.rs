//! The committed corpora. Inputs that a person has named are files in the folder `corpus/NAME` of their target; all
//! others of the target are in one file beside it, the pack `corpus/NAME.inputs`.
//!
//! A pack holds its inputs one behind the other: of each its length in four bytes, the lowest byte first, then its
//! bytes. Shorter inputs come first, those of one length are in the order of their bytes, and none is there twice, so
//! the same inputs always make the same file. The first input has number 1.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::Target;

/// Why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be used.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} is broken: {broken}", path.display())]
    Broken { path: PathBuf, broken: Broken },
}

/// What is wrong with a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("it ends within input {0}")]
    Short(usize),
    #[error("input {0} should be further to the front, or is there twice")]
    Order(usize),
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

impl Target {
    /// Returns the folder with the inputs that a person has named. A target need not have one.
    pub fn named(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name)
    }

    /// Returns the file with all other inputs. A target need not have one.
    pub fn pack(&self) -> PathBuf {
        self.named().with_extension("inputs")
    }

    /// Returns all committed inputs, each with what `cargo fuzz --replay` calls it.
    pub fn inputs(&self) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let (folder, pack) = (self.named(), self.pack());
        let mut named = Vec::new();
        if folder.is_dir() {
            for entry in fs::read_dir(&folder).map_err(file(&folder))? {
                let path = entry.map_err(file(&folder))?.path();
                named.push((path.display().to_string(), fs::read(&path).map_err(file(&path))?));
            }
        }
        named.sort();
        let packed = read(&pack)?.into_iter().zip(1..);
        named.extend(packed.map(|(input, number)| (format!("{}#{number}", pack.display()), input)));
        Ok(named)
    }
}

/// Returns the inputs of a pack; none if the file does not exist.
pub fn read(pack: &Path) -> Result<Vec<Vec<u8>>, Error> {
    let bytes = match fs::read(pack) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(file(pack))?,
    };
    unpacked(&bytes).map_err(|broken| Error::Broken { path: pack.to_owned(), broken })
}

/// Writes a pack, but no empty one.
pub fn write(pack: &Path, inputs: Vec<Vec<u8>>) -> Result<(), Error> {
    if inputs.is_empty() && !pack.exists() {
        return Ok(());
    }
    fs::write(pack, packed(inputs)).map_err(file(pack))
}

fn packed(mut inputs: Vec<Vec<u8>>) -> Vec<u8> {
    inputs.sort_by(|one, other| order(one).cmp(&order(other)));
    inputs.dedup();
    let mut pack = Vec::new();
    for input in inputs {
        let len = u32::try_from(input.len()).expect("targets limit the length of their inputs");
        pack.extend_from_slice(&len.to_le_bytes());
        pack.extend_from_slice(&input);
    }
    pack
}

fn unpacked(mut pack: &[u8]) -> Result<Vec<Vec<u8>>, Broken> {
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    while !pack.is_empty() {
        let number = inputs.len() + 1;
        let (len, rest) = pack.split_first_chunk().ok_or(Broken::Short(number))?;
        let len = u32::from_le_bytes(*len) as usize;
        let (input, rest) = rest.split_at_checked(len).ok_or(Broken::Short(number))?;
        if inputs.last().is_some_and(|last| order(last) >= order(input)) {
            return Err(Broken::Order(number));
        }
        inputs.push(input.to_vec());
        pack = rest;
    }
    Ok(inputs)
}

fn order(input: &[u8]) -> (usize, &[u8]) {
    (input.len(), input)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pack_has_each_input_once_and_the_shortest_first() {
        let inputs = ["bb", "", "c", "abc", "ba", "c"].map(|input| input.as_bytes().to_vec());
        let pack = packed(inputs.to_vec());
        assert_eq!(pack, b"\0\0\0\0\x01\0\0\0c\x02\0\0\0ba\x02\0\0\0bb\x03\0\0\0abc");
        assert_eq!(unpacked(&pack).unwrap(), ["", "c", "ba", "bb", "abc"].map(str::as_bytes));
        assert_eq!(unpacked(&[]).unwrap(), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn a_broken_pack_gives_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let pack = folder.path().join("x.inputs");
        let says = |bytes: &[u8]| {
            fs::write(&pack, bytes).unwrap();
            read(&pack).unwrap_err().to_string().replace(&*pack.to_string_lossy(), "PACK")
        };
        let whole = packed(vec![b"a".to_vec(), b"bcd".to_vec()]);
        assert_eq!(says(&whole[..whole.len() - 1]), "PACK is broken: it ends within input 2");
        assert_eq!(says(&whole[..7]), "PACK is broken: it ends within input 2");
        assert_eq!(says(b"\xff\xff\xff\xffabc"), "PACK is broken: it ends within input 1");
        let twice = [&whole[..5], &whole[..5]].concat();
        assert_eq!(says(&twice), "PACK is broken: input 2 should be further to the front, or is there twice");
        fs::remove_file(&pack).unwrap();
        assert_eq!(read(&pack).unwrap(), Vec::<Vec<u8>>::new());
    }
}
