//! Snapshots of VMs: folders from which `tally run --restore` continues a guest.
//!
//! A VM may not open files while it runs. It sends its state and its memory to `tally snapshot` over the control socket
//! ([`crate::protocol::stream`]), which writes them into a folder ([`folder`]). A restored guest is another VM, with
//! streams of its own, but with the same folders and disks.

pub mod folder;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use devices::Access;
use serde::{Deserialize, Serialize};
use tally_machine::pmu::{Choice, SavedPmu};
use tally_machine::{Fingerprint, MachineState, Size};
use vpmu::policy::Policy;

use crate::cli::network::{Network, Published};
use crate::cli::{HostPath, Run};
use crate::run::streams::agent::AgentState;

pub use folder::{Opened, open};

/// A guest without its memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestState {
    /// What the guest was started with.
    pub setup: Setup,
    /// What it sees of the host's processor.
    pub processor: Fingerprint,
    /// The machine.
    pub machine: MachineState,
    /// The host's side of its agent, if it has one.
    pub agent: Option<AgentState>,
}

/// What a guest was started with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    name: Option<String>,
    kernel: Option<PathBuf>,
    command: Vec<OsString>,
    memory: u64,
    cpus: u32,
    /// `--pmu`.
    choice: String,
    /// The PMU that the guest sees.
    pub pmu: SavedPmu,
    /// The operator's policy for it.
    pub policy: Policy,
    shares: Vec<Place>,
    /// `--root`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<RootPlace>,
    disks: Vec<Place>,
    /// `--net` and `--publish`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    net: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    publish: Vec<String>,
}

/// A path of the host that the guest may access.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    path: PathBuf,
    is_writable: bool,
}

/// The folder that is the guest's root.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootPlace {
    path: PathBuf,
    /// What is mounted in it is part of it.
    has_mounts: bool,
}

impl RootPlace {
    fn new(root: &Path, options: &Run) -> Result<Self> {
        Ok(Self { path: std::path::absolute(root)?, has_mounts: options.root_mounts })
    }
}

impl Setup {
    /// Describes a guest with these options. The error is why it cannot be saved.
    pub fn new(options: &Run, pmu: SavedPmu, policy: Policy) -> Result<Self> {
        let place = |HostPath { path, access }: &HostPath| {
            Ok(Place { path: std::path::absolute(path)?, is_writable: *access == Access::ReadWrite })
        };
        Ok(Self {
            name: options.name.clone(),
            kernel: options.kernel.clone(),
            command: options.command.clone(),
            memory: options.memory.bytes,
            cpus: options.cpus,
            choice: options.pmu.name().to_owned(),
            pmu,
            policy,
            shares: options.share.iter().map(place).collect::<Result<_>>()?,
            root: options.root.as_deref().map(|root| RootPlace::new(root, options)).transpose()?,
            disks: options.disk.iter().map(place).collect::<Result<_>>()?,
            net: options.net.as_ref().map(Network::to_string),
            publish: options.publish.iter().map(Published::to_string).collect(),
        })
    }

    /// Describes the guest with the policy that it has now.
    pub fn with(&self, policy: Policy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// Returns the options of a run that continues the guest: those that it was started with, and what `given` has of
    /// the new VM's own.
    pub fn options(&self, given: &Run) -> Run {
        let paths = |places: &[Place]| {
            let path = |Place { path, is_writable }: &Place| HostPath {
                path: path.clone(),
                access: if *is_writable { Access::ReadWrite } else { Access::ReadOnly },
            };
            places.iter().map(path).collect::<Vec<_>>()
        };
        let choice = Choice::ALL.into_iter().find(|choice| choice.name() == self.choice);
        Run {
            name: given.name.clone().or_else(|| self.name.clone()),
            kernel: self.kernel.clone(),
            command: self.command.clone(),
            memory: Size::of(self.memory),
            cpus: self.cpus,
            pmu: choice.unwrap_or(given.pmu),
            share: paths(&self.shares),
            root: self.root.as_ref().map(|root| root.path.clone()),
            root_mounts: self.root.as_ref().is_some_and(|root| root.has_mounts),
            has_other_disks: !given.disk.is_empty(),
            disk: if given.disk.is_empty() { paths(&self.disks) } else { given.disk.clone() },
            // Whatever wrote this has checked them.
            net: self.net.as_ref().and_then(|net| net.parse().ok()),
            publish: self.publish.iter().filter_map(|ports| ports.parse().ok()).collect(),
            ..given.clone()
        }
    }
}
