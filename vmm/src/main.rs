//! The program `tally`: see the library of the same name.

use std::process::ExitCode;

fn main() -> ExitCode {
    tally::main()
}
