//! The simulated computer: its processor, its board, the Linux that it boots, and one run of it.

pub mod board;
pub mod cpu;
pub mod image;
pub mod machine;
pub mod silicon;
pub mod source;
pub mod tools;
