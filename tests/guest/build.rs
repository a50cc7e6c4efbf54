//! Compiles the test programs whose counts and samples can be derived from their sources. They use no library, so the C
//! compiler that Rust uses as its linker is enough.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 9] =
    ["compat", "family", "interval", "layers", "migrate", "split", "spread", "track", "yield"];

fn main() {
    println!("cargo::rerun-if-changed=programs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    for name in PROGRAMS {
        let source = Path::new("programs").join(name).with_extension("S");
        let status = Command::new(&compiler)
            .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-o"])
            .args([&out.join(name), &source])
            .status()
            .unwrap_or_else(|error| panic!("cannot run the C compiler `{compiler}`: {error}"));
        assert!(status.success(), "`{compiler}` could not compile {}", source.display());
    }
}
