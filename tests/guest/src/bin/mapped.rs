//! Maps the file that its argument names, prints a line, and reads the file's last byte until the file is truncated.
//! Then the kernel sends it SIGBUS.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::Duration;

fn main() {
    let path = std::env::args().nth(1).expect("a file");
    let file = File::open(&path).expect("it can be opened");
    let length = usize::try_from(file.metadata().expect("it has a length").len()).expect("it is small");
    // SAFETY: a new mapping, at a place that the kernel chooses.
    let place = unsafe {
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(place, libc::MAP_FAILED, "it can be mapped");
    let last = place.cast::<u8>().wrapping_add(length - 1);
    // SAFETY: the byte is mapped. If the file was truncated, the read raises SIGBUS and ends this program, as intended.
    println!("mapped {}", unsafe { last.read_volatile() });
    loop {
        sleep(Duration::from_millis(100));
        // The guest's kernel updates its cached attributes and pages of a shared file when a program asks for the
        // attributes.
        std::fs::metadata(&path).expect("it is there");
        // SAFETY: as before.
        unsafe { last.read_volatile() };
    }
}
