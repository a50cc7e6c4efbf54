// An AMD PMU (APM volume 2, section 13.2): its registers, and the words that count and take overflows.

#include "payload.h"

enum { K7_SELECT = 0xc0010000, K7_COUNTER = 0xc0010004, CORE_SELECT = 0xc0010200, CORE_COUNTER = 0xc0010201 };

struct pmu pmu;

void find_pmu(void) {
    uint32_t leaves = 0x80000000, features = 0x80000001, extensions = 0x80000022, b, c = 0, d;
    __asm__("cpuid" : "+a"(leaves), "=b"(b), "+c"(c), "=d"(d));
    __asm__("cpuid" : "+a"(features), "=b"(b), "=c"(c), "=d"(d));
    pmu.has_core_registers = c >> 23 & 1;
    pmu.counters = pmu.has_core_registers ? 6 : 4;
    if (leaves < 0x80000022) return;
    c = 0;
    __asm__("cpuid" : "+a"(extensions), "=b"(b), "+c"(c), "=d"(d));
    pmu.has_global_registers = extensions & 1;
    if (pmu.has_global_registers) pmu.counters = b & 15;
}

uint32_t select_register(uint32_t counter) {
    return pmu.has_core_registers ? CORE_SELECT + 2 * counter : K7_SELECT + counter;
}
uint32_t counter_register(uint32_t counter) {
    return pmu.has_core_registers ? CORE_COUNTER + 2 * counter : K7_COUNTER + counter;
}

uint64_t get(uint32_t msr) {
    uint32_t value[2];
    if (!try_rdmsr(msr, value)) { say("rdmsr "); hex(msr, 8); give_up(" fault"); }
    return (uint64_t)value[1] << 32 | value[0];
}
void set(uint32_t msr, uint64_t value) {
    if (!try_wrmsr(msr, (uint32_t)value, (uint32_t)(value >> 32))) { say("wrmsr "); hex(msr, 8); give_up(" fault"); }
}

void start_counter(uint32_t counter, uint64_t select, uint64_t value) {
    set(counter_register(counter), value);
    set(select_register(counter), select);
}
void stop_counters(void) {
    for (uint32_t i = 0; i < pmu.counters; i++) set(select_register(i), 0);
}
int has_overflowed(uint64_t value) { return !(value >> 47); }

void count(const char *at, void (*loop)(uint32_t rounds)) {
    uint64_t select = number64(&at);
    uint32_t rounds = number(&at), counter = number(&at);
    find_pmu();
    start_counter(counter, select, 0);
    loop(rounds);
    set(select_register(counter), 0);
    say("count "); decimal(rounds); put(' '); hex64(get(counter_register(counter))); put('\n');
}

// How `pmi` has overflows delivered.
static const struct delivery {
    const char *name;
    uint32_t entry;
    enum { APIC_WORKS, APIC_OFF_BY_SOFTWARE, APIC_OFF_BY_BASE } apic;
    enum { OPEN, CLOSED } interrupts;
} deliveries[] = {
    {"nmi", LVT_NMI, APIC_WORKS, OPEN},
    {"fixed", VECTOR_PMU, APIC_WORKS, OPEN},
    {"masked", LVT_NMI | LVT_MASKED, APIC_WORKS, OPEN},
    {"svr-off", LVT_NMI, APIC_OFF_BY_SOFTWARE, OPEN},
    {"apic-off", LVT_NMI, APIC_OFF_BY_BASE, OPEN},
    {"cli", VECTOR_PMU, APIC_WORKS, CLOSED},
};

static struct { const struct delivery *how; uint32_t overflows, period, counters; uint64_t select; } plan;

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
    uint32_t interrupts, late, overflows, entry;
    struct range at, value;
    uint64_t status, left;
} records[PROCESSORS];

static void take_overflow(const struct frame *frame) {
    struct record *record = &records[this_processor()];
    record->interrupts++;
    widen(&record->at, frame->eip - (uint32_t)user_loop);
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (!(plan.counters >> i & 1)) continue;
        uint64_t value = get(counter_register(i));
        if (!has_overflowed(value)) continue;
        set(counter_register(i), -(uint64_t)plan.period);
        record->overflows++;
        widen(&record->value, value >> 32 ? ~0u : (uint32_t)value);
    }
    if (!pmu.has_global_registers) return;
    uint64_t status = get(GLOBAL_STATUS);
    record->status |= status;
    set(GLOBAL_STATUS_CLEAR, status);
}

// Which counters have overflowed and were not looked after.
static uint64_t overflows_left(void) {
    if (pmu.has_global_registers) return get(GLOBAL_STATUS);
    uint64_t left = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (plan.counters >> i & 1 && has_overflowed(get(counter_register(i)))) left |= 1u << i;
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
    if (pmu.has_global_registers) set(GLOBAL_STATUS_CLEAR, ~0ull);
    prepare_apic();
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (plan.counters >> i & 1) start_counter(i, plan.select, -(uint64_t)plan.period);
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
        say(", status "); hex((uint32_t)record->status, 2);
        say(", left "); hex((uint32_t)record->left, 2);
        say(", entry "); hex(record->entry, 8);
        say(", "); decimal(record->late); say(" late\n");
    }
}
