//! The requests that find, make, move and remove names.

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host::Host;
use super::message::{Body, Name, Reply};
use super::wire::{BatchForgetIn, ForgetIn, ForgetOne, LinkIn, MkdirIn, MknodIn, Rename2In, RenameIn};

impl Server {
    pub(super) fn look_up(&mut self, folder: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        self.tell(folder, body.name()?, reply)
    }

    /// Answers with what has this name, whoever gave it meanwhile.
    fn tell(&mut self, folder: u64, name: Name, reply: &mut Reply) -> Result<(), Errno> {
        let (number, stat) = self.nodes.look_up(folder, name)?;
        let entry = self.entry(number, &stat);
        reply.put(entry.as_slice())
    }

    pub(super) fn forget(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: ForgetIn = body.take()?;
        self.nodes.forget(node, input.nlookup);
        Ok(())
    }

    pub(super) fn forget_many(&mut self, body: &mut Body) -> Result<(), Errno> {
        let input: BatchForgetIn = body.take()?;
        for _ in 0..input.count {
            let one: ForgetOne = body.take()?;
            self.nodes.forget(one.nodeid, one.nlookup);
        }
        Ok(())
    }

    pub(super) fn read_link(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        reply.put(Host::read_link(&*self.nodes.place(node)?)?.as_bytes())
    }

    pub(super) fn make_node(&mut self, folder: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: MknodIn = body.take()?;
        let name = body.name()?;
        Host::make_node(writable, &*self.nodes.place(folder)?, name, input.mode)?;
        self.tell(folder, name, reply)
    }

    pub(super) fn make_folder(
        &mut self,
        folder: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: MkdirIn = body.take()?;
        let name = body.name()?;
        Host::make_folder(writable, &*self.nodes.place(folder)?, name, input.mode)?;
        self.tell(folder, name, reply)
    }

    pub(super) fn make_symlink(
        &mut self,
        folder: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        Host::make_symlink(writable, &*self.nodes.place(folder)?, name, body.text()?)?;
        self.tell(folder, name, reply)
    }

    pub(super) fn make_link(&mut self, folder: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: LinkIn = body.take()?;
        let name = body.name()?;
        let what = self.nodes.place(input.oldnodeid)?;
        self.host.make_link(writable, &what, &*self.nodes.place(folder)?, name)?;
        self.tell(folder, name, reply)
    }

    pub(super) fn remove(&mut self, folder: u64, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        Host::remove(writable, &*self.nodes.place(folder)?, name)
    }

    pub(super) fn remove_folder(&mut self, folder: u64, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        Host::remove_folder(writable, &*self.nodes.place(folder)?, name)
    }

    pub(super) fn rename(&mut self, folder: u64, body: &mut Body) -> Result<(), Errno> {
        let input: RenameIn = body.take()?;
        self.move_name(folder, input.newdir, RenameFlags::empty(), body)
    }

    pub(super) fn rename_as(&mut self, folder: u64, body: &mut Body) -> Result<(), Errno> {
        let input: Rename2In = body.take()?;
        let flags = RenameFlags::from_bits_retain(input.flags);
        // WHITEOUT would leave a device node behind.
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL);
        }
        self.move_name(folder, input.newdir, flags, body)
    }

    fn move_name(&mut self, from: u64, to: u64, flags: RenameFlags, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let (old, new) = (body.name()?, body.name()?);
        let (old_folder, new_folder) = (self.nodes.place(from)?, self.nodes.place(to)?);
        Host::rename(writable, (&*old_folder, old), (&*new_folder, new), flags)?;
        // It is done. If the host has moved it on, or away, then the thing is found by its next lookup.
        let _ = self.nodes.renamed(to, new);
        if flags.contains(RenameFlags::EXCHANGE) {
            let _ = self.nodes.renamed(from, old);
        }
        Ok(())
    }
}
