//! Builds the default guest, unless it is in the cache, and prints the paths of its files.

use guest_images::{Error, Progress, default_guest};

fn main() -> Result<(), Error> {
    let guest = default_guest(&mut Progress::stderr("guest-images"))?;
    println!("kernel {}\ninitrd {}", guest.kernel.display(), guest.initrd.display());
    Ok(())
}
