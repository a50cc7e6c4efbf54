//! Lets Linux access the PMU's registers without an exit (see [`vpmu::shared_page`]). Adds the stub to a kernel's
//! image, points the kernel's table of register functions to the stub, and reserves memory for the shared pages.

use vpmu::shared_page::{Page, Registers};
use vpmu_retarget::x86::stub::{PageLocation, Stub};
use vpmu_retarget::x86::{Site, filling, functions};

use super::added::Added;
use super::linux::SETUP_DATA_HEADER;
use super::{Kernel, Kind};
use crate::arch::x86_64::memory::{linux_address, low, shared_page};

const _: () = assert!(SETUP_DATA_HEADER <= Page::STRIDE);

impl Kernel {
    /// Adds the stub for the shared pages to a kernel whose RDPMC instructions are at `sites`. Returns `None` and
    /// changes nothing if the kernel has no table of register functions or no room for the stub. Each access then
    /// exits.
    pub fn add_shared_pages(&mut self, registers: &Registers, sites: &[Site], cpus: u8) -> Option<Added> {
        if !self.format.is_linux() {
            return None;
        }
        let pages = PageLocation { first: linux_address(shared_page(0)), count: cpus.into() };
        let (table, stub, room) = {
            let image = self.describe();
            let table = functions::table(&image, sites)?;
            let stub = |at| Stub::new(at, registers, &table.originals, pages);
            let len = stub(table.address).code.len();
            let room = filling::room(&image, len, &(0..u64::MAX))?;
            // The code may be longer at another address, if a jump no longer reaches its target with a short
            // displacement.
            let stub = Some(stub(room)).filter(|stub| stub.code.len() <= len)?;
            (table, stub, room)
        };
        let changes = [
            (room, &stub.code[..]),
            (table.read(), &stub.read.to_le_bytes()),
            (table.write(), &stub.write.to_le_bytes()),
            (table.read_counter(), &stub.read_counter.to_le_bytes()),
        ];
        self.change(&changes)?;
        if let Kind::Linux(linux) = &mut self.format.kind {
            linux.setup_data = Some(low::SHARED_PAGES..shared_page(cpus));
        }
        Some(Added { table: table.address, code: room })
    }

    /// Returns true if the stub was added.
    pub fn has_shared_pages(&self) -> bool {
        matches!(&self.format.kind, Kind::Linux(linux) if linux.setup_data.is_some())
    }
}

#[cfg(test)]
mod tests;
