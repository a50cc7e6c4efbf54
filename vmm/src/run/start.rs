//! What a guest starts from: a kernel that boots, a template, or a snapshot.

pub mod boot;
pub mod kept;
pub mod kernels;
pub mod snapshot;
pub mod source;
pub mod template;
mod tree;
