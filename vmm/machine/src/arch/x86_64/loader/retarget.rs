//! Changes the RDPMC instructions of a kernel that has been read into RDMSR (see [`vpmu_retarget`]).

use vpmu_retarget::{Content, Image, Section, Site, Symbol};

use log::info;

use super::segment::Segment;
use super::shared_page::Added;
use super::{Kernel, Kind};
use crate::arch::x86_64::pmu::Pmu;
use crate::loader::error::{LoadError, Problem};
use crate::target::COUNTERS;

/// What was changed in a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Retargeted {
    /// The instructions that were changed.
    pub sites: Vec<Site>,
    /// Where the bytes of an RDPMC are in an image that does not tell code from data, and nothing leads there. They were
    /// left alone: should one be an instruction after all, it faults in the guest, for all to see.
    pub left: Vec<u64>,
}

/// Has the kernel access its PMU in a way that can be handed over, and logs what was changed for that.
pub fn retarget(kernel: &mut Kernel, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
    let Retargeted { sites, left } = kernel.retarget_rdpmc()?;
    if let Some(registers) = pmu.page_registers() {
        match kernel.add_shared_pages(&registers, &sites, cpus) {
            Some(Added { table, code }) => info!(
                target: COUNTERS,
                "accesses to frozen counters do not leave the guest: its table of functions at {table:#x} leads to code at {code:#x}"
            ),
            None => info!(
                target: COUNTERS,
                "accesses to frozen counters leave the guest, too: its kernel has no such table of functions"
            ),
        }
    }
    for site in sites {
        info!(target: COUNTERS, "RDPMC became RDMSR at {site}");
    }
    for address in left {
        info!(
            target: COUNTERS,
            "the bytes of an RDPMC at {address:#x} are left alone: nothing shows that they run"
        );
    }
    Ok(())
}

impl Kernel {
    /// Makes every RDPMC an RDMSR of the same register, or says why that cannot be done without a doubt.
    pub(super) fn retarget_rdpmc(&mut self) -> Result<Retargeted, LoadError> {
        let findings = vpmu_retarget::find(&self.describe());
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

    pub(super) fn describe(&self) -> Image<'_> {
        let (kind, written) = match &self.format.kind {
            // Linux maps what it writes to so that it cannot run.
            Kind::Linux(_) => (vpmu_retarget::Kind::Linux, Content::Data),
            Kind::Multiboot(multiboot) => {
                let entry = link_address(multiboot.segments(), multiboot.entry().into());
                (vpmu_retarget::Kind::BareMetal { entry }, Content::Code)
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

    /// The image as it is loaded, where nothing says which parts of it are code.
    fn whole_segments(&self) -> Vec<Section<'_>> {
        let section = |segment: &Segment| {
            let bytes = self.image.get(segment.file.clone())?;
            Section::new("", segment.virtual_address, bytes, Content::Code)
        };
        self.segments().iter().filter_map(section).collect()
    }

    /// The two bytes that end at an address for which the kernel was linked.
    fn instruction_mut(&mut self, address: u64) -> Option<&mut [u8; 2]> {
        self.bytes_mut(address.checked_sub(1)?, 2)?.try_into().ok()
    }

    /// So many bytes at an address for which the kernel was linked.
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

/// The address that the kernel itself has for a physical one.
fn link_address(segments: &[Segment], physical: u64) -> u64 {
    let there = segments.iter().find(|segment| segment.memory.contains(&physical));
    there.map_or(physical, |segment| segment.virtual_address.wrapping_add(physical - segment.memory.start))
}

#[cfg(test)]
mod tests;
