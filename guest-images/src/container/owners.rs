//! To whom the files of an image belong, and with which permissions. They are unpacked as the files of whoever runs
//! this program, so this is kept beside them, by the numbers of their inodes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const MAGIC: &[u8; 8] = b"owners 1";
/// An inode's number, its user, its group and its mode.
const RECORD: usize = 8 + 3 * 4;

/// To whom a file belongs, and its permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owned {
    pub user: u32,
    pub group: u32,
    /// The permissions, with the bits for set-user-ID and the like.
    pub mode: u32,
}

/// What is known of an image's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners(Vec<(u64, Owned)>);

impl Owners {
    /// Makes it from what is known of some inodes.
    pub fn of(inodes: impl IntoIterator<Item = (u64, Owned)>) -> Self {
        let mut inodes: Vec<_> = inodes.into_iter().collect();
        inodes.sort_unstable_by_key(|(inode, _)| *inode);
        Self(inodes)
    }

    /// Returns what is known, in the order of the inodes' numbers.
    pub fn into_inner(self) -> Vec<(u64, Owned)> {
        self.0
    }

    /// Writes a file for the image in this folder.
    pub fn write(&self, file: &Path, root: &Path) -> Result<(), String> {
        let inode = fs::metadata(root).map_err(|error| error.to_string())?.ino();
        let mut bytes = Vec::with_capacity(MAGIC.len() + 8 + self.0.len() * RECORD);
        bytes.extend(MAGIC);
        bytes.extend(inode.to_le_bytes());
        for (inode, Owned { user, group, mode }) in &self.0 {
            bytes.extend(inode.to_le_bytes());
            for number in [user, group, mode] {
                bytes.extend(number.to_le_bytes());
            }
        }
        fs::write(file, bytes).map_err(|error| error.to_string())
    }

    /// Reads such a file.
    pub fn read(file: &Path, root: &Path) -> Result<Self, String> {
        let bytes = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let inode = fs::metadata(root).map_err(|error| format!("{}: {error}", root.display()))?.ino();
        let known = bytes.strip_prefix(MAGIC).and_then(|bytes| bytes.split_first_chunk());
        let records = known.filter(|(of, _)| u64::from_le_bytes(**of) == inode).map(|(_, records)| records);
        let records = records.ok_or_else(|| {
            let folder = root.parent().unwrap_or(root).display();
            format!("{folder} was copied, and nobody knows to whom its files belong")
        })?;
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let record = |record: &[u8]| {
            let inode = u64::from_le_bytes(record[..8].try_into().expect("eight bytes"));
            let owned = Owned {
                user: number(&record[8..12]),
                group: number(&record[12..16]),
                mode: number(&record[16..]),
            };
            (inode, owned)
        };
        Ok(Self(records.chunks_exact(RECORD).map(record).collect()))
    }
}
