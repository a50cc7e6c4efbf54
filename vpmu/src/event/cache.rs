//! Cache events (`PERF_TYPE_HW_CACHE`), with the numbers and names that Linux has for them.

/// A cache event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cache {
    /// The cache.
    pub unit: CacheUnit,
    /// The kind of access.
    pub operation: Operation,
    /// Whether all accesses are counted or misses only.
    pub result: CacheResult,
}

/// The caches, in the order of their numbers (`enum perf_hw_cache_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheUnit {
    /// The first-level data cache.
    L1d,
    /// The first-level instruction cache.
    L1i,
    /// The last-level cache, which cores may share.
    LastLevel,
    /// The data TLB.
    DataTlb,
    /// The instruction TLB.
    InstructionTlb,
    /// The branch predictor.
    Branch,
    /// The memory of the NUMA node.
    Node,
}

/// A kind of access to a cache (`enum perf_hw_cache_op_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A read.
    Load,
    /// A write.
    Store,
    /// A prefetch.
    Prefetch,
}

/// Result of an access to a cache (`enum perf_hw_cache_op_result_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheResult {
    /// Any result.
    Access,
    /// A miss.
    Miss,
}

const UNITS: [CacheUnit; 7] = {
    use CacheUnit::{Branch, DataTlb, InstructionTlb, L1d, L1i, LastLevel, Node};
    [L1d, L1i, LastLevel, DataTlb, InstructionTlb, Branch, Node]
};
const OPERATIONS: [Operation; 3] = [Operation::Load, Operation::Store, Operation::Prefetch];
const RESULTS: [CacheResult; 2] = [CacheResult::Access, CacheResult::Miss];

/// The names that `perf` prints, by unit, operation and result. `perf` refuses some of these combinations, such as
/// stores to the instruction cache; these have names of the same form.
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
    /// Returns the event with these numbers, if there is one.
    pub fn numbered(unit: u64, operation: u64, result: u64) -> Option<Self> {
        let at = |number: u64| usize::try_from(number).ok();
        Some(Self {
            unit: *UNITS.get(at(unit)?)?,
            operation: *OPERATIONS.get(at(operation)?)?,
            result: *RESULTS.get(at(result)?)?,
        })
    }

    /// Returns the numbers of unit, operation and result.
    pub fn numbers(self) -> [u64; 3] {
        [self.unit as u64, self.operation as u64, self.result as u64]
    }

    /// Returns the name that `perf` prints.
    pub fn name(self) -> &'static str {
        NAMES[self.unit as usize][self.operation as usize][self.result as usize]
    }

    /// Returns all cache events.
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |unit| {
            let results =
                move |operation| RESULTS.into_iter().map(move |result| Self { unit, operation, result });
            OPERATIONS.into_iter().flat_map(results)
        };
        UNITS.into_iter().flat_map(of)
    }

    /// Returns the names of all cache events.
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
