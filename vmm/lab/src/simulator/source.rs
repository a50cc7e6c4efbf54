//! Where this crate's source is, of which the simulators and programs for other architectures are compiled.

use std::path::Path;

/// Returns the folder of this crate's source. A program that was compiled for a package has none.
pub fn source() -> Option<&'static Path> {
    const SOURCE: Option<&str> = match option_env!("TALLY_WITHOUT_SOURCE") {
        Some(_) => None,
        None => Some(env!("CARGO_MANIFEST_DIR")),
    };
    SOURCE.map(Path::new)
}
