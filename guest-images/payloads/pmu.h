// A vendor-independent view of the PMU. `amd_pmu.c` and `intel_pmu.c` implement it.

#ifndef PMU_H
#define PMU_H

#include "payload.h"

// The event selects of both vendors have these bits, and this event.
enum { SELECT_USER = 1 << 16, SELECT_KERNEL = 1 << 17, SELECT_INTERRUPT = 1 << 20, SELECT_ON = 1 << 22 };
enum { EVENT_INSTRUCTIONS = 0xc0 };
#define COUNTER_MASK ((1ull << 48) - 1)

// The behaviour of a register after a write, according to the manual.
struct rule {
    enum {
        ABSENT,     // The register does not exist: reads fault too.
        READS,      // It reads as `reads`.
        COUNTS,     // It reads as `reads`, or as more if the counter counts.
        STATUS,     // It has only status bits.
        CLEARS,     // Writing it clears status bits. It reads as zero.
        SETS,       // Writing it sets status bits. It reads as zero.
    } kind;
    int faults;             // The write faults.
    uint64_t reads;         // Value for `READS` and `COUNTS`.
    uint32_t counter;       // Counter for `COUNTS`.
    uint32_t alias;         // An address that reads the same value (it may be the same address), or 0.
};
// Rules for a register that does not exist, a read-only one, and one that faults if a reserved bit is written.
struct rule absent(void);
struct rule read_only(uint64_t reads);
struct rule plain(uint32_t msr, uint64_t written, uint64_t reserved);

// A select has the format of a general counter's event select. Fixed counters use its modes and interrupt bit only.
extern struct pmu {
    // Number of all counters, and of fixed counters. General counters come first, fixed counters follow.
    uint32_t counters, fixed;
    // A PMU interrupt masks its entry in the local vector table, and stops all counters if freezing is enabled.
    // Handlers have to undo both.
    int masks_lvt_on_interrupt;
    int has_global_registers;
    uint32_t global_status, global_control, global_status_clear;
    // Writable bits of these registers, and of an event select.
    uint64_t status_bits, control_bits, select_bits;
    // Some events, and the bits of a select that choose the event or filter it (edge, invert, threshold).
    const uint16_t *events;
    uint32_t event_count;
    uint64_t event_bits;

    uint32_t (*counter_register)(uint32_t counter);
    // Returns a counter's bit in the global registers.
    uint64_t (*global_bit)(uint32_t counter);
    void (*select)(uint32_t counter, uint64_t select);
    // Returns whether the counter is enabled.
    int (*counts)(uint32_t counter);
    // Returns the counter that RDPMC reads at this index. If RDPMC faults, returns `counters` or more.
    uint32_t (*rdpmc_counter)(uint32_t index);
    struct rule (*rule)(uint32_t msr, uint64_t written);
} pmu;

// Fill in `pmu` from CPUID. CPUID is an exit, so every word calls `find_pmu` once.
void find_amd_pmu(void);
void find_intel_pmu(void);
void find_pmu(void);

uint64_t read_counter(uint32_t counter);
void write_counter(uint32_t counter, uint64_t value);
void start_counter(uint32_t counter, uint64_t select, uint64_t value);
void stop_counters(void);
// Clears the global status and enables all counters in the global control register, if there is one.
void enable_global_control(void);
// Returns the set of counters whose bit is set in a value of a global register.
uint32_t counters_in(uint64_t global);
// Returns whether a counter has wrapped around, provided that it was set to a value in the upper half of its range.
int has_overflowed(uint64_t value);

#endif
