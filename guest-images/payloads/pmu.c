// The words that count and take overflows, on the PMU of either vendor.

#include "pmu.h"

struct pmu pmu;

void find_pmu(void) {
    // "Genu", of GenuineIntel.
    if (cpuid(0, 0).b == 0x756e6547) find_intel_pmu();
    else find_amd_pmu();
}

uint64_t get(uint32_t msr) {
    uint32_t value[2];
    if (!try_rdmsr(msr, value)) { say("rdmsr "); hex(msr, 8); give_up(" fault"); }
    return (uint64_t)value[1] << 32 | value[0];
}
void set(uint32_t msr, uint64_t value) {
    if (!try_wrmsr(msr, (uint32_t)value, (uint32_t)(value >> 32))) { say("wrmsr "); hex(msr, 8); give_up(" fault"); }
}

uint64_t read_counter(uint32_t counter) { return get(pmu.counter_register(counter)); }
// Not all registers have room for a sign.
void write_counter(uint32_t counter, uint64_t value) { set(pmu.counter_register(counter), value & COUNTER_MASK); }

void start_counter(uint32_t counter, uint64_t select, uint64_t value) {
    write_counter(counter, value);
    pmu.select(counter, select);
}
void stop_counters(void) {
    for (uint32_t i = 0; i < pmu.counters; i++) pmu.select(i, 0);
}
void open_global_registers(void) {
    if (!pmu.has_global_registers) return;
    set(pmu.global_status_clear, pmu.status_bits);
    set(pmu.global_control, pmu.control_bits);
}
uint32_t counters_in(uint64_t global) {
    uint32_t counters = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) if (global & pmu.global_bit(i)) counters |= 1u << i;
    return counters;
}
int has_overflowed(uint64_t value) { return !(value >> 47); }

void count(const char *at, void (*loop)(uint32_t rounds)) {
    uint64_t select = number64(&at);
    uint32_t rounds = number(&at), counter = number(&at);
    find_pmu();
    start_counter(counter, select, 0);
    loop(rounds);
    pmu.select(counter, 0);
    say("count "); decimal(rounds); put(' '); hex64(read_counter(counter)); put('\n');
}

// How `pmi` has overflows delivered.
static const struct delivery {
    const char *name;
    uint32_t entry;
    enum { APIC_WORKS, APIC_OFF_BY_SOFTWARE, APIC_OFF_BY_BASE } apic;
    enum { OPEN, CLOSED } interrupts;
    enum { OPENS_AGAIN, LEAVES_CLOSED } handler;
} deliveries[] = {
    {"nmi", LVT_NMI, APIC_WORKS, OPEN, OPENS_AGAIN},
    {"once", LVT_NMI, APIC_WORKS, OPEN, LEAVES_CLOSED},
    {"fixed", VECTOR_PMU, APIC_WORKS, OPEN, OPENS_AGAIN},
    {"masked", LVT_NMI | LVT_MASKED, APIC_WORKS, OPEN, OPENS_AGAIN},
    {"svr-off", LVT_NMI, APIC_OFF_BY_SOFTWARE, OPEN, OPENS_AGAIN},
    {"apic-off", LVT_NMI, APIC_OFF_BY_BASE, OPEN, OPENS_AGAIN},
    {"cli", VECTOR_PMU, APIC_WORKS, CLOSED, OPENS_AGAIN},
};

static struct {
    const struct delivery *how;
    uint32_t overflows, period, counters, others;
    uint64_t select, others_select;
} plan;

// The lowest and the highest number seen.
struct range { uint32_t low, high; };
static const struct range NONE = {~0u, 0};
static void widen(struct range *range, uint32_t by) {
    if (by < range->low) range->low = by;
    if (by > range->high) range->high = by;
}
static void say_range(struct range range) {
    if (range.low > range.high) { put('-'); return; }
    decimal(range.low); say(".."); decimal(range.high);
}

// What each processor saw. `late` are the interrupts after everything was over.
static struct record {
    uint32_t interrupts, late, overflows, entry, status, left;
    struct range at, value;
} records[PROCESSORS];

