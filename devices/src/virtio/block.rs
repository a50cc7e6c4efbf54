//! A block device (section 5.2 of the specification), backed by a raw image or a block device of the host.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::{Device, Queues, Reader, Writer};
use crate::access::Access;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT,
};

const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 128;
/// Maximum number of data segments in a request. The header and the status take one descriptor each.
const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
/// Maximum size of a data segment, and number of bytes copied between the file and the guest's memory at a time.
const CHUNK: usize = 128 << 10;
/// Maximum number of bytes in a request.
const MAX_DATA: usize = MAX_SEGMENTS as usize * CHUNK;
/// The device ID string, the reply to `GET_ID`.
const DEVICE_ID_STRING: [u8; 20] = *b"tally\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Magic numbers of known formats that are not raw images.
const OTHER_FORMATS: [(&[u8], &str); 7] = [
    (b"QFI\xfb", "a qcow2 image"),
    (b"KDMV", "a VMDK image"),
    (b"vhdxfile", "a VHDX image"),
    (b"<<< ", "a VDI image"),
    (b"\x1f\x8b", "compressed with gzip"),
    (b"\xfd7zXZ", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
];

/// The reason why a file cannot be used as a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file cannot be opened or read.
    #[error(transparent)]
    File(io::Error),
    /// The file is a directory or another kind of file without sectors.
    #[error("neither a file nor a block device")]
    Kind,
    /// The file is not a raw image.
    #[error(
        "{0}, but a disk must be a raw image (`qemu-img convert -O raw` converts images of other formats)"
    )]
    Format(&'static str),
    /// The size is zero, or not a multiple of a sector's.
    #[error("{0} bytes are no disk: its size must be a multiple of 512, and not 0")]
    Size(u64),
    /// Another guest has the file open, and at least one of the two guests may write to it.
    #[error("in use by another guest")]
    InUse,
    /// The host uses the block device, so the guest must not write to it.
    #[error("in use by this host: it is mounted, or used for LVM, RAID or swap")]
    InUseByHost,
    /// The file system does not support locks.
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

/// The virtio block device.
#[derive(Debug)]
pub struct Disk {
    file: File,
    /// Exclusive open (`O_EXCL`) of a writable block device. The host cannot mount the device while this is open.
    _claim: Option<File>,
    sectors: u64,
    access: Access,
    chunk: Vec<u8>,
}

impl Disk {
    /// Opens a disk. Fails if another guest uses the file and at least one of the two guests may write to it.
    pub fn open(path: &Path, access: Access) -> Result<Self, DiskError> {
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind);
        }
        let is_written = access == Access::ReadWrite;
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(is_written).open(path)?;
        if is_written { file.try_lock() } else { file.try_lock_shared() }?;
        // The lock comes first: an exclusive open by another guest gives EBUSY too, which would be reported as use by
        // the host.
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

    /// Processes one request. Returns its status.
    fn process(&mut self, mut request: Reader, reply: &mut Writer) -> u32 {
        let mut header = [0; 16];
        if request.read_exact(&mut header).is_err() {
            return VIRTIO_BLK_S_IOERR;
        }
        let [kind @ .., _, _, _, _] = header.first_chunk::<8>().expect("it is longer");
        let kind = u32::from_le_bytes(*kind);
        let sector = u64::from_le_bytes(*header.last_chunk().expect("it is longer"));
        // Drivers that do not negotiate `VIRTIO_BLK_F_SIZE_MAX` are bound by this too.
        if request.available_bytes().max(reply.available_bytes()) > MAX_DATA {
            return VIRTIO_BLK_S_IOERR;
        }
        let result = match kind {
            VIRTIO_BLK_T_IN => self.read(sector, reply),
            VIRTIO_BLK_T_OUT => self.write(sector, &mut request),
            VIRTIO_BLK_T_FLUSH => self.flush(),
            VIRTIO_BLK_T_GET_ID => reply.write(&DEVICE_ID_STRING).map(drop),
            _ => return VIRTIO_BLK_S_UNSUPP,
        };
        if result.is_ok() { VIRTIO_BLK_S_OK } else { VIRTIO_BLK_S_IOERR }
    }

    fn read(&mut self, sector: u64, data: &mut Writer) -> io::Result<()> {
        let mut offset = self.offset(sector, data.available_bytes())?;
        while data.available_bytes() > 0 {
            let chunk = &mut self.chunk[..data.available_bytes().min(CHUNK)];
            self.file.read_exact_at(chunk, offset)?;
            data.write_all(chunk)?;
            offset += chunk.len() as u64;
        }
        Ok(())
    }

    fn write(&mut self, sector: u64, data: &mut Reader) -> io::Result<()> {
        if self.access == Access::ReadOnly {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let mut offset = self.offset(sector, data.available_bytes())?;
        while data.available_bytes() > 0 {
            let chunk = &mut self.chunk[..data.available_bytes().min(CHUNK)];
            data.read_exact(chunk)?;
            self.file.write_all_at(chunk, offset)?;
            offset += chunk.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        match self.access {
            // The guest has written nothing, and may not make the host write what others have written.
            Access::ReadOnly => Ok(()),
            Access::ReadWrite => self.file.sync_data(),
        }
    }

    /// Returns the file offset of a request. Fails unless the request covers whole sectors within the disk.
    fn offset(&self, sector: u64, length: usize) -> io::Result<u64> {
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
        1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_SIZE_MAX | read_only
    }

    fn config(&self) -> Vec<u8> {
        // `capacity`, `size_max`, `seg_max`.
        let size_max = u32::try_from(CHUNK).expect("it is 128 KiB");
        [&self.sectors.to_le_bytes()[..], &size_max.to_le_bytes(), &MAX_SEGMENTS.to_le_bytes()].concat()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn serve(&mut self, queues: &mut Queues) {
        while let Some(mut request) = queues.pop(0) {
            // The last writable byte is the status. A request without one cannot be answered.
            let written = match request.writer.split_last() {
                Some(mut status) => {
                    let room = request.writer.available_bytes();
                    let code = self.process(request.reader, &mut request.writer);
                    let code = u8::try_from(code).expect("a status is a byte");
                    // Fails only if the driver has reset the device.
                    let _ = status.write_all(&[code]);
                    room - request.writer.available_bytes() + 1
                }
                None => 0,
            };
            queues.complete(request.head, u32::try_from(written).unwrap_or(u32::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;
    use crate::testing::without_sync;

    fn image(sectors: u8) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..sectors).flat_map(|sector| [sector; 512]).collect();
        file.write_all(&bytes).unwrap();
        file
    }

    /// Sends a request with room for a reply of `reply_size` bytes. Returns the reply's data and status.
    fn send(
        disk: &mut Disk,
        driver: &mut Driver,
        kind: u32,
        sector: u64,
        data: &[u8],
        reply_size: u32,
    ) -> (Vec<u8>, u8) {
        let request = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), data].concat();
        let reply = driver.submit(0, &request, reply_size + 1);
        driver.serve(disk);
        driver.next_completion(0).expect("every request is completed");
        let mut reply = driver.bytes(reply, reply_size + 1);
        let status = reply.pop().unwrap();
        (reply, status)
    }

    fn disk(file: &tempfile::NamedTempFile, access: Access) -> (Disk, Driver) {
        let disk = Disk::open(file.path(), access).unwrap();
        let driver = Driver::ready(&disk);
        (disk, driver)
    }

    #[test]
    fn written_data_is_read_back_and_is_in_the_file() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 3, &[], 512), (vec![3; 512], 0));
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, 3, &[9; 1024], 0).1, 0);
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_FLUSH, 0, &[], 0).1, 0);
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 4, &[], 512), (vec![9; 512], 0));
        assert_eq!(std::fs::read(file.path()).unwrap()[3 * 512..5 * 512], [9; 1024]);
    }

    #[test]
    fn accesses_past_the_end_of_the_disk_fail() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        for sector in [8, 7, u64::MAX, u64::MAX / 512] {
            assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_IN, sector, &[], 1024).1, 1, "{sector}");
            assert_eq!(
                send(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, sector, &[1; 1024], 0).1,
                1,
                "{sector}"
            );
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 8 * 512);
    }

    #[test]
    fn a_read_only_disk_cannot_be_written() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadOnly);
        assert_eq!(driver.read(0x10) & 1 << VIRTIO_BLK_F_RO, 1 << VIRTIO_BLK_F_RO);
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, 0, &[1; 512], 0).1, 1);
        assert_eq!(std::fs::read(file.path()).unwrap()[..512], [0; 512]);
    }

    #[test]
    fn reads_past_the_end_of_a_truncated_image_fail() {
        let file = image(8);
        let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
        file.as_file().set_len(1024).unwrap();
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_IN, 5, &[], 512).1, 1);
    }

    #[test]
    fn a_request_is_limited_to_what_the_configuration_allows() {
        let file = image(8);
        file.as_file().set_len(64 << 20).unwrap();
        let (mut disk, mut driver) = disk(&file, Access::ReadOnly);
        assert_eq!([0x108, 0x10c].map(|register| driver.read(register)), [128 << 10, 126]);
        // All data segments are the same two mebibytes.
        let mut read = |segments: u16| {
            let status = driver.submit(0, &[0; 16], 1);
            let rings = Driver::rings(0);
            let first = driver.first_descriptor(0);
            for segment in 1..=segments {
                let index = (first + segment) % 16;
                driver.descriptor(rings, index, 0x20_0000, 2 << 20, 1 | 2, (index + 1) % 16);
            }
            driver.descriptor(rings, (first + segments + 1) % 16, status.0, 1, 2, 0);
            driver.serve(&mut disk);
            driver.next_completion(0).expect("every request is completed");
            driver.bytes(status, 1)
        };
        assert_eq!(read(7), [0]);
        assert_eq!(read(8), [1], "more than 126 segments of 128 KiB");
    }

    #[test]
    fn a_read_only_guest_cannot_make_the_host_write_to_disk() {
        let file = image(8);
        for (access, status) in [(Access::ReadWrite, 1), (Access::ReadOnly, 0)] {
            let (mut disk, mut driver) = disk(&file, access);
            let flush = || send(&mut disk, &mut driver, VIRTIO_BLK_T_FLUSH, 0, &[], 0).1;
            assert_eq!(without_sync(flush), status, "{access:?}");
        }
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
    fn only_a_lock_held_by_another_guest_is_reported_as_in_use() {
        let error = DiskError::from(TryLockError::Error(io::Error::from_raw_os_error(libc::ENOLCK)));
        assert_eq!(
            error.to_string(),
            "cannot be locked against other guests: No locks available (os error 37)"
        );
        assert!(matches!(DiskError::from(TryLockError::WouldBlock), DiskError::InUse));
    }

    #[test]
    fn a_device_that_the_host_has_mounted_is_reported_as_in_use() {
        let error = DiskError::from(io::Error::from_raw_os_error(libc::EBUSY));
        assert_eq!(error.to_string(), "in use by this host: it is mounted, or used for LVM, RAID or swap");
        let error = DiskError::from(io::Error::from_raw_os_error(libc::EACCES));
        assert!(matches!(error, DiskError::File(_)));
    }

    #[test]
    fn a_file_that_cannot_be_a_disk_is_refused_with_the_reason() {
        let refused = |content: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(content).unwrap();
            Disk::open(file.path(), Access::ReadOnly).unwrap_err().to_string()
        };
        assert!(refused(b"").contains("0 bytes"));
        assert!(refused(b"hello").contains("multiple of 512"));
        assert!(refused(b"QFI\xfb\0\0\0\x03").contains("qcow2"));
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Disk::open(directory.path(), Access::ReadOnly), Err(DiskError::Kind)));
        assert!(matches!(Disk::open(Path::new("/dev/null"), Access::ReadOnly), Err(DiskError::Kind)));
    }

    proptest! {
        #[test]
        fn every_request_is_completed_and_keeps_the_size_of_the_file(
            kind in prop_oneof![0..12_u32, any::<u32>()],
            sector in prop_oneof![0..20_u64, any::<u64>()],
            request_size in 0..2000_usize,
            reply_size in 0..2000_u32,
        ) {
            let file = image(8);
            let (mut disk, mut driver) = disk(&file, Access::ReadWrite);
            let mut request = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), &[1; 2000]].concat();
            request.truncate(request_size);
            if request_size + reply_size as usize > 0 {
                driver.submit(0, &request, reply_size);
                driver.serve(&mut disk);
                prop_assert!(driver.next_completion(0).is_some());
            }
            prop_assert_eq!(file.as_file().metadata().unwrap().len(), 8 * 512);
        }
    }
}
