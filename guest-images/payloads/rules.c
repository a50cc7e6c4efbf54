// Rules that many registers of either vendor's PMU follow.

#include "pmu.h"

struct rule absent(void) { return (struct rule){.kind = ABSENT, .faults = 1}; }
struct rule read_only(uint64_t reads) { return (struct rule){.kind = READS, .faults = 1, .reads = reads}; }
struct rule plain(uint32_t msr, uint64_t written, uint64_t reserved) {
    // A write that faults does not change the register.
    return written & reserved ? read_only(read_msr(msr)) : (struct rule){.kind = READS, .reads = written};
}
