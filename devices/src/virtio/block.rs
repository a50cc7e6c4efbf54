//! A block device (section 5.2 of the specification), backed by a raw image or a block device of the host.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::{Device, DeviceState, DiskState, Queues, Reader, Writer};
use crate::access::Access;
use crate::state::{DeviceError, Mismatch, check};
use rustix::fs::FileType;
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

    /// Returns what a guest relies on.
    fn state(&self) -> io::Result<DiskState> {
        let about = rustix::fs::fstat(&self.file)?;
        let is_file = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
        let modified = is_file.then_some((about.st_mtime, about.st_mtime_nsec.cast_signed()));
        Ok(DiskState { sectors: self.sectors, modified })
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

    fn save(&mut self) -> Result<Option<DeviceState>, DeviceError> {
        let state = self.state().map_err(|error| DeviceError::Disk(error.to_string()))?;
        Ok(Some(DeviceState::Disk(state)))
    }

    /// The guest holds parts of the disk in its memory, so what is on it must be what was there.
    fn restore(&mut self, saved: Option<&DeviceState>) -> Result<(), DeviceError> {
        let Some(DeviceState::Disk(saved)) = saved else { return Err(Mismatch("disk").into()) };
        let here = self.state().map_err(|error| DeviceError::Disk(error.to_string()))?;
        check(saved.sectors == here.sectors, "size of the disk")?;
        let is_same = saved.modified.is_none() || saved.modified == here.modified;
        if is_same { Ok(()) } else { Err(DeviceError::Changed) }
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
mod tests;
