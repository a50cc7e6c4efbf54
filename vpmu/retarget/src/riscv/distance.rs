//! How instructions say how far they jump: in pieces, each somewhere else. The tables are those of the RISC-V ISA
//! manual, volume I (immediate encoding variants of the base, and the formats of the "C" extension).

/// Some bits of a distance.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// The lowest of them in the instruction.
    from: u32,
    /// How many they are.
    count: u32,
    /// The lowest of them in the distance.
    to: u32,
}

/// Where an instruction has the distance that it jumps.
#[derive(Debug)]
pub struct Distance {
    /// What all distances fit in, with their sign.
    width: u32,
    pieces: &'static [Piece],
}

const fn piece(from: u32, count: u32, to: u32) -> Piece {
    Piece { from, count, to }
}

/// Conditional branches.
pub const BRANCH: Distance =
    Distance { width: 13, pieces: &[piece(8, 4, 1), piece(25, 6, 5), piece(7, 1, 11), piece(31, 1, 12)] };
/// JAL.
pub const JUMP: Distance =
    Distance { width: 21, pieces: &[piece(21, 10, 1), piece(20, 1, 11), piece(12, 8, 12), piece(31, 1, 20)] };
/// C.BEQZ and C.BNEZ.
pub const SHORT_BRANCH: Distance = Distance {
    width: 9,
    pieces: &[piece(3, 2, 1), piece(10, 2, 3), piece(2, 1, 5), piece(5, 2, 6), piece(12, 1, 8)],
};
/// C.J.
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
    /// The distance in an instruction.
    pub fn gather(&self, instruction: u32) -> i32 {
        let bits = self
            .pieces
            .iter()
            .fold(0, |bits, piece| bits | (instruction >> piece.from & piece.mask()) << piece.to);
        let unused = u32::BITS - self.width;
        (bits << unused).cast_signed() >> unused
    }

    /// The bits of an instruction that say this distance, unless it is too far or odd.
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
