//! Compiles the test programs whose counts and samples can be derived from their sources. They use no library, so the C
//! compiler that Rust uses as its linker is enough.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 9] =
    ["compat", "family", "interval", "layers", "migrate", "split", "spread", "track", "yield"];

/// Build id of the program that has one, as the linker takes it.
const BUILD_ID: &str = "0x1a2b3c4d5e6f708192a3b4c5d6e7f80910111213";

fn main() {
    println!("cargo::rustc-env=LAYERS_BUILD_ID={}", &BUILD_ID[2..]);
    println!("cargo::rerun-if-changed=programs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    for name in PROGRAMS {
        let source = Path::new("programs").join(name).with_extension("S");
        let build_id = if name == "layers" { BUILD_ID } else { "none" };
        let status = Command::new(&compiler)
            .args(["-nostdlib", "-static", "-no-pie", &format!("-Wl,--build-id={build_id}"), "-o"])
            .args([&out.join(name), &source])
            .status()
            .unwrap_or_else(|error| panic!("cannot run the C compiler `{compiler}`: {error}"));
        assert!(status.success(), "`{compiler}` could not compile {}", source.display());
    }
}
