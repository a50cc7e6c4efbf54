//! What a running VM tells others who ask, and does for them, over a unix socket: where that is ([`place`]), in which words
//! ([`message`]), who answers ([`serve`]) and who asks ([`client`]).

pub mod client;
pub mod message;
mod place;
mod serve;

use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use log::info;

pub use self::serve::Machine;

use self::place::{Place, PlaceError, Socket};

/// The socket of this process, while it has one.
static SOCKET: Mutex<Option<Socket>> = Mutex::new(None);

/// While it lives, others find this VM.
#[derive(Debug)]
pub struct Control(());

impl Control {
    /// Lets others find the VM that this process runs. If they cannot, the guest runs all the same.
    pub fn open(machine: impl Machine) -> Self {
        match open(machine) {
            Ok(()) => {}
            Err(error) => info!("`tally list` and `tally stat` will not find this VM: {error}"),
        }
        Self(())
    }
}

fn open(machine: impl Machine) -> Result<(), PlaceError> {
    let (listener, socket) = Place::own()?.listen(process::id())?;
    serve::serve(listener, Arc::new(machine)).map_err(PlaceError::Thread)?;
    *SOCKET.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    Ok(())
}

impl Drop for Control {
    fn drop(&mut self) {
        close();
    }
}

/// Nobody finds this process any more: it ends.
pub fn close() {
    // A thread that panics while it has the lock, which does nothing that could, must not wait for itself.
    if let Ok(mut socket) = SOCKET.try_lock() {
        socket.take();
    }
}
