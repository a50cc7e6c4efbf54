//! Maps the file that its argument names, says so, and reads what it has mapped until the file is shorter: then the kernel
//! sends it SIGBUS.

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
    // SAFETY: the byte is mapped, or reading it ends this program, which is what it is for.
    println!("mapped {}", unsafe { last.read_volatile() });
    loop {
        sleep(Duration::from_millis(100));
        // A guest looks at what it has cached of a shared file when it is asked about the file.
        std::fs::metadata(&path).expect("it is there");
        // SAFETY: as before.
        unsafe { last.read_volatile() };
    }
}
