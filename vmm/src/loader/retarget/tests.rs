use guest_images::cache::Cache;
use guest_images::payloads::BARE_METAL;
use guest_images::{Progress, Suite};
use vpmu::retarget::Proof;

use super::super::testing::*;
use super::*;

/// MOV ECX, EDI; RDPMC; RET.
const RDPMC: [u8; 5] = [0x89, 0xf9, 0x0f, 0x33, 0xc3];
const RDMSR: [u8; 5] = [0x89, 0xf9, 0x0f, 0x32, 0xc3];

fn linux(content: &[u8]) -> ElfFile {
    ElfFile { content: content.to_vec(), ..ElfFile::default() }
}

fn on_disk(path: &std::path::Path) -> Kernel {
    Kernel::read(path).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn an_rdpmc_of_the_kernel_becomes_an_rdmsr() {
    let mut kernel = read(&linux(&RDPMC).build()).unwrap();
    let told = kernel.retarget_rdpmc().unwrap();
    assert_eq!(told.sites.iter().map(|site| site.address).collect::<Vec<_>>(), [0xffff_ffff_8010_0002]);
    assert_eq!(kernel.image, linux(&RDMSR).build());
    assert_eq!(kernel.retarget_rdpmc().unwrap(), Retargeted { sites: vec![], left: vec![] });
}

#[test]
fn a_linux_with_a_doubtful_rdpmc_is_refused_and_stays_as_it_was() {
    // A byte behind it is no instruction, so the segment is not all code.
    let file = linux(&[&RDPMC[..], &[0x06], &RDPMC].concat()).build();
    let mut kernel = read(&file).unwrap();
    assert_eq!(
        kernel.retarget_rdpmc().unwrap_err().to_string(),
        "kernel: the bytes 0f 33 at 0xffffffff80100002 may be an RDPMC instruction or not, and Tally's PMU has to know: \
         --pmu kvm and --pmu none do without"
    );
    assert_eq!(kernel.image, file);
}

#[test]
fn a_flat_image_keeps_what_nothing_leads_to() {
    let header = multiboot_header(1 << 16, &[0x10_0000, 0x10_0000, 0, 0, 0x10_0020]);
    let mut kernel = read(&[&header[..], &RDPMC, &RDPMC].concat()).unwrap();
    let told = kernel.retarget_rdpmc().unwrap();
    assert_eq!(told.left, [0x10_0027]);
    let expected = [&header[..], &RDMSR, &RDPMC].concat();
    assert_eq!(kernel.image, expected);
}

#[test]
fn the_bare_metal_payload_reads_counters_in_one_place() {
    let mut kernel = read(BARE_METAL).unwrap();
    let told = kernel.retarget_rdpmc().unwrap();
    assert_eq!(told.sites.len(), 1);
    assert_eq!(told.left, [0; 0]);
}

/// Where, by the look of the code alone, a counter is read: RDPMC, and soon after it SHL RDX, 32 to put its halves
/// together.
fn read_by_the_look(kernel: &Kernel) -> Vec<u64> {
    const SHIFT: [u8; 4] = [0x48, 0xc1, 0xe2, 0x20];
    let description = kernel.describe();
    let code = description.sections.iter().filter(|section| section.content == Content::Code);
    let looks = code.flat_map(|section| {
        let windows = (section.address..).zip(section.bytes.windows(12));
        windows.filter(|(_, bytes)| bytes.starts_with(&[0x0f, 0x33]) && bytes.windows(4).any(|w| w == SHIFT))
    });
    looks.map(|(address, _)| address).collect()
}

fn changed(kernel: &mut Kernel) -> Vec<(u64, Proof)> {
    let told = kernel.retarget_rdpmc().unwrap_or_else(|error| panic!("{error}"));
    told.sites.into_iter().map(|site| (site.address, site.proof)).collect()
}

#[test]
fn the_distribution_s_kernels_read_counters_in_one_place_each() {
    let cache = Cache::open().unwrap();
    for suite in [Suite::Bookworm, Suite::Trixie, Suite::Sid] {
        let image = guest_images::kernel(&cache, suite, &mut Progress::stderr("test")).unwrap().image;
        let mut kernel = on_disk(&image);
        let look = read_by_the_look(&kernel);
        assert_eq!(look.len(), 1, "{suite}");
        assert_eq!(changed(&mut kernel), [(look[0], Proof::Unwind)], "{suite}");
        assert_eq!(changed(&mut kernel), [], "{suite}");
    }
}

#[test]
fn a_kernel_that_reads_counters_in_several_places_tells_the_same_with_and_without_symbols() {
    let cache = Cache::open().unwrap();
    let small = guest_images::small_kernel(&cache, &mut Progress::stderr("test")).unwrap();
    let (mut packed, mut with_symbols) = (on_disk(&small.image), on_disk(&small.vmlinux));
    let look = read_by_the_look(&packed);
    assert!(look.len() > 1);
    let told = with_symbols.retarget_rdpmc().unwrap_or_else(|error| panic!("{error}"));
    assert!(told.sites.iter().any(|site| site.function.as_deref() == Some("x86_perf_event_update")));
    let by_symbols: Vec<_> = told.sites.iter().map(|site| (site.address, site.proof)).collect();
    assert_eq!(by_symbols, look.iter().map(|address| (*address, Proof::Function)).collect::<Vec<_>>());
    assert_eq!(changed(&mut packed), look.iter().map(|at| (*at, Proof::WholeSection)).collect::<Vec<_>>());
}
