//! This process on its host: KVM, what its processor counts too much, the terminal, what is printed, signals, and the
//! lab beside the program.

pub mod entry_ticks;
pub mod fact;
pub mod kvm;
pub mod lab;
pub mod printer;
pub mod signals;
pub mod terminal;