static void take_overflow(const struct frame *frame) {
    struct record *record = &records[this_processor()];
    record->interrupts++;
    widen(&record->at, frame->eip - (uint32_t)user_loop);
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (!(plan.counters >> i & 1)) continue;
        uint64_t value = read_counter(i);
        if (!has_overflowed(value)) continue;
        // The next one is due where it would be had this one been taken at once: processors take a few instructions to.
        write_counter(i, (uint32_t)value % plan.period - (uint64_t)plan.period);
        record->overflows++;
        widen(&record->value, value >> 32 ? ~0u : (uint32_t)value);
    }
    if (pmu.has_global_registers) {
        uint64_t status = get(pmu.global_status);
        record->status |= counters_in(status);
        set(pmu.global_status_clear, status);
    }
    if (!pmu.closes_behind_interrupts || plan.how->handler == LEAVES_CLOSED) return;
    set(pmu.global_control, pmu.control_bits);
    apic_write(APIC_LVT_PMU, plan.how->entry);
}

// Which counters have overflowed and were not looked after.
static uint32_t overflows_left(void) {
    if (pmu.has_global_registers) return counters_in(get(pmu.global_status));
    uint32_t left = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (plan.counters >> i & 1 && has_overflowed(read_counter(i))) left |= 1u << i;
    }
    return left;
}

// The local vector table's entry comes before the switch: a local APIC that is off masks it.
static void prepare_apic(void) {
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_LVT_PMU, plan.how->entry);
    if (plan.how->apic == APIC_OFF_BY_SOFTWARE) apic_write(APIC_SPURIOUS, APIC_OFF);
    if (plan.how->apic == APIC_OFF_BY_BASE) set(MSR_APIC_BASE, get(MSR_APIC_BASE) & ~(uint64_t)APIC_BASE_ON);
}
static void open_apic(void) {
    if (plan.how->apic == APIC_OFF_BY_BASE) set(MSR_APIC_BASE, get(MSR_APIC_BASE) | APIC_BASE_ON);
    apic_write(APIC_SPURIOUS, APIC_ON);
    records[this_processor()].entry = apic_read(APIC_LVT_PMU);
    apic_write(APIC_LVT_PMU, plan.how->entry & ~(uint32_t)LVT_MASKED);
}

static void overflow(void) {
    struct record *record = &records[this_processor()];
    *record = (struct record){.at = NONE, .value = NONE};
    open_global_registers();
    prepare_apic();
    for (uint32_t i = 0; i < pmu.counters; i++) {
        uint64_t select = plan.others >> i & 1 ? plan.others_select : plan.select;
        if (plan.counters >> i & 1) start_counter(i, select, -(uint64_t)plan.period);
    }
    if (plan.how->interrupts == OPEN) __asm__ volatile("sti");
    loop_as_user(plan.overflows * plan.period / 2 + 1);
    __asm__ volatile("cli");
    stop_counters();
    record->left = overflows_left();

    uint32_t before = record->interrupts;
    open_apic();
    settle();
    record->late = record->interrupts - before;
    record->interrupts = before;
    apic_write(APIC_LVT_PMU, LVT_MASKED);
}

void take_overflows(const char *at) {
    const char *rest = 0;
    for (uint32_t i = 0; i < sizeof deliveries / sizeof *deliveries && !rest; i++) {
        plan.how = &deliveries[i];
        rest = names(at, plan.how->name);
    }
    if (!rest) give_up("pmi: there is no such delivery");
    plan.overflows = number(&rest);
    plan.period = number(&rest);
    plan.counters = number(&rest);
    plan.select = number64(&rest);
    plan.others = number(&rest);
    plan.others_select = number64(&rest);
    if (!plan.counters) plan.counters = 1;
    if (!plan.select) plan.select = SELECT_ON | SELECT_INTERRUPT | SELECT_USER | EVENT_INSTRUCTIONS;
    find_pmu();
    set_pmu_handler(take_overflow);
    on_all(overflow);
    set_pmu_handler(no_pmu_interrupt);

    for (const struct record *record = records; record < records + processors(); record++) {
        say("pmi "); decimal(record->interrupts);
        say(" interrupts, "); decimal(record->overflows);
        say(" overflows, at "); say_range(record->at);
        say(", value "); say_range(record->value);
        say(", status "); hex(record->status, 2);
        say(", left "); hex(record->left, 2);
        say(", entry "); hex(record->entry, 8);
        say(", "); decimal(record->late); say(" late\n");
    }
}
