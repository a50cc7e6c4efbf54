//! The streams of a guest: its console, and those of its command, which its agent carries.

pub mod agent;
pub mod choose;
pub mod console;
pub mod console_input;
pub mod input;
