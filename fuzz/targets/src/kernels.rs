//! Kernel images: what `tally run --kernel` reads, unpacks, changes and loads, for this host's architecture, and what
//! hosts of the other architecture read.
//!
//! The first byte says what is behind it: a whole file, or the content of one that is packed here, because no mutation
//! finds its way through a compression.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tally_machine::untrusted::{load, read_riscv_image};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(bytes).expect("memory can be written");
    packed.finish().expect("memory can be written")
}

/// Appends the unpacked size, as the kernel's build does for all compressions but gzip.
fn with_size(mut packed: Vec<u8>, unpacked: &[u8]) -> Vec<u8> {
    packed.extend(u32::try_from(unpacked.len()).expect("inputs are short").to_le_bytes());
    packed
}

fn lz4(bytes: &[u8]) -> Vec<u8> {
    let block = lz4_flex::block::compress(bytes);
    let len = u32::try_from(block.len()).expect("inputs are short");
    with_size([&[0x02, 0x21, 0x4c, 0x18], &len.to_le_bytes(), &block[..]].concat(), bytes)
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    with_size(compress_to_vec(bytes, CompressionLevel::Fastest), bytes)
}

/// Returns a bzImage with this payload.
fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 1024];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x236, &0x7f_u16.to_le_bytes());
    put(0x238, &2047_u32.to_le_bytes());
    put(0x24c, &u32::try_from(payload.len()).expect("inputs are short").to_le_bytes());
    put(0x260, &(1_u32 << 20).to_le_bytes());
    file.extend(payload);
    file
}

/// Returns an EFI program with this kernel, packed in this way.
fn efi_program(how: [u8; 4], packed: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 64];
    file[..8].copy_from_slice(b"MZ\0\0zimg");
    file[8..12].copy_from_slice(&64_u32.to_le_bytes());
    // For all compressions but gzip, the size behind the packed kernel is not part of it.
    let size = packed.len() - if &how == b"gzip" { 0 } else { 4 };
    file[12..16].copy_from_slice(&u32::try_from(size).expect("inputs are short").to_le_bytes());
    file[24..28].copy_from_slice(&how);
    file.extend(packed);
    file
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some((kind, content)) = data.split_first() else { return };
    let file = match kind % 8 {
        1 => bzimage(&gzip(content)),
        2 => bzimage(&lz4(content)),
        3 => bzimage(&zstd(content)),
        4 => gzip(content),
        5 => efi_program(*b"gzip", &gzip(content)),
        6 => efi_program(*b"lz4\0", &lz4(content)),
        7 => efi_program(*b"zstd", &zstd(content)),
        _ => content.to_vec(),
    };
    for result in [load(&file), read_riscv_image(&file)] {
        if let Err(error) = result {
            let text = error.to_string();
            assert!(!text.contains(char::is_control), "{text:?}");
        }
    }
}
