//! This process on its host: KVM, the terminal, what is printed, signals, and the lab beside the program.

pub mod fact;
pub mod kvm;
pub mod lab;
pub mod printer;
pub mod signals;
pub mod terminal;
