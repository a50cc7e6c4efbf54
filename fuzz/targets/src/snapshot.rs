//! A snapshot whose maker is not trusted: the state of the whole guest, and by themselves those of a virtio device, of
//! a PMU and of the agent, each as JSON. KVM's part of the state is only read here; KVM checks it.
//!
//! A part is refused, or what is restored works as one whose guest has written the same: the device works after a
//! reset, and a disk keeps its size. The PMU asks the host for nothing that the guest could not ask for, in a bounded
//! number of calls; what is saved of it again can be restored.

use std::fs::File;

use devices::virtio::testing::Driver;
use devices::virtio::{Console, DeviceState, TransportState};
use guest_agent::protocol;
use tally::untrusted::{self, Agent};
use tally_machine::untrusted::{restore_console, saved_devices, saved_pmus};
use vpmu::state::PmuState;

use crate::{pmu, virtio};

/// Maximum number of parts of one kind: more of them show nothing new.
const MAX_PARTS: usize = 4;
/// Bytes for the guest beside those that the state has.
const MAX_ADDED: usize = 512;

/// Runs the target. The first byte says what the others are.
pub fn run(data: &[u8]) {
    let Some((kind, json)) = data.split_first() else { return };
    match kind % 4 {
        0 => {
            let Some(machine) = untrusted::saved_guest(json) else { return };
            let _ = restore_console(&machine);
            saved_pmus(&machine).into_iter().take(MAX_PARTS).for_each(pmu::restored);
            for (transport, own) in saved_devices(&machine).into_iter().take(MAX_PARTS) {
                virtio::restored(transport, own);
            }
        }
        1 => {
            let saved = serde_json::from_slice::<(TransportState, Option<DeviceState>)>(json);
            if let Ok((transport, mut own)) = saved {
                if let Some(DeviceState::Disk(disk)) = &mut own {
                    disk.accept_copy();
                }
                virtio::restored(&transport, own.as_ref());
            }
        }
        2 => {
            if let Ok(state) = serde_json::from_slice::<PmuState>(json) {
                pmu::restored(&state);
            }
        }
        _ => agent(json),
    }
}

fn temporary() -> File {
    tempfile::tempfile().expect("temporary files can be made")
}

/// Restores the host's side of the agent, and serves it.
fn agent(json: &[u8]) {
    let ports = protocol::REPORT as usize + 1;
    let mut driver = Driver::ready(&Console::new(ports));
    let memory = driver.memory.clone();
    let restored = Agent::restored(json, memory, temporary(), [temporary(), temporary()]);
    let Some((mut agent, transport)) = restored.expect("there are file descriptors") else { return };
    driver.transport = transport;
    driver.set_up(1 << 32);
    for queue in 0..(ports + 1) * 2 {
        driver.submit(queue, &[0x5a; 16], 64);
        agent.turn();
        assert!(agent.waiting() <= json.len() + MAX_ADDED, "{} bytes wait for the guest", agent.waiting());
    }
    agent.end();
    agent.turn();
}
