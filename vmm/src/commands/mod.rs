//! The operator's commands, one file or folder for each: they look at this host, at VMs that run, or at what these have
//! left. They may use what the VM's process does ([`crate::run`]), never the other way.

pub mod change;
pub mod check;
pub mod client;
pub mod doctor;
mod functions;
mod live;
pub mod log;
pub mod manual;
pub mod metrics_of_all;
pub mod record;
pub mod snapshot;
pub mod stat;
pub mod top;
