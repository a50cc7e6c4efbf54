//! A disk (section 5.2 of the specification): a raw image, or a block device, of the host's.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK,
    VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtio_queue::{Reader, Writer};

use super::{Device, Queues};
use crate::Access;

const SECTOR: u64 = 512;
const ENTRIES: u16 = 128;
/// How many pieces a request's data may have: what a chain holds beside its header and its status.
const MOST_SEGMENTS: u32 = ENTRIES as u32 - 2;
/// How much goes between the file and the guest's memory at a time.
const CHUNK: usize = 128 << 10;
/// What `GET_ID` answers, in 20 bytes.
const NAME: [u8; 20] = *b"tally\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// How known formats begin that are no raw images.
const OTHER_FORMATS: [(&[u8], &str); 7] = [
    (b"QFI\xfb", "a qcow2 image"),
    (b"KDMV", "a VMDK image"),
    (b"vhdxfile", "a VHDX image"),
    (b"<<< ", "a VDI image"),
    (b"\x1f\x8b", "packed with gzip"),
    (b"\xfd7zXZ", "packed with xz"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd"),
];

/// A file that cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It cannot be opened, or read.
    #[error(transparent)]
    File(io::Error),
    /// It is a folder, or anything else that has no sectors.
    #[error("neither a file nor a block device")]
    Kind,
    /// It is an image of another kind.
    #[error("{0}, and a disk is a raw image (`qemu-img convert -O raw` makes one of other images)")]
    Format(&'static str),
    /// It has no whole sectors.
    #[error("{0} bytes are no disk: its size must be a multiple of 512, and not 0")]
    Size(u64),
    /// Another guest has it, and one of them writes to it.
    #[error("in use by another guest")]
    InUse,
    /// It was to be written to, and the host has it.
    #[error("in use by this host: it is mounted, or part of something")]
    InUseByHost,
    /// Its file system cannot tell who else has it.
    #[error("cannot be locked against other guests: {0}")]
    Lock(io::Error),
}

impl From<io::Error> for DiskError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ResourceBusy => Self::InUseByHost,
            _ => Self::File(error),
        }
    }
}

impl From<TryLockError> for DiskError {
    fn from(error: TryLockError) -> Self {
        match error {
            TryLockError::WouldBlock => Self::InUse,
            TryLockError::Error(error) => Self::Lock(error),
        }
    }
}

/// The device.
#[derive(Debug)]
pub struct Disk {
    file: File,
    /// Keeps the host from using a device that is written to.
    _claim: Option<File>,
    sectors: u64,
    access: Access,
    chunk: Vec<u8>,
}

