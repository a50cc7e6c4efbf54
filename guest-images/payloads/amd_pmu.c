// AMD's PMUs (APM volume 2, section 13.2): four K7 counters, six counters with PerfCtrExtCore, and PerfMonV2.

#include "pmu.h"

enum { K7 = 0xc0010000, K7_COUNTER = K7 + 4, CORE = 0xc0010200, CORE_COUNTER = CORE + 1 };
enum { GLOBAL_STATUS = 0xc0000300, GLOBAL_CONTROL, GLOBAL_STATUS_CLEAR, GLOBAL_STATUS_SET };
// Bits 19, 21, 36 to 39 and 42 to 63 are reserved. Writes to them are ignored (section 13.2.1).
#define SELECT_BITS 0x0000030fffd7ffffull
// The event select field has twelve bits in two parts.
#define EVENT_BITS 0xf000000ffull

static const uint16_t events[] = {0x76, 0xc0, 0xc2, 0xc3, 0xc4, 0xd1, 0x40, 0x60, 0x64};

static int has_core_registers;

static uint32_t select_register(uint32_t counter) { return has_core_registers ? CORE + 2 * counter : K7 + counter; }
static uint32_t counter_register(uint32_t counter) {
    return has_core_registers ? CORE_COUNTER + 2 * counter : K7_COUNTER + counter;
}
static uint64_t global_bit(uint32_t counter) { return 1ull << counter; }
static void select(uint32_t counter, uint64_t select) { write_msr(select_register(counter), select); }

static int counts(uint32_t counter) {
    uint64_t select = read_msr(select_register(counter));
    int allowed = !pmu.has_global_registers || read_msr(GLOBAL_CONTROL) & global_bit(counter);
    return allowed && (select & SELECT_ON) && (select & (SELECT_USER | SELECT_KERNEL));
}

static uint32_t rdpmc_counter(uint32_t index) { return index; }

static struct rule select_rule(uint32_t counter, uint64_t written) {
    if (counter >= pmu.counters) return absent();
    return (struct rule){.kind = READS, .reads = written & SELECT_BITS, .alias = select_register(counter)};
}
static struct rule counter_rule(uint32_t counter, uint64_t written) {
    if (counter >= pmu.counters) return absent();
    return (struct rule){
        .kind = COUNTS, .reads = written & COUNTER_MASK, .counter = counter, .alias = counter_register(counter)};
}

static struct rule rule(uint32_t msr, uint64_t written) {
    if (msr - K7 < 4) return select_rule(msr - K7, written);
    if (msr - K7_COUNTER < 4) return counter_rule(msr - K7_COUNTER, written);
    if (msr - CORE < 12 && has_core_registers) {
        uint32_t counter = (msr - CORE) / 2;
        return msr % 2 ? counter_rule(counter, written) : select_rule(counter, written);
    }
    if (!pmu.has_global_registers) return absent();
    switch (msr) {
    case GLOBAL_STATUS: return (struct rule){.kind = STATUS, .faults = 1};
    case GLOBAL_CONTROL: return (struct rule){.kind = READS, .reads = written & pmu.control_bits};
    case GLOBAL_STATUS_CLEAR: return (struct rule){.kind = CLEARS};
    case GLOBAL_STATUS_SET: return (struct rule){.kind = SETS};
    default: return absent();
    }
}

void find_amd_pmu(void) {
    enum { FEATURES = 0x80000001, EXTENSIONS = 0x80000022 };
    has_core_registers = cpuid(FEATURES, 0).c >> 23 & 1;
    struct cpuid extensions = {0, 0, 0, 0};
    if (cpuid(0x80000000, 0).a >= EXTENSIONS) extensions = cpuid(EXTENSIONS, 0);
    int has_global_registers = extensions.a & 1;
    uint32_t counters = has_global_registers ? extensions.b & 15 : has_core_registers ? 6 : 4;
    pmu = (struct pmu){
        .counters = counters,
        .has_global_registers = has_global_registers,
        .global_status = GLOBAL_STATUS,
        .global_control = GLOBAL_CONTROL,
        .global_status_clear = GLOBAL_STATUS_CLEAR,
        .status_bits = (1u << counters) - 1,
        .control_bits = (1u << counters) - 1,
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
