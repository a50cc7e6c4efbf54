//! What others ask of a running VM: its control socket, its metrics, and what is measured for them.

pub mod control;
pub mod hardware;
pub mod measurement;
pub mod metrics;
pub mod recordings;
pub mod running;
pub mod serve;
pub mod snapshots;
