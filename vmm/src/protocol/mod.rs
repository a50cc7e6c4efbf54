//! What a VM's process and the operator's both say and understand: where a VM's socket is, requests, answers and their
//! deadlines, the records of the event log, statuses, and what of others' words may be printed.

pub mod deadline;
pub mod ending;
pub mod exposition;
pub mod message;
pub mod printable;
pub mod record;
pub mod recording;
pub mod socket_dir;
pub mod status;
pub mod stream;
