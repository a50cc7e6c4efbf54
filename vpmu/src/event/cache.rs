//! Events of caches, and of what works like one, by the numbers and the names that Linux has for them.

/// What happens where, and with which result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cache {
    /// Where.
    pub unit: CacheUnit,
    /// What.
    pub operation: Operation,
    /// Which of them are counted.
    pub result: CacheResult,
}

/// One of the caches, in the order of their numbers (`enum perf_hw_cache_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheUnit {
    /// The first-level data cache.
    L1d,
    /// The first-level instruction cache.
    L1i,
    /// The last level, which cores may share.
    LastLevel,
    /// The translations of data addresses.
    DataTlb,
    /// Those of instruction addresses.
    InstructionTlb,
    /// The branch predictor.
    Branch,
    /// The memory of this part of the machine.
    Node,
}

/// What is done with it (`enum perf_hw_cache_op_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Something is read.
    Load,
    /// Something is written.
    Store,
    /// Something is fetched that may be needed.
    Prefetch,
}

/// How that goes (`enum perf_hw_cache_op_result_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheResult {
    /// In whichever way.
    Access,
    /// It is not there.
    Miss,
}

const UNITS: [CacheUnit; 7] = {
    use CacheUnit::{Branch, DataTlb, InstructionTlb, L1d, L1i, LastLevel, Node};
    [L1d, L1i, LastLevel, DataTlb, InstructionTlb, Branch, Node]
};
const OPERATIONS: [Operation; 3] = [Operation::Load, Operation::Store, Operation::Prefetch];
const RESULTS: [CacheResult; 2] = [CacheResult::Access, CacheResult::Miss];

/// What `perf` calls them. It has no use for some, such as stores of instructions, and these are called alike.
#[rustfmt::skip]
const NAMES: [[[&str; 2]; 3]; 7] = [
    [["L1-dcache-loads", "L1-dcache-load-misses"], ["L1-dcache-stores", "L1-dcache-store-misses"], ["L1-dcache-prefetches", "L1-dcache-prefetch-misses"]],
    [["L1-icache-loads", "L1-icache-load-misses"], ["L1-icache-stores", "L1-icache-store-misses"], ["L1-icache-prefetches", "L1-icache-prefetch-misses"]],
    [["LLC-loads", "LLC-load-misses"], ["LLC-stores", "LLC-store-misses"], ["LLC-prefetches", "LLC-prefetch-misses"]],
    [["dTLB-loads", "dTLB-load-misses"], ["dTLB-stores", "dTLB-store-misses"], ["dTLB-prefetches", "dTLB-prefetch-misses"]],
    [["iTLB-loads", "iTLB-load-misses"], ["iTLB-stores", "iTLB-store-misses"], ["iTLB-prefetches", "iTLB-prefetch-misses"]],
    [["branch-loads", "branch-load-misses"], ["branch-stores", "branch-store-misses"], ["branch-prefetches", "branch-prefetch-misses"]],
    [["node-loads", "node-load-misses"], ["node-stores", "node-store-misses"], ["node-prefetches", "node-prefetch-misses"]],
];

impl Cache {
    /// That with these numbers, if there is one.
    pub fn numbered(unit: u64, operation: u64, result: u64) -> Option<Self> {
        let at = |number: u64| usize::try_from(number).ok();
        Some(Self {
            unit: *UNITS.get(at(unit)?)?,
            operation: *OPERATIONS.get(at(operation)?)?,
            result: *RESULTS.get(at(result)?)?,
        })
    }

    /// The numbers of where, what and which.
    pub fn numbers(self) -> [u64; 3] {
        [self.unit as u64, self.operation as u64, self.result as u64]
    }

    /// What `perf` calls it.
    pub fn name(self) -> &'static str {
        NAMES[self.unit as usize][self.operation as usize][self.result as usize]
    }

    /// What it calls all of them.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.as_flattened().as_flattened().iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_found_by_its_numbers_and_named_as_perf_does() {
        let mut names = Cache::names();
        for unit in 0..7 {
            for operation in 0..3 {
                for result in 0..2 {
                    let cache = Cache::numbered(unit, operation, result).unwrap();
                    assert_eq!(cache.numbers(), [unit, operation, result]);
                    assert_eq!(Some(cache.name()), names.next());
                }
            }
        }
        assert_eq!(names.next(), None);
        for numbers in [[7, 0, 0], [0, 3, 0], [0, 0, 2], [u64::MAX, 0, 0]] {
            let [unit, operation, result] = numbers;
            assert_eq!(Cache::numbered(unit, operation, result), None, "{numbers:?}");
        }
        let name = |unit, operation, result| Cache { unit, operation, result }.name();
        assert_eq!(name(CacheUnit::DataTlb, Operation::Load, CacheResult::Miss), "dTLB-load-misses");
        assert_eq!(name(CacheUnit::L1d, Operation::Prefetch, CacheResult::Access), "L1-dcache-prefetches");
        assert_eq!(name(CacheUnit::Branch, Operation::Load, CacheResult::Access), "branch-loads");
    }
}
