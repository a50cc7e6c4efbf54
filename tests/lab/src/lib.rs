//! The lab: a simulated host with an exact PMU.
