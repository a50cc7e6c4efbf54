//! Encoding of jump and branch offsets, whose bits are scattered over the instruction (RISC-V ISA manual, volume I,
//! "Immediate Encoding Variants", and the formats of the "C" extension).

/// Consecutive bits of an offset.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// The lowest bit in the instruction.
    from: u32,
    /// Number of bits.
    count: u32,
    /// The lowest bit in the offset.
    to: u32,
}

/// Encoding of the offset in a format of instructions.
#[derive(Debug)]
pub struct Distance {
    /// Width of the offset, including its sign.
    width: u32,
    pieces: &'static [Piece],
}

const fn piece(from: u32, count: u32, to: u32) -> Piece {
    Piece { from, count, to }
}

/// Conditional branches (format B).
pub const BRANCH: Distance =
    Distance { width: 13, pieces: &[piece(8, 4, 1), piece(25, 6, 5), piece(7, 1, 11), piece(31, 1, 12)] };
/// JAL (format J).
pub const JUMP: Distance =
    Distance { width: 21, pieces: &[piece(21, 10, 1), piece(20, 1, 11), piece(12, 8, 12), piece(31, 1, 20)] };
/// C.BEQZ and C.BNEZ (format CB).
pub const SHORT_BRANCH: Distance = Distance {
    width: 9,
    pieces: &[piece(3, 2, 1), piece(10, 2, 3), piece(2, 1, 5), piece(5, 2, 6), piece(12, 1, 8)],
};
/// C.J (format CJ).
pub const SHORT_JUMP: Distance = Distance {
    width: 12,
    pieces: &[
        piece(3, 3, 1),
        piece(11, 1, 4),
        piece(2, 1, 5),
        piece(7, 1, 6),
        piece(6, 1, 7),
        piece(9, 2, 8),
        piece(8, 1, 10),
        piece(12, 1, 11),
    ],
};

impl Distance {
    /// Returns the offset in an instruction.
    pub fn gather(&self, instruction: u32) -> i32 {
        let bits = self
            .pieces
            .iter()
            .fold(0, |bits, piece| bits | (instruction >> piece.from & piece.mask()) << piece.to);
        let unused = u32::BITS - self.width;
        (bits << unused).cast_signed() >> unused
    }

    /// Returns the bits of an instruction that encode an offset. Returns `None` if the offset is too large or odd.
    pub fn scatter(&self, distance: i64) -> Option<u32> {
        let distance = i32::try_from(distance).ok()?;
        let bits = distance.cast_unsigned();
        let scattered = self
            .pieces
            .iter()
            .fold(0, |scattered, piece| scattered | (bits >> piece.to & piece.mask()) << piece.from);
        (self.gather(scattered) == distance).then_some(scattered)
    }
}

impl Piece {
    fn mask(self) -> u32 {
        (1 << self.count) - 1
    }
}
