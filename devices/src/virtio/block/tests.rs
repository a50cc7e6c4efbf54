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
        assert_eq!(send(&mut disk, &mut driver, VIRTIO_BLK_T_OUT, sector, &[1; 1024], 0).1, 1, "{sector}");
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
    assert_eq!(error.to_string(), "cannot be locked against other guests: No locks available (os error 37)");
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

#[test]
fn a_disk_that_was_written_since_it_was_saved_is_refused_unless_the_user_knows() {
    let file = image(8);
    let (mut first, _) = disk(&file, Access::ReadOnly);
    let saved = first.save().unwrap();
    assert_eq!(first.restore(saved.as_ref()), Ok(()));
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(2);
    File::options().write(true).open(file.path()).unwrap().set_modified(later).unwrap();
    assert_eq!(first.restore(saved.as_ref()), Err(DeviceError::Changed));
    let Some(DeviceState::Disk(mut state)) = saved else { panic!("a disk has a state") };
    state.accept_copy();
    assert_eq!(first.restore(Some(&DeviceState::Disk(state.clone()))), Ok(()));
    let (mut smaller, _) = disk(&image(4), Access::ReadOnly);
    assert!(matches!(smaller.restore(Some(&DeviceState::Disk(state))), Err(DeviceError::Mismatch(_))));
}
