//! Builds the default guest if that has not been done, and prints where it is.

use guest_images::{Error, Progress, default_guest};

fn main() -> Result<(), Error> {
    let guest = default_guest(&mut Progress::stderr("guest-images"))?;
    println!("kernel {}\ninitrd {}", guest.kernel.display(), guest.initrd.display());
    Ok(())
}
