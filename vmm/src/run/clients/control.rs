//! A running VM's control socket, a unix socket by which other commands look at the VM and change it. Where the sockets
//! are and what is said over them is in [`crate::protocol`], the server in [`super::serve`], the clients in
//! [`crate::commands::client`].

use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use log::{info, warn};

pub use super::serve::ServedVm;

use crate::protocol::socket_dir::{Socket, SocketDir, SocketDirError};
use crate::sandbox::{Access, Reach};

/// The socket of this process, while it has one.
static SOCKET: Mutex<Option<Socket>> = Mutex::new(None);

/// The VM's control socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct Control(());

impl Control {
    /// Creates the control socket and serves it. If that fails, the guest runs all the same.
    pub fn open(machine: impl ServedVm) -> Self {
        match open(machine) {
            Ok(()) => {}
            Err(error) if error.is_somebodys_fault() => warn!("{}", not_found(&error)),
            Err(error) => info!("{}", not_found(&error)),
        }
        Self(())
    }
}

/// Returns what removing the control socket needs, if there is one.
pub fn reach() -> Option<Reach> {
    let socket = SOCKET.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Reach { folder: socket.as_ref()?.folder().ok()?, access: Access::Remove })
}

fn not_found(error: &SocketDirError) -> String {
    format!("`tally list`, `stat`, `snapshot`, `policy` and `log` will not find this VM: {error}")
}

fn open(machine: impl ServedVm) -> Result<(), SocketDirError> {
    let (listener, socket) = SocketDir::own()?.listen(process::id())?;
    super::serve::serve(listener, Arc::new(machine)).map_err(SocketDirError::Thread)?;
    *SOCKET.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    Ok(())
}

impl Drop for Control {
    fn drop(&mut self) {
        remove_socket();
    }
}

/// Removes the control socket when the process ends.
pub fn remove_socket() {
    // The panic hook calls this too: a thread that panics while it has the lock must not wait for itself.
    if let Ok(mut socket) = SOCKET.try_lock() {
        socket.take();
    }
}
