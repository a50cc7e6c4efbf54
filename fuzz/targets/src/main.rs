//! Runs one target with libFuzzer. `cargo fuzz` builds this program and chooses the target by an environment variable.

#![no_main]

use std::sync::OnceLock;

use fuzz_targets::{TARGET_VARIABLE, Target, target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: OnceLock<&Target> = OnceLock::new();

fn chosen() -> &'static Target {
    CHOSEN.get_or_init(|| {
        let name = std::env::var(TARGET_VARIABLE).unwrap_or_default();
        target(&name).unwrap_or_else(|| panic!("{TARGET_VARIABLE}={name}: there is no such target"))
    })
}

fuzz_target!(
    init: {
        chosen();
    },
    |data: &[u8]| {
        (chosen().run)(data);
    }
);
