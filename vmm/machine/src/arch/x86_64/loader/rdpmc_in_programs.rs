//! Lets Linux' programs read counters with RDPMC. Adds the code of
//! [`vpmu_retarget::x86::rdpmc_in_programs`] to a kernel's image, and points the kernel's table of exception handlers
//! to the code.

use vpmu_retarget::x86::rdpmc_in_programs::{Handlers, code, room};
use vpmu_retarget::x86::{exceptions, rdpmc_in_programs};

use super::added::Added;
use super::{Kernel, Kind};

impl Kernel {
    /// Adds the code for RDPMC in programs. Returns `None` and changes nothing if the kernel has no known
    /// table of exception handlers, or no room for the code. RDPMC then faults in programs.
    pub(super) fn add_rdpmc_in_programs(&mut self) -> Option<Added> {
        if !self.format.is_linux() {
            return None;
        }
        let (record, code, at) = {
            let image = self.describe();
            let record = exceptions::only_record(&image, exceptions::GENERAL_PROTECTION)?;
            let debug = exceptions::handler(&image, exceptions::DEBUG)?;
            let handlers = Handlers { general_protection: record.address, debug };
            // Jumps may be longer at another address.
            let len = code(record.address, handlers).len() + rdpmc_in_programs::MAX_GROWTH;
            let at = room(&image, len, handlers)?;
            (record, Some(code(at, handlers)).filter(|code| code.len() <= len)?, at)
        };
        self.change(&[(at, &code), (record.entry, &at.to_le_bytes())])?;
        if let Kind::Linux(linux) = &mut self.format.kind {
            linux.has_rdpmc_in_programs = true;
        }
        Some(Added { table: record.entry, code: at })
    }
}

#[cfg(test)]
mod tests {
    use guest_images::cache::Cache;
    use guest_images::{Progress, Suite};

    use super::super::testing::*;
    use super::*;

    #[test]
    fn the_distribution_s_kernels_get_the_code_near_their_own_handler() {
        let cache = Cache::open().unwrap();
        for suite in [Suite::Bookworm, Suite::Trixie, Suite::Sid] {
            let image = guest_images::kernel(&cache, suite, &mut Progress::stderr("test")).unwrap().image;
            let mut kernel = Kernel::read(&image).unwrap();
            let before = kernel.image.clone();
            let Some(Added { table, code }) = kernel.add_rdpmc_in_programs() else { panic!("{suite}") };
            let entry = kernel.bytes_mut(table, 8).unwrap().to_vec();
            assert_eq!(entry, code.to_le_bytes(), "{suite}");
            let changed = (0..before.len()).filter(|at| kernel.image[*at] != before[*at]);
            let (word, filling): (Vec<_>, Vec<_>) = changed.partition(|at| before[*at] != 0xcc);
            assert!(word.len() <= 8 && word[word.len() - 1] - word[0] < 8, "{suite}: {word:x?}");
            assert!(filling.len() > 50 && filling[filling.len() - 1] - filling[0] < 256, "{suite}");
        }
    }

    #[test]
    fn a_kernel_without_a_table_of_exceptions_stays_unchanged() {
        let mut kernel = read(VMLINUX).unwrap();
        let before = kernel.image.clone();
        assert_eq!(kernel.add_rdpmc_in_programs(), None);
        assert!(kernel.image == before && !kernel.format.lets_programs_read_counters());
    }
}
