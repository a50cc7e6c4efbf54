// Intel's architectural PMU, version 2 or later (SDM volume 3, section 20.2).

#include "pmu.h"

enum { COUNTER = 0xc1, SELECT = 0x186, FIXED = 0x309, CAPABILITIES = 0x345, FIXED_CONTROL = 0x38d };
enum { GLOBAL_STATUS = 0x38e, GLOBAL_CONTROL, GLOBAL_STATUS_CLEAR, GLOBAL_STATUS_SET, GLOBAL_IN_USE };
// The first of the aliases that accept writes of the full counter width.
enum { FULL_WIDTH = 0x4c1 };
// The four control bits of each fixed counter. The third one is reserved.
enum { FIXED_KERNEL = 1, FIXED_USER = 2, FIXED_INTERRUPT = 8, FIXED_BITS = 11 };
enum { FIXED_SHIFT = 32 };
// Bits 21 and 32 to 63 are reserved.
#define SELECT_BITS 0xffdfffffull
// Event, unit mask, edge detect, invert and counter mask.
#define EVENT_BITS 0xff84ffffull
// The bits for the debug store and for a changed condition. They are always zero here, but clearing them does not
// fault.
#define CLEARABLE_ZERO_BITS (3ull << 62)
// All counters are frozen.
#define FROZEN (1ull << 59)
#define INTERRUPT_IN_USE (1ull << 63)

// The architectural events: cycles, instructions, branches and branch misses.
static const uint16_t events[] = {0x003c, 0x00c0, 0x00c4, 0x00c5};

static uint32_t version, general;
static uint64_t capabilities;
enum { HAS_FULL_WIDTH = 1 << 13 };

static uint32_t counter_register(uint32_t counter) {
    if (counter >= general) return FIXED + counter - general;
    return (capabilities & HAS_FULL_WIDTH ? FULL_WIDTH : COUNTER) + counter;
}
static uint64_t global_bit(uint32_t counter) {
    return 1ull << (counter < general ? counter : FIXED_SHIFT + counter - general);
}

static uint32_t fixed_control(uint32_t counter) { return read_msr(FIXED_CONTROL) >> 4 * (counter - general) & 15; }

static void select(uint32_t counter, uint64_t select) {
    if (counter < general) { write_msr(SELECT + counter, select); return; }
    uint64_t control = 0;
    if (select & SELECT_ON && select & SELECT_KERNEL) control |= FIXED_KERNEL;
    if (select & SELECT_ON && select & SELECT_USER) control |= FIXED_USER;
    if (select & SELECT_INTERRUPT) control |= FIXED_INTERRUPT;
    uint32_t shift = 4 * (counter - general);
    write_msr(FIXED_CONTROL, (read_msr(FIXED_CONTROL) & ~(15ull << shift)) | control << shift);
}

static int counts(uint32_t counter) {
    if (!(read_msr(GLOBAL_CONTROL) & global_bit(counter)) || read_msr(GLOBAL_STATUS) & FROZEN) return 0;
    if (counter >= general) return fixed_control(counter) & (FIXED_KERNEL | FIXED_USER);
    uint64_t select = read_msr(SELECT + counter);
    return (select & SELECT_ON) && (select & (SELECT_USER | SELECT_KERNEL));
}

static uint32_t rdpmc_counter(uint32_t index) {
    enum { FIXED_INDEX = 0x40000000 };
    if (index >= FIXED_INDEX) return index - FIXED_INDEX < pmu.fixed ? general + index - FIXED_INDEX : pmu.counters;
    return index < general ? index : pmu.counters;
}

static uint64_t fixed_control_bits(void) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < pmu.fixed; i++) bits |= (uint64_t)FIXED_BITS << 4 * i;
    return bits;
}

static uint64_t in_use(void) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) {
        uint64_t select = i < general ? read_msr(SELECT + i) : fixed_control(i);
        if (select & (i < general ? 0xff : FIXED_KERNEL | FIXED_USER)) bits |= global_bit(i);
        if (select & (i < general ? SELECT_INTERRUPT : FIXED_INTERRUPT)) bits |= INTERRUPT_IN_USE;
    }
    return bits;
}

// Rule for a counter that reads as `reads` after a write, or keeps its value if the write faults.
static struct rule counter_rule(uint32_t counter, uint64_t reads, int faults) {
    uint32_t alias = counter_register(counter);
    return (struct rule){COUNTS, faults, faults ? read_msr(alias) : reads & COUNTER_MASK, counter, alias};
}

static struct rule rule(uint32_t msr, uint64_t written) {
    uint64_t sign_extended = (uint64_t)(int32_t)written;
    if (msr - COUNTER < general) return counter_rule(msr - COUNTER, sign_extended, 0);
    if (msr - FULL_WIDTH < general && capabilities & HAS_FULL_WIDTH)
        return counter_rule(msr - FULL_WIDTH, written, (written & ~COUNTER_MASK) != 0);
    if (msr - FIXED < pmu.fixed) return counter_rule(general + msr - FIXED, written, 0);
    if (msr - SELECT < general) return plain(msr, written, ~SELECT_BITS);
    switch (msr) {
    case FIXED_CONTROL: return plain(msr, written, ~fixed_control_bits());
    case GLOBAL_STATUS: return (struct rule){.kind = STATUS, .faults = 1};
    case GLOBAL_CONTROL: return plain(msr, written, ~pmu.control_bits);
    case GLOBAL_STATUS_CLEAR:
        return (struct rule){.kind = CLEARS, .faults = (written & ~(pmu.status_bits | CLEARABLE_ZERO_BITS)) != 0};
    }
    if (version < 4) return absent();
    switch (msr) {
    case CAPABILITIES: return read_only(capabilities);
    case GLOBAL_STATUS_SET: return (struct rule){.kind = SETS, .faults = (written & ~pmu.status_bits) != 0};
    case GLOBAL_IN_USE: return read_only(in_use());
    default: return absent();
    }
}

void find_intel_pmu(void) {
    struct cpuid result = cpuid(0xa, 0);
    version = result.a & 0xff;
    general = result.a >> 8 & 0xff;
    capabilities = cpuid(1, 0).c >> 15 & 1 ? read_msr(CAPABILITIES) : 0;
    uint32_t fixed = result.d & 31;
    uint64_t all = (1ull << general) - 1;
    all |= ((1ull << fixed) - 1) << FIXED_SHIFT;
    pmu = (struct pmu){
        .counters = general + fixed,
        .fixed = fixed,
        .masks_lvt_on_interrupt = 1,
        .has_global_registers = 1,
        .global_status = GLOBAL_STATUS,
        .global_control = GLOBAL_CONTROL,
        .global_status_clear = GLOBAL_STATUS_CLEAR,
        .status_bits = version < 4 ? all : all | FROZEN,
        .control_bits = all,
        .select_bits = SELECT_BITS,
        .events = events,
        .event_count = sizeof events / sizeof *events,
        .event_bits = EVENT_BITS,
        .counter_register = counter_register,
        .global_bit = global_bit,
        .select = select,
        .counts = counts,
        .rdpmc_counter = rdpmc_counter,
        .rule = rule,
    };
}
