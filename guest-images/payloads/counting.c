// The words that count and handle overflows, for the PMU of either vendor.

#include "pmu.h"

void find_pmu(void) {
    // The first four characters of "GenuineIntel".
    if (cpuid(0, 0).b == 0x756e6547) find_intel_pmu();
    else find_amd_pmu();
}

void count(const char *at, void (*loop)(uint32_t rounds)) {
    uint64_t select = parse_number64(&at);
    uint32_t rounds = parse_number(&at), counter = parse_number(&at);
    find_pmu();
    start_counter(counter, select, 0);
    loop(rounds);
    pmu.select(counter, 0);
    print("count "); print_decimal(rounds); put_char(' '); print_hex64(read_counter(counter)); put_char('\n');
}

// The ways in which `pmi` configures the delivery of overflows.
static const struct delivery {
    const char *name;
    uint32_t entry;
    enum { APIC_WORKS, APIC_OFF_BY_SOFTWARE, APIC_OFF_BY_BASE } apic;
    enum { ENABLED, DISABLED } interrupts;
    enum { UNMASKS, LEAVES_MASKED } handler;
} deliveries[] = {
    {"nmi", LVT_NMI, APIC_WORKS, ENABLED, UNMASKS},
    {"once", LVT_NMI, APIC_WORKS, ENABLED, LEAVES_MASKED},
    {"fixed", VECTOR_PMU, APIC_WORKS, ENABLED, UNMASKS},
    {"masked", LVT_NMI | LVT_MASKED, APIC_WORKS, ENABLED, UNMASKS},
    {"svr-off", LVT_NMI, APIC_OFF_BY_SOFTWARE, ENABLED, UNMASKS},
    {"apic-off", LVT_NMI, APIC_OFF_BY_BASE, ENABLED, UNMASKS},
    {"cli", VECTOR_PMU, APIC_WORKS, DISABLED, UNMASKS},
};

static struct {
    const struct delivery *delivery;
    uint32_t overflows, period, counters, others;
    uint64_t select, others_select;
    // What runs in user mode meanwhile, and its instructions in a round.
    void (*loop)(uint32_t rounds);
    uint32_t round;
} plan;
volatile uint32_t user_time;

// The lowest and the highest value seen.
struct range { uint32_t low, high; };
static const struct range NONE = {~0u, 0};
static void widen(struct range *range, uint32_t by) {
    if (by < range->low) range->low = by;
    if (by > range->high) range->high = by;
}
static void print_range(struct range range) {
    if (range.low > range.high) { put_char('-'); return; }
    print_decimal(range.low); print(".."); print_decimal(range.high);
}

// The results of each processor. `late` counts the interrupts that came after the measurement, once the APIC was
// enabled again.
static struct record {
    uint32_t interrupts, late, overflows, entry, status, left;
    struct range at, value;
} records[PROCESSORS];

// What is measured at the interrupts of counter 0 on the first processor: by how much it is late, in what the counter
// counts, or how long after the program's last look at the clock.
static uint32_t measured[4096], measured_count;

static uint32_t clock(void) {
    uint32_t low;
    __asm__ volatile("rdtsc" : "=a"(low) : : "edx");
    return low;
}

static void take_overflow(const struct frame *frame) {
    uint32_t now = plan.loop == clock_as_user ? clock() : 0;
    struct record *record = &records[this_processor()];
    record->interrupts++;
    widen(&record->at, frame->eip - (uint32_t)user_loop);
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (!(plan.counters >> i & 1)) continue;
        uint64_t value = read_counter(i);
        if (!has_overflowed(value)) continue;
        // Keeps the overflows one period apart: subtracts the events counted between the overflow and this handler.
        write_counter(i, (uint32_t)value % plan.period - (uint64_t)plan.period);
        record->overflows++;
        widen(&record->value, value >> 32 ? ~0u : (uint32_t)value);
        if (i || record != records || measured_count == sizeof measured / sizeof *measured) continue;
        uint32_t late = value >> 32 ? ~0u : (uint32_t)value;
        measured[measured_count++] = plan.loop == clock_as_user ? now - user_time : late;
    }
    if (pmu.has_global_registers) {
        uint64_t status = read_msr(pmu.global_status);
        record->status |= counters_in(status);
        write_msr(pmu.global_status_clear, status);
    }
    if (!pmu.masks_lvt_on_interrupt || plan.delivery->handler == LEAVES_MASKED) return;
    write_msr(pmu.global_control, pmu.control_bits);
    apic_write(APIC_LVT_PMU, plan.delivery->entry);
}

