//! Decompresses the payload of a compressed kernel.
//!
//! The first bytes of the payload are the magic number of one of seven compressions, which the boot protocol lists in
//! its description of `payload_offset`. Tally supports those that distributions use. All payloads end with the
//! uncompressed size: gzip's format ends with it, and for the others the kernel's build appends it.

use std::io::{self, BufReader, Read, Seek, SeekFrom, Take};
use std::ops::Range;

use super::LARGEST;
use super::bytes::u32_at;
use super::error::Problem;
use super::file::read_range;

const SIZE_LEN: u64 = 4;
const BUFFER: usize = 64 << 10;
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Maximum uncompressed size of a block of `lz4 -l`, and maximum compressed size of such a block ("LZ4 Frame Format
/// Description", "Legacy frame").
const LZ4_BLOCK: usize = 8 << 20;
const LZ4_BLOCK_PACKED: usize = LZ4_BLOCK + LZ4_BLOCK / 255 + 16;

#[derive(Debug, Clone, Copy)]
enum Compression {
    Gzip,
    Xz,
    Lz4,
    Zstd,
}

impl Compression {
    fn of(magic: &[u8]) -> Result<Self, Problem> {
        match magic {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Ok(Self::Xz),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            _ if magic.starts_with(&LZ4_MAGIC) => Ok(Self::Lz4),
            [b'B', b'Z', b'h', ..] => Err(Problem::Compression("bzip2")),
            [0x5d, 0, 0, ..] => Err(Problem::Compression("lzma")),
            [0x89, b'L', b'Z', b'O', ..] => Err(Problem::Compression("lzo")),
            _ => Err(Problem::UnknownCompression),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// Decompresses the payload at this range of the file. Returns an error if the result would exceed `limit` bytes.
pub fn unpack(file: &mut (impl Read + Seek), payload: Range<u64>, limit: u64) -> Result<Vec<u8>, Problem> {
    const SHORT: Problem = Problem::Damaged("its payload is too short");
    let len = payload.end.saturating_sub(payload.start);
    let size_at = payload.end.checked_sub(SIZE_LEN).filter(|at| *at > payload.start).ok_or(SHORT)?;
    let magic = read_range(file, payload.start..payload.start + len.min(8))?;
    let compression = Compression::of(&magic)?;
    let announced = u32_at(&read_range(file, size_at..payload.end)?, 0).ok_or(SHORT)?;

    let limit = limit.min(LARGEST);
    if u64::from(announced) > limit {
        return Err(Problem::TooLarge { size: announced.into(), limit });
    }
    file.seek(SeekFrom::Start(payload.start))?;
    let packed = match compression {
        Compression::Gzip => file.take(len),
        Compression::Xz | Compression::Lz4 | Compression::Zstd => file.take(len - SIZE_LEN),
    };
    let unpacked = decode(compression, packed, announced as usize)
        .map_err(|error| Problem::Unpack { how: compression.name(), error })?;
    if unpacked.len() == announced as usize {
        Ok(unpacked)
    } else {
        Err(Problem::UnpackedSize(announced.into()))
    }
}

/// Decompresses `size` bytes. Returns fewer bytes if the payload is shorter, and one byte more or an error if it is
/// longer.
fn decode(compression: Compression, packed: Take<impl Read>, size: usize) -> io::Result<Vec<u8>> {
    match compression {
        Compression::Gzip => read_all(flate2::bufread::GzDecoder::new(buffered(packed)), size),
        Compression::Xz => {
            let memory = u32::try_from(LARGEST >> 10).map_err(io::Error::other)?;
            read_all(lzma_rust2::XzReader::new_mem_limit(buffered(packed), false, memory), size)
        }
        Compression::Lz4 => lz4_legacy(packed, size),
        Compression::Zstd => zstd(packed, size),
    }
}

fn buffered<R: Read>(packed: R) -> BufReader<R> {
    BufReader::with_capacity(BUFFER, packed)
}

fn read_all(decoder: impl Read, size: usize) -> io::Result<Vec<u8>> {
    let mut unpacked = Vec::new();
    unpacked.try_reserve_exact(size)?;
    decoder.take(size as u64 + 1).read_to_end(&mut unpacked)?;
    Ok(unpacked)
}

/// Decompresses zstd. The kernel's build pipes into `zstd -22 --ultra`, so the frame announces a window of 128 MiB,
/// which is just the decoder's limit.
fn zstd(packed: impl Read, size: usize) -> io::Result<Vec<u8>> {
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(buffered(packed)).map_err(io::Error::other)?;
    let unpacked = read_all(&mut decoder, size)?;
    let (given, computed) =
        (decoder.decoder.get_checksum_from_data(), decoder.decoder.get_calculated_checksum());
    if unpacked.len() == size && given.is_some() && given != computed {
        return Err(io::Error::other("checksum mismatch"));
    }
    Ok(unpacked)
}

/// Decompresses LZ4's legacy format: a sequence of blocks, each with its length in front. Where frames were
/// concatenated, the magic number appears again between blocks.
fn lz4_legacy(mut packed: Take<impl Read>, size: usize) -> io::Result<Vec<u8>> {
    let mut unpacked = vec![0; size];
    let mut filled = 0;
    let mut block = Vec::new();
    while packed.limit() > 0 {
        let mut len = [0; 4];
        packed.read_exact(&mut len)?;
        if len == LZ4_MAGIC {
            continue;
        }
        let len = u32::from_le_bytes(len) as usize;
        if len > LZ4_BLOCK_PACKED {
            return Err(io::Error::other("a block is longer than blocks can be"));
        }
        block.resize(len, 0);
        packed.read_exact(&mut block)?;
        filled +=
            lz4_flex::block::decompress_into(&block, &mut unpacked[filled..]).map_err(io::Error::other)?;
    }
    unpacked.truncate(filled);
    Ok(unpacked)
}