impl Disk {
    /// The disk in that file, which no other guest may have if either writes to it.
    pub fn open(path: &Path, access: Access) -> Result<Self, DiskError> {
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind);
        }
        let is_written = access == Access::ReadWrite;
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(is_written).open(path)?;
        if is_written { file.try_lock() } else { file.try_lock_shared() }?;
        // After the lock, because another guest's claim looks like the host's.
        let claim = (is_written && kind.is_block_device())
            .then(|| options.custom_flags(libc::O_EXCL).open(path))
            .transpose()?;
        let size = file.seek(SeekFrom::End(0))?;
        let mut begin = [0; 8];
        let length = file.read_at(&mut begin, 0)?;
        if let Some((_, format)) = OTHER_FORMATS.iter().find(|(magic, _)| begin[..length].starts_with(magic))
        {
            return Err(DiskError::Format(format));
        }
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(DiskError::Size(size));
        }
        Ok(Self { file, _claim: claim, sectors: size / SECTOR, access, chunk: vec![0; CHUNK] })
    }

    /// Does one request; says what becomes its status.
    fn answer(&mut self, mut says: Reader, room: &mut Writer) -> u32 {
        let mut header = [0; 16];
        if says.read_exact(&mut header).is_err() {
            return VIRTIO_BLK_S_IOERR;
        }
        let [kind @ .., _, _, _, _] = header.first_chunk::<8>().expect("it is longer");
        let kind = u32::from_le_bytes(*kind);
        let sector = u64::from_le_bytes(*header.last_chunk().expect("it is longer"));
        let done = match kind {
            VIRTIO_BLK_T_IN => self.load(sector, room),
            VIRTIO_BLK_T_OUT => self.store(sector, &mut says),
            VIRTIO_BLK_T_FLUSH => self.file.sync_data(),
            VIRTIO_BLK_T_GET_ID => room.write(&NAME).map(drop),
            _ => return VIRTIO_BLK_S_UNSUPP,
        };
        if done.is_ok() { VIRTIO_BLK_S_OK } else { VIRTIO_BLK_S_IOERR }
    }

    fn load(&mut self, sector: u64, room: &mut Writer) -> io::Result<()> {
        let mut place = self.place(sector, room.available_bytes())?;
        while room.available_bytes() > 0 {
            let chunk = &mut self.chunk[..room.available_bytes().min(CHUNK)];
            self.file.read_exact_at(chunk, place)?;
            room.write_all(chunk)?;
            place += chunk.len() as u64;
        }
        Ok(())
    }

    fn store(&mut self, sector: u64, says: &mut Reader) -> io::Result<()> {
        if self.access == Access::ReadOnly {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let mut place = self.place(sector, says.available_bytes())?;
        while says.available_bytes() > 0 {
            let chunk = &mut self.chunk[..says.available_bytes().min(CHUNK)];
            says.read_exact(chunk)?;
            self.file.write_all_at(chunk, place)?;
            place += chunk.len() as u64;
        }
        Ok(())
    }

    /// Where in the file a request begins, if all of it is on the disk and in whole sectors.
    fn place(&self, sector: u64, length: usize) -> io::Result<u64> {
        let length = length as u64;
        let end = sector.checked_add(length / SECTOR);
        if !length.is_multiple_of(SECTOR) || end.is_none_or(|end| end > self.sectors) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(sector * SECTOR)
    }
}

impl Device for Disk {
    fn id(&self) -> u32 {
        2
    }

    fn features(&self) -> u64 {
        let read_only = u64::from(self.access == Access::ReadOnly) << VIRTIO_BLK_F_RO;
        1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX | read_only
    }

    fn config(&self) -> Vec<u8> {
        // Capacity in sectors, the longest piece (which is only said with a feature that we lack), the most pieces.
        [&self.sectors.to_le_bytes()[..], &[0; 4], &MOST_SEGMENTS.to_le_bytes()].concat()
    }

    fn queues(&self) -> Vec<u16> {
        vec![ENTRIES]
    }

    fn serve(&mut self, queues: &mut Queues) {
        while let Some(mut request) = queues.next(0) {
            // The last byte of the answer is the status. Where there is no room for one, there is nothing to be said.
            let data = request.writer.available_bytes().saturating_sub(1);
            let written = match request.writer.split_at(data) {
                Ok(mut status) if status.available_bytes() == 1 => {
                    let code = self.answer(request.reader, &mut request.writer);
                    let code = u8::try_from(code).expect("a status is a byte");
                    // There is room for one byte.
                    let _ = status.write_all(&[code]);
                    request.writer.bytes_written() + 1
                }
                _ => 0,
            };
            queues.done(request.head, u32::try_from(written).unwrap_or(u32::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;

    fn image(sectors: u8) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..sectors).flat_map(|sector| [sector; 512]).collect();
        file.write_all(&bytes).unwrap();
        file
    }

    fn ask(
        disk: &mut Disk,
        driver: &mut Driver,
        kind: u32,
        sector: u64,
        data: &[u8],
        room: u32,
    ) -> (Vec<u8>, u8) {
        let says = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), data].concat();
        let answer = driver.ask(0, &says, room + 1);
        driver.serve(disk);
        driver.answered(0).expect("every request is answered");
        let mut answer = driver.bytes(answer, room + 1);
        let status = answer.pop().unwrap();
        (answer, status)
    }

    fn disk(file: &tempfile::NamedTempFile, access: Access) -> (Disk, Driver) {
        let disk = Disk::open(file.path(), access).unwrap();
        let driver = Driver::ready(&disk);
        (disk, driver)
    }

