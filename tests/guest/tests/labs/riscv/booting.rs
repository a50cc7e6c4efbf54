//! Tests of the file formats of RISC-V kernels, and of guests with little memory.

use std::fs;
use std::io::Write;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use guest_images::cache::Cache;
use guest_images::{Arch, Progress, Release};
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        a_kernel_may_be_compressed_with_gzip,
        a_kernel_may_be_an_efi_program,
        memory_may_be_160_mib,
    ])
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let image = default_kernel();
    let packed = gzip(&image);
    let program = efi_program(&packed);
    Steps::on_riscv("riscv::booting")
        .configure_host(move |scenario| scenario.program(packed, "Image.gz").program(program, "vmlinuz.efi"))
        .step("small", "./tally run --memory 160M -- uname -sm")
        .step("gzip", "./tally run --kernel Image.gz -- uname -sm")
        .step("efi", "./tally run --kernel vmlinuz.efi -- uname -sm")
        .run()
});

/// Returns the default guest's kernel. Debian ships it as an uncompressed `Image`.
fn default_kernel() -> Vec<u8> {
    let cache = Cache::open().expect("there is a cache");
    let kernel = guest_images::kernel(&cache, Release::of(Arch::Riscv64), &mut Progress::stderr("lab"));
    let path = kernel.unwrap_or_else(|error| panic!("{error}")).image;
    let image = fs::read(path).expect("the kernel can be read");
    assert_eq!(&image[56..60], b"RSC\x05");
    image
}

/// Compresses a kernel as the kernel's build does for `Image.gz`.
fn gzip(image: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(image).expect("writing into memory cannot fail");
    packed.finish().expect("writing into memory cannot fail")
}

/// Creates a file like the `vmlinuz.efi` of the kernel's build, without the program that would decompress the kernel
/// (`drivers/firmware/efi/libstub/zboot-header.S`).
fn efi_program(packed: &[u8]) -> Vec<u8> {
    const HEADERS: u32 = 4096;
    let mut file = vec![0; HEADERS as usize];
    file[..8].copy_from_slice(b"MZ\0\0zimg");
    file[8..12].copy_from_slice(&HEADERS.to_le_bytes());
    let len = u32::try_from(packed.len()).expect("kernels are smaller");
    file[12..16].copy_from_slice(&len.to_le_bytes());
    file[24..28].copy_from_slice(b"gzip");
    [&file, packed].concat()
}

fn assert_boots(step: &str) {
    let done = RESULTS.of(step);
    assert_eq!((done.status, done.text().as_str(), done.err.as_str()), (0, "Linux riscv64\n", ""), "{step}");
}

fn a_kernel_may_be_compressed_with_gzip() {
    assert_boots("gzip");
}

fn a_kernel_may_be_an_efi_program() {
    assert_boots("efi");
}

fn memory_may_be_160_mib() {
    assert_boots("small");
}
