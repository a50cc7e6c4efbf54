//! The changes to a RISC-V kernel, for which the whole image is searched.
//!
//! A refused kernel stays as it is. A changed one has the same length, and is not changed a second time.

use vpmu_retarget::riscv::{Refusal, retarget};

/// Offset of the magic number in a kernel's header.
const MAGIC: (usize, &[u8]) = (56, b"RSC\x05");
const HEADER: usize = 64;

/// Returns the kernel of an input: the first two bytes say how often the last part of the image is repeated, and how
/// long that part is.
fn image(data: &[u8]) -> Option<Vec<u8>> {
    let ([times, len], rest) = data.split_first_chunk()?;
    let mut image = vec![0; HEADER];
    image[MAGIC.0..][..MAGIC.1.len()].copy_from_slice(MAGIC.1);
    image.extend(rest);
    let part = rest[rest.len().saturating_sub(usize::from(*len))..].to_vec();
    let times = crate::repetitions(*times, part.len(), image.len());
    image.extend(part.repeat(times));
    Some(image)
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(before) = image(data) else { return };
    let mut after = before.clone();
    match retarget(&mut after, 2) {
        Err(_) => assert!(after == before, "a refused kernel has changed"),
        Ok(retargeted) => {
            assert!(after != before && after.len() == before.len() && !retargeted.changes.is_empty());
            let offsets: Vec<usize> = retargeted.changes.iter().map(|change| change.offset).collect();
            assert!(offsets.is_sorted(), "{offsets:x?}");
            let again = retarget(&mut after.clone(), 2);
            assert!(matches!(again, Err(Refusal::Already { .. } | Refusal::Undecided { .. })), "{again:?}");
            let _ = retargeted.changes.iter().map(ToString::to_string).collect::<String>();
        }
    }
}
