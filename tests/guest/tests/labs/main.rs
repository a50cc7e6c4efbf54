//! All that is tested on simulated hosts. They take minutes each and keep a core busy, so one program has all of them: each
//! test waits for the host that did what it looks at, and as many hosts run at once as there are cores.
//!
//! Tests are handed out to far more threads than there are cores (`.cargo/config.toml` says so), so that nearly all hosts are
//! asked for early. A host that no selected test looks at is not asked for.

mod attribution;
mod bench;
mod changes;
mod check;
mod counting;
mod distribution;
mod doctor;
mod event_log;
mod features;
mod figures;
mod files;
mod identity;
mod kernels;
mod lab_run;
mod linux;
mod logging;
mod metrics;
mod operator;
mod pmu;
mod pmu_offer;
mod policy;
mod progress;
mod riscv;
mod riscv_figures;
mod sampling;
mod starvation;
mod streams;
mod using;
