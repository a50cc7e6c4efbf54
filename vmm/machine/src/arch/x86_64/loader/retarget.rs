//! Replaces the RDPMC instructions of a kernel's image by RDMSR, which can exit to Tally (see
//! [`vpmu_retarget::x86`]).

use vpmu::shared_page::Registers;
use vpmu_retarget::x86::{Content, Image, Section, Site, Symbol};

use super::added::Added;
use super::segment::Segment;
use super::{Kernel, Kind};
use crate::loader::error::{LoadError, Problem};

/// Result of [`Kernel::retarget_rdpmc`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Retargeted {
    /// Instructions that were replaced.
    pub sites: Vec<Site>,
    /// Addresses of the bytes of an RDPMC in an image without sections, where no known code leads to the bytes. They
    /// are left unchanged. If such bytes are executed as an instruction, it faults in the guest.
    pub left: Vec<u64>,
}

/// Changes a kernel's image so that its accesses to the PMU can exit to Tally, and adds the code for the shared pages
/// if the PMU and the kernel support them, and the code for RDPMC in programs if KVM lets that fault. Notes the
/// changes.
pub fn retarget(
    kernel: &mut Kernel,
    page_registers: Option<&Registers>,
    cpus: u8,
    rdpmc_faults: bool,
) -> Result<(), LoadError> {
    let Retargeted { sites, left } = kernel.retarget_rdpmc()?;
    let mut changes = Vec::new();
    if let Some(registers) = page_registers {
        changes.push(match kernel.add_shared_pages(registers, &sites, cpus) {
            Some(Added { table, code }) => format!(
                "accesses to frozen counters do not leave the guest: its table of functions at {table:#x} leads to code at {code:#x}"
            ),
            None => {
                "accesses to frozen counters leave the guest, too: its kernel has no such table of functions".to_owned()
            }
        });
    }
    changes.push(match rdpmc_faults.then(|| kernel.add_rdpmc_in_programs()).flatten() {
        Some(Added { table, code }) => format!(
            "programs read counters with RDPMC: the handler of #GP in the table at {table:#x} is now code at {code:#x}"
        ),
        None if rdpmc_faults => {
            "programs cannot read counters with RDPMC: the kernel has no known table of exception handlers, or no room"
                .to_owned()
        }
        None => "programs cannot read counters with RDPMC: in this KVM it reads 0".to_owned(),
    });
    changes.extend(sites.iter().map(|site| format!("RDPMC became RDMSR at {site}")));
    changes.extend(left.iter().map(|address| {
        format!("the bytes of an RDPMC at {address:#x} are left alone: nothing shows that they run")
    }));
    kernel.changes.extend(changes);
    Ok(())
}

impl Kernel {
    /// Replaces every RDPMC by an RDMSR of the same register. Returns an error if some bytes in Linux, or in an
    /// image with sections, may or may not be an RDPMC.
    pub(super) fn retarget_rdpmc(&mut self) -> Result<Retargeted, LoadError> {
        let findings = vpmu_retarget::x86::find(&self.describe());
        let tells_code = self.format.is_linux() || self.format.sections.tell_code();
        if let (true, Some(address)) = (tells_code, findings.undecided.first()) {
            return Err(Problem::Rdpmc(*address).with(&self.path));
        }
        for site in &findings.sites {
            match self.instruction_mut(site.byte) {
                Some([Site::ESCAPE, byte]) if *byte == Site::BEFORE => *byte = Site::AFTER,
                _ => return Err(Problem::Rdpmc(site.address).with(&self.path)),
            }
        }
        Ok(Retargeted { sites: findings.sites, left: findings.undecided })
    }

    /// Returns the image's sections and symbols for [`vpmu_retarget::x86`].
    pub(super) fn describe(&self) -> Image<'_> {
        let (kind, written) = match &self.format.kind {
            // Linux maps writable memory as not executable.
            Kind::Linux(_) => (vpmu_retarget::x86::Kind::Linux, Content::Data),
            Kind::Multiboot(multiboot) => {
                let entry = link_address(multiboot.segments(), multiboot.entry().into());
                (vpmu_retarget::x86::Kind::BareMetal { entry }, Content::Code)
            }
        };
        if !self.format.sections.tell_code() {
            return Image { sections: self.whole_segments(), symbols: Vec::new(), kind };
        }
        let sections = self.format.sections.list(&self.image, written);
        let code: Vec<&Section> =
            sections.iter().filter(|section| section.content == Content::Code).collect();
        let in_code = |symbol: &Symbol| {
            code.iter()
                .any(|section| symbol.address.wrapping_sub(section.address) < section.bytes.len() as u64)
        };
        let symbols = self.format.sections.symbols().filter(in_code).collect();
        Image { sections, symbols, kind }
    }

    /// Returns whole segments as code, for an image whose sections are unknown.
    fn whole_segments(&self) -> Vec<Section<'_>> {
        let section = |segment: &Segment| {
            let bytes = self.image.get(segment.file.clone())?;
            Section::new("", segment.virtual_address, bytes, Content::Code)
        };
        self.segments().iter().filter_map(section).collect()
    }

    /// Returns the two bytes that end at a link address.
    fn instruction_mut(&mut self, address: u64) -> Option<&mut [u8; 2]> {
        self.bytes_mut(address.checked_sub(1)?, 2)?.try_into().ok()
    }

    /// Replaces the bytes at link addresses. Returns `None` and changes nothing if a segment has not all of them.
    pub(super) fn change(&mut self, changes: &[(u64, &[u8])]) -> Option<()> {
        for (address, bytes) in changes {
            self.bytes_mut(*address, bytes.len())?;
        }
        for (address, bytes) in changes {
            self.bytes_mut(*address, bytes.len())?.copy_from_slice(bytes);
        }
        Some(())
    }

    /// Returns `len` bytes at a link address, or `None` if no segment has all of them.
    pub(super) fn bytes_mut(&mut self, address: u64, len: usize) -> Option<&mut [u8]> {
        let offset = self.segments().iter().find_map(|segment| {
            let offset = usize::try_from(address.checked_sub(segment.virtual_address)?).ok()?;
            (offset.checked_add(len)? <= segment.file.len()).then_some(segment.file.start + offset)
        })?;
        self.image.get_mut(offset..offset + len)
    }

    fn segments(&self) -> &[Segment] {
        match &self.format.kind {
            Kind::Linux(linux) => linux.segments(),
            Kind::Multiboot(multiboot) => multiboot.segments(),
        }
    }
}

/// Returns the link address of a physical address.
fn link_address(segments: &[Segment], physical: u64) -> u64 {
    let there = segments.iter().find(|segment| segment.memory.contains(&physical));
    there.map_or(physical, |segment| segment.virtual_address.wrapping_add(physical - segment.memory.start))
}

#[cfg(test)]
mod tests;
