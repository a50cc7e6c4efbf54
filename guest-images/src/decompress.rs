//! Decompresses what distributions compress: packages, package lists, kernel modules, layers of images.

use std::io::{self, BufRead, Cursor, Read};

use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

/// The most memory that an xz archive may want, in KiB. `xz -9` wants 65 MiB.
const XZ_MEMORY: u32 = 256 << 10;

/// Returns a reader of the decompressed content of a file with this name.
pub fn reader<'a>(name: &str, file: impl BufRead + 'a) -> Box<dyn Read + 'a> {
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "gz" => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        "xz" => Box::new(lzma_rust2::XzReader::new_mem_limit(file, true, XZ_MEMORY)),
        "zst" => Box::new(Frames::new(file)),
        _ => Box::new(file),
    }
}

/// What is read of a file before it is known what follows.
type Ahead<R> = io::Chain<Cursor<[u8; 4]>, R>;

/// The frames of a zstd file, one behind the other. Those that say of themselves that they are to be skipped are.
struct Frames<R: Read>(State<R>);

enum State<R: Read> {
    Between(R),
    Within(Box<StreamingDecoder<Ahead<R>, FrameDecoder>>),
    Ended,
}

impl<R: Read> Frames<R> {
    fn new(file: R) -> Self {
        Self(State::Between(file))
    }

    /// Begins the next frame, if there is one.
    fn begin(mut file: R) -> io::Result<State<R>> {
        const SKIPPED: u32 = 0x184d_2a50;
        loop {
            let mut magic = [0; 4];
            let mut read = 0;
            while read < magic.len() {
                match file.read(&mut magic[read..])? {
                    0 if read == 0 => return Ok(State::Ended),
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    more => read += more,
                }
            }
            if u32::from_le_bytes(magic) & !0xf != SKIPPED {
                let decoder =
                    StreamingDecoder::new(Cursor::new(magic).chain(file)).map_err(io::Error::other)?;
                return Ok(State::Within(Box::new(decoder)));
            }
            let mut length = [0; 4];
            file.read_exact(&mut length)?;
            let length = u32::from_le_bytes(length).into();
            if io::copy(&mut file.by_ref().take(length), &mut io::sink())? < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0 = match std::mem::replace(&mut self.0, State::Ended) {
                State::Ended => return Ok(0),
                State::Between(file) => Self::begin(file)?,
                State::Within(mut decoder) => {
                    let read = decoder.read(buffer)?;
                    if read > 0 || buffer.is_empty() {
                        self.0 = State::Within(decoder);
                        return Ok(read);
                    }
                    let (_, file) = decoder.into_inner().into_inner();
                    State::Between(file)
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    #[test]
    fn all_frames_of_a_zstd_file_are_read_but_those_to_be_skipped() {
        let frame = |text: &str| compress_to_vec(text.as_bytes(), CompressionLevel::Fastest);
        let skipped = [&0x184d_2a53_u32.to_le_bytes()[..], &5_u32.to_le_bytes(), b"index"].concat();
        let read = |bytes: &[u8]| {
            let mut text = String::new();
            reader("x.zst", bytes).read_to_string(&mut text).map(|_| text)
        };
        let whole = [&skipped[..], &frame("one"), &frame(""), &skipped, &frame(" two")].concat();
        assert_eq!(read(&whole).unwrap(), "one two");
        assert_eq!(read(&[]).unwrap(), "");
        for short in [&whole[..whole.len() - 1], &skipped[..10], &whole[..2]] {
            assert!(read(short).is_err());
        }
    }
}
