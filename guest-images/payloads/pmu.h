// The PMU as the words see it, whoever made it. What the vendors do differently is in `amd_pmu.c` and `intel_pmu.c`.

#ifndef PMU_H
#define PMU_H

#include "payload.h"

// The event selects of both vendors have these bits, and this event.
enum { SELECT_USER = 1 << 16, SELECT_KERNEL = 1 << 17, SELECT_INTERRUPT = 1 << 20, SELECT_ON = 1 << 22 };
enum { EVENT_INSTRUCTIONS = 0xc0 };
#define COUNTER_MASK ((1ull << 48) - 1)

// What a register does that is written, as its manual has it.
struct rule {
    enum {
        ABSENT,     // It is not there: reads fault too.
        READS,      // It reads as `reads`.
        COUNTS,     // The same, or as more if the counter counts.
        STATUS,     // It has nothing but status bits.
        CLEARS,     // It clears status bits, and reads as zero.
        SETS,       // It sets status bits, and reads as zero.
    } kind;
    int faults;             // whether the write does
    uint64_t reads;
    uint32_t counter;       // of `COUNTS`
    uint32_t alias;         // another address of the register, or its own; 0 if the kind has none
};
// A register that is not there, one that is only read, and one that faults if a reserved bit is written.
struct rule absent(void);
struct rule read_only(uint64_t reads);
struct rule plain(uint32_t msr, uint64_t written, uint64_t reserved);

// A select is that of a general counter; a fixed one takes the modes and the interrupt out of it, and ignores the event.
extern struct pmu {
    // General counters have the first numbers, fixed ones those behind them.
    uint32_t counters, fixed;
    // An interrupt masks its entry in the local vector table, and where it is told to, stops all counters: handlers undo both.
    int closes_behind_interrupts;
    int has_global_registers;
    uint32_t global_status, global_control, global_status_clear;
    // What can be written to them, and to an event select.
    uint64_t status_bits, control_bits, select_bits;
    // Some events, and the bits that say which event a select means, or which of its cycles.
    const uint16_t *events;
    uint32_t events_known;
    uint64_t event_bits;

    uint32_t (*counter_register)(uint32_t counter);
    // A counter's bit in the global registers.
    uint64_t (*global_bit)(uint32_t counter);
    void (*select)(uint32_t counter, uint64_t select);
    // Whether the counter moves, if its event comes.
    int (*counts)(uint32_t counter);
    // Which counter RDPMC reads; one that is not there where it faults.
    uint32_t (*rdpmc_counter)(uint32_t index);
    struct rule (*rule)(uint32_t msr, uint64_t written);
} pmu;

// Each fills in `pmu`. What CPUID says: asking is an exit, so every word asks once.
void find_amd_pmu(void);
void find_intel_pmu(void);
void find_pmu(void);

uint64_t read_counter(uint32_t counter);
void write_counter(uint32_t counter, uint64_t value);
void start_counter(uint32_t counter, uint64_t select, uint64_t value);
void stop_counters(void);
// Lets all counters run that are selected, and forgets what overflowed.
void open_global_registers(void);
// Which counters have their bit set in a global register.
uint32_t counters_in(uint64_t global);
// Whether the counter has gone past its end since it was set to less than half of its range before it.
int has_overflowed(uint64_t value);

#endif
