//! Sets up the network by a script, before the command starts.

use std::path::Path;
use std::process::Command;

use guest_agent::protocol::Network;

use crate::root;

const SCRIPT: &str = "/lib/tally/network";
/// Where the script keeps its arguments.
const ARGUMENTS: &str = "/run/tally-network";

/// Sets up the network. The error is for the user.
pub fn set_up(Network { address, name_server }: &Network) -> Result<(), String> {
    let address = address.map(|byte| format!("{byte:02x}")).join(":");
    let mut script = Command::new(SCRIPT);
    script.arg(address).args(name_server.map(|server| server.to_string()));
    match script.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("the guest's kernel has no virtio network (CONFIG_VIRTIO_NET)".into()),
        Err(error) => Err(format!("{SCRIPT}: {error}")),
    }
}

/// Returns true if the guest has a network.
pub fn is_set_up() -> bool {
    Path::new(ARGUMENTS).exists()
}

/// Asks for an address again, for the guest has been restored, perhaps elsewhere.
pub fn set_up_again() {
    // It is reaped as an orphan; the command goes on meanwhile.
    let mut script = Command::new(SCRIPT);
    root::leave(&mut script);
    let _ = script.arg("again").spawn();
}