// Returns the counters that have overflowed and were not handled.
static uint32_t overflows_left(void) {
    if (pmu.has_global_registers) return counters_in(read_msr(pmu.global_status));
    uint32_t left = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) {
        if (plan.counters >> i & 1 && has_overflowed(read_counter(i))) left |= 1u << i;
    }
    return left;
}

// Writes the LVT entry before the APIC is disabled, because a disabled APIC masks its LVT entries.
static void prepare_apic(void) {
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_LVT_PMU, plan.delivery->entry);
    if (plan.delivery->apic == APIC_OFF_BY_SOFTWARE) apic_write(APIC_SPURIOUS, APIC_OFF);
    if (plan.delivery->apic == APIC_OFF_BY_BASE)
        write_msr(MSR_APIC_BASE, read_msr(MSR_APIC_BASE) & ~(uint64_t)APIC_BASE_ON);
}
static void enable_apic(void) {
    if (plan.delivery->apic == APIC_OFF_BY_BASE) write_msr(MSR_APIC_BASE, read_msr(MSR_APIC_BASE) | APIC_BASE_ON);
    apic_write(APIC_SPURIOUS, APIC_ON);
    records[this_processor()].entry = apic_read(APIC_LVT_PMU);
    apic_write(APIC_LVT_PMU, plan.delivery->entry & ~(uint32_t)LVT_MASKED);
}

static void overflow(void) {
    struct record *record = &records[this_processor()];
    *record = (struct record){.at = NONE, .value = NONE};
    enable_global_control();
    prepare_apic();
    for (uint32_t i = 0; i < pmu.counters; i++) {
        uint64_t select = plan.others >> i & 1 ? plan.others_select : plan.select;
        if (plan.counters >> i & 1) start_counter(i, select, -(uint64_t)plan.period);
    }
    if (plan.delivery->interrupts == ENABLED) __asm__ volatile("sti");
    plan.loop(plan.overflows * plan.period / plan.round + 1);
    __asm__ volatile("cli");
    stop_counters();
    record->left = overflows_left();

    uint32_t before = record->interrupts;
    enable_apic();
    wait_for_interrupts();
    record->late = record->interrupts - before;
    record->interrupts = before;
    apic_write(APIC_LVT_PMU, LVT_MASKED);
}

static void take_planned_overflows(const char *at) {
    const char *rest = 0;
    for (uint32_t i = 0; i < sizeof deliveries / sizeof *deliveries && !rest; i++) {
        plan.delivery = &deliveries[i];
        rest = match_argument(at, plan.delivery->name);
    }
    if (!rest) fail("pmi: there is no such delivery");
    plan.overflows = parse_number(&rest);
    plan.period = parse_number(&rest);
    plan.counters = parse_number(&rest);
    plan.select = parse_number64(&rest);
    plan.others = parse_number(&rest);
    plan.others_select = parse_number64(&rest);
    if (!plan.counters) plan.counters = 1;
    if (!plan.select) plan.select = SELECT_ON | SELECT_INTERRUPT | SELECT_USER | EVENT_INSTRUCTIONS;
    find_pmu();
    measured_count = 0;
    set_pmu_handler(take_overflow);
    on_all_processors(overflow);
    set_pmu_handler(no_pmu_interrupt);
}

void take_overflows(const char *at) {
    plan.loop = loop_as_user, plan.round = 2;
    take_planned_overflows(at);
    for (const struct record *record = records; record < records + processors(); record++) {
        print("pmi "); print_decimal(record->interrupts);
        print(" interrupts, "); print_decimal(record->overflows);
        print(" overflows, at "); print_range(record->at);
        print(", value "); print_range(record->value);
        print(", status "); print_hex(record->status, 2);
        print(", left "); print_hex(record->left, 2);
        print(", entry "); print_hex(record->entry, 8);
        print(", "); print_decimal(record->late); print(" late\n");
    }
}

// Prints how many were measured, the least, the median, the 99th percentile, and the most.
static void print_measured(const char *what) {
    uint32_t known = measured_count;
    for (uint32_t i = 1; i < known; i++) {
        uint32_t one = measured[i], place = i;
        for (; place && measured[place - 1] > one; place--) measured[place] = measured[place - 1];
        measured[place] = one;
    }
    print(what); print_decimal(known);
    if (known) {
        const uint32_t shown[] = {0, known / 2, known - 1 - known / 100, known - 1};
        for (uint32_t i = 0; i < 4; i++) { put_char(' '); print_decimal(measured[shown[i]]); }
    }
    put_char('\n');
}

void measure_lateness(const char *at) {
    plan.loop = loop_as_user, plan.round = 2;
    take_planned_overflows(at);
    print_measured("late ");
}

void measure_way(const char *at) {
    plan.loop = clock_as_user, plan.round = 4;
    take_planned_overflows(at);
    print_measured("way ");
}