    #[test]
    fn what_is_written_is_read_back_and_on_the_host() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 3, &[], 512), (vec![3; 512], 0));
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, 3, &[9; 1024], 0).1, 0);
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_FLUSH, 0, &[], 0).1, 0);
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 4, &[], 512), (vec![9; 512], 0));
        assert_eq!(std::fs::read(file.path()).unwrap()[3 * 512..5 * 512], [9; 1024]);
    }

    #[test]
    fn beyond_the_end_there_is_nothing() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        for sector in [8, 7, u64::MAX, u64::MAX / 512] {
            assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_IN, sector, &[], 1024).1, 1, "{sector}");
            assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, sector, &[1; 1024], 0).1, 1, "{sector}");
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 8 * 512);
    }

    #[test]
    fn a_read_only_disk_stays_as_it_is() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadOnly);
        assert_eq!(driver.read(0x10) & 1 << VIRTIO_BLK_F_RO, 1 << VIRTIO_BLK_F_RO);
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, 0, &[1; 512], 0).1, 1);
        assert_eq!(std::fs::read(file.path()).unwrap()[..512], [0; 512]);
    }

    #[test]
    fn an_image_that_shrinks_meanwhile_gives_errors() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        file.as_file().set_len(1024).unwrap();
        assert_eq!(ask(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 5, &[], 512).1, 1);
    }

    #[test]
    fn two_guests_cannot_write_to_one_disk() {
        let file = image(8);
        let reader = Disk::open(file.path(), Access::ReadOnly).unwrap();
        Disk::open(file.path(), Access::ReadOnly).expect("two may read");
        assert!(matches!(Disk::open(file.path(), Access::ReadWrite), Err(DiskError::InUse)));
        drop(reader);
        let _writer = Disk::open(file.path(), Access::ReadWrite).unwrap();
        assert!(matches!(Disk::open(file.path(), Access::ReadOnly), Err(DiskError::InUse)));
    }

    #[test]
    fn only_a_lock_that_another_guest_has_is_said_to_be_one() {
        let error = DiskError::from(TryLockError::Error(io::Error::from_raw_os_error(libc::ENOLCK)));
        assert_eq!(
            error.to_string(),
            "cannot be locked against other guests: No locks available (os error 37)"
        );
        assert!(matches!(DiskError::from(TryLockError::WouldBlock), DiskError::InUse));
    }

    #[test]
    fn a_device_that_the_host_has_mounted_is_said_to_be_in_use() {
        let error = DiskError::from(io::Error::from_raw_os_error(libc::EBUSY));
        assert_eq!(error.to_string(), "in use by this host: it is mounted, or part of something");
        let error = DiskError::from(io::Error::from_raw_os_error(libc::EACCES));
        assert!(matches!(error, DiskError::File(_)));
    }

    #[test]
    fn what_is_no_disk_is_refused_in_words() {
        let refused = |content: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(content).unwrap();
            Disk::open(file.path(), Access::ReadOnly).unwrap_err().to_string()
        };
        assert!(refused(b"").contains("0 bytes"));
        assert!(refused(b"hello").contains("multiple of 512"));
        assert!(refused(b"QFI\xfb\0\0\0\x03").contains("qcow2"));
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Disk::open(folder.path(), Access::ReadOnly), Err(DiskError::Kind)));
        assert!(matches!(Disk::open(Path::new("/dev/null"), Access::ReadOnly), Err(DiskError::Kind)));
    }

    proptest! {
        #[test]
        fn no_request_harms(kind in prop_oneof![0..12_u32, any::<u32>()], sector in prop_oneof![0..20_u64, any::<u64>()],
                            says in 0..2000_usize, room in 0..2000_u32) {
            let file = image(8);
            let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
            let mut text = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), &[1; 2000]].concat();
            text.truncate(says);
            if says + room as usize > 0 {
                driver.ask(0, &text, room);
                driver.serve(&mut disk);
                prop_assert!(driver.answered(0).is_some());
            }
            prop_assert_eq!(file.as_file().metadata().unwrap().len(), 8 * 512);
        }
    }
}
