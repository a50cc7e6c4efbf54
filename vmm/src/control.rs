//! A running VM's control socket, a unix socket by which other commands look at the VM and change it: where the sockets
//! are ([`place`]), the protocol ([`message`]), the server in the VM ([`serve`], [`machine`]) and the clients
//! ([`client`]).

pub mod client;
pub mod hardware;
pub mod look;
mod machine;
pub mod message;
mod place;
mod serve;

use std::io::{self, Write};
use std::process::{self, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use log::info;
use vpmu::Switch;

use crate::cli::{ChangePolicy, CounterName};
use crate::policy;

pub use self::machine::Running;

use self::message::{Request, Switched};
use self::place::{Place, PlaceError, Socket};

/// The socket of this process, while it has one.
static SOCKET: Mutex<Option<Socket>> = Mutex::new(None);

/// The VM's control socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct Control(());

impl Control {
    /// Creates the control socket and serves it. If that fails, the guest runs all the same.
    pub fn open(machine: Running) -> Self {
        match open(machine) {
            Ok(()) => {}
            Err(error) => info!("`tally list` and `tally stat` will not find this VM: {error}"),
        }
        Self(())
    }
}

fn open(machine: Running) -> Result<(), PlaceError> {
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

/// `tally policy`: prints or changes the policy of a running VM, and disables or enables counters.
pub fn change(options: &ChangePolicy) -> Result<ExitCode> {
    let ChangePolicy { vm, file, settings, enable, disable } = options;
    let change = policy::change(file.as_deref(), settings)?;
    let mut vm = client::find_one(vm)?;
    let off = disable.iter().map(|name| (name, Switch::Off));
    let on = enable.iter().map(|name| (name, Switch::On));
    let switched: Vec<Switched> = off.chain(on).map(Switched::new).collect();
    let is_changed = file.is_some() || !settings.is_empty();
    if !switched.is_empty() {
        vm.request(&Request::Switch(switched))?;
        if !is_changed {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let policy = vm.change(change)?;
    if !is_changed {
        write!(io::stdout(), "{}", policy::toml(&policy))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Switched {
    fn new((name, to): (&CounterName, Switch)) -> Self {
        Self { vcpu: name.vcpu, counter: name.counter, to }
    }
}

/// Removes the control socket when the process ends.
pub fn close() {
    // The panic hook calls this too: a thread that panics while it has the lock must not wait for itself.
    if let Ok(mut socket) = SOCKET.try_lock() {
        socket.take();
    }
}
