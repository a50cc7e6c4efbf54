// Words that do what a well-behaved guest would not: random writes to every PMU register, and endless overflows.

#include "pmu.h"

static uint32_t seed_of(uint32_t seed) { return (seed + 1 + this_processor()) * 0x9e3779b9u; }

// Marsaglia's xorshift. Every processor has its own state.
static uint32_t random32(uint32_t *state) {
    if (!*state) *state = 1;
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}
static uint64_t random64(uint32_t *state) {
    uint64_t high = random32(state);
    return high << 32 | random32(state);
}

static struct { uint32_t seed, count, period; } plan;
static volatile uint32_t interrupts[PROCESSORS];

static void count_interrupt(const struct frame *frame) {
    (void)frame;
    interrupts[this_processor()]++;
    if (pmu.masks_lvt_on_interrupt) apic_write(APIC_LVT_PMU, LVT_NMI);
}

static void run_on_all(void (*job)(void), void (*handler)(const struct frame *frame)) {
    find_pmu();
    set_pmu_handler(handler);
    on_all_processors(job);
    set_pmu_handler(no_pmu_interrupt);
}

static void enable_nmis(void) {
    interrupts[this_processor()] = 0;
    enable_global_control();
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_LVT_PMU, LVT_NMI);
}
static void disable_nmis(void) {
    stop_counters();
    wait_for_interrupts();
    apic_write(APIC_LVT_PMU, LVT_MASKED);
}

// ---- fuzz-msrs

enum { SURPRISES = 32 };

// The PMU registers of both vendors (a processor has those of one), and some others.
static const struct { uint32_t first, last; } ranges[] = {
    {0xc0010000, 0xc0010007}, {0xc0010200, 0xc001020b}, {0xc0000300, 0xc0000303},
    {0xc1, 0xc8}, {0x186, 0x18d}, {0x309, 0x30b}, {0x345, 0x345}, {0x38d, 0x392}, {0x3f1, 0x3f1}, {0x4c1, 0x4c8},
};
enum { RANGES = sizeof ranges / sizeof *ranges };

// Surprises are kept for the report. Of several in a row for the same register, only the first is kept.
static struct results {
    uint32_t writes, faults, surprises, kept;
    struct { uint32_t msr; uint64_t wrote, read; } surprise[SURPRISES];
} results[PROCESSORS];

// Returns the status bits of disabled counters, which only a write can change.
static uint64_t still_bits(void) {
    uint64_t bits = pmu.status_bits;
    for (uint32_t i = 0; i < pmu.counters; i++) if (pmu.counts(i)) bits &= ~pmu.global_bit(i);
    return bits;
}

// Returns whether the write, the read after it and the related registers behave as documented.
static int is_as_documented(struct rule rule, uint64_t wrote, int write_worked, int read_worked, uint64_t read) {
    if (write_worked == rule.faults || read_worked != (rule.kind != ABSENT)) return 0;
    switch (rule.kind) {
    case COUNTS:
        if (pmu.counts(rule.counter)) return read <= COUNTER_MASK && ((read - rule.reads) & COUNTER_MASK) < 1u << 31;
        return read == rule.reads && read == read_msr(rule.alias);
    case READS: return read == rule.reads && (!rule.alias || read == read_msr(rule.alias));
    case STATUS: return !(read & ~pmu.status_bits);
    case CLEARS: return read == 0 && (rule.faults || !(read_msr(pmu.global_status) & wrote & still_bits()));
    case SETS: return read == 0 && (rule.faults || !(~read_msr(pmu.global_status) & wrote & pmu.status_bits));
    default: return 1;
    }
}

static void surprise(uint32_t msr, uint64_t wrote, uint64_t read) {
    struct results *r = &results[this_processor()];
    r->surprises++;
    if (r->kept == SURPRISES || (r->kept && r->surprise[r->kept - 1].msr == msr)) return;
    r->surprise[r->kept].msr = msr;
    r->surprise[r->kept].wrote = wrote;
    r->surprise[r->kept++].read = read;
}

static void try_register(uint32_t msr, uint64_t value) {
    struct results *r = &results[this_processor()];
    uint32_t halves[2] = {0, 0};
    struct rule rule = pmu.rule(msr, value);
    int wrote = try_wrmsr(msr, (uint32_t)value, (uint32_t)(value >> 32));
    int read = try_rdmsr(msr, halves);
    uint64_t got = (uint64_t)halves[1] << 32 | halves[0];
    r->writes++;
    r->faults += !wrote;
    if (!is_as_documented(rule, value, wrote, read, got)) surprise(msr, value, got);
}

// Checks that RDPMC reads the same as RDMSR, and faults if there is no such counter.
static void try_rdpmc_of(uint32_t index) {
    uint32_t halves[2] = {0, 0}, counter = pmu.rdpmc_counter(index);
    int worked = try_rdpmc(index, halves);
    uint64_t got = (uint64_t)halves[1] << 32 | halves[0];
    if (counter >= pmu.counters) {
        if (worked) surprise(index, 0, got);
        return;
    }
    uint64_t wanted = read_counter(counter);
    uint32_t more = pmu.counts(counter) ? 1u << 31 : 1;
    if (!worked || ((wanted - got) & COUNTER_MASK) >= more) surprise(index, wanted, got);
}

static const uint64_t boundaries[] = {
    0, ~0ull, 0x7fffffff, 0xffffffff, COUNTER_MASK, COUNTER_MASK >> 1, COUNTER_MASK + 2, ~COUNTER_MASK, ~0ull >> 1,
};
enum { BITS = 64, BOUNDARIES = sizeof boundaries / sizeof *boundaries, SELECTS = 3 };
enum { PATTERNS = BITS + BOUNDARIES + SELECTS };

static uint64_t pattern(uint32_t i) {
    if (i < BITS) return 1ull << i;
    if (i < BITS + BOUNDARIES) return boundaries[i - BITS];
    const uint64_t selects[SELECTS] = {pmu.select_bits, ~pmu.select_bits, pmu.select_bits & ~(uint64_t)SELECT_ON};
    return selects[i - BITS - BOUNDARIES];
}

static void fuzz(void) {
    static const uint32_t indices[] = {
        0, 1, 2, 3, 4, 5, 6, 7, 0x40000000, 0x40000001, 0x40000002, 0x40000003, 0x80000000, 0xc0000000, 0xffffffff,
    };
    uint32_t random = seed_of(plan.seed);
    results[this_processor()] = (struct results){0};
    enable_nmis();
    for (uint32_t i = 0; i < RANGES; i++) {
        for (uint32_t msr = ranges[i].first; msr <= ranges[i].last; msr++) {
            for (uint32_t j = 0; j < PATTERNS; j++) try_register(msr, pattern(j));
        }
    }
    for (uint32_t i = 0; i < plan.count; i++) {
        uint32_t range = random32(&random) % RANGES, width = ranges[range].last - ranges[range].first + 1;
        uint64_t value = random64(&random);
        if (random32(&random) % 4 == 0) value = pattern(random32(&random) % PATTERNS);
        try_register(ranges[range].first + random32(&random) % width, value);
        try_rdpmc_of(indices[random32(&random) % (sizeof indices / sizeof *indices)]);
    }
    disable_nmis();
    enable_global_control();
}

void fuzz_msrs(const char *at) {
    plan.seed = parse_number(&at);
    plan.count = parse_number(&at);
    run_on_all(fuzz, count_interrupt);
    for (const struct results *r = results; r < results + processors(); r++) {
        for (uint32_t i = 0; i < r->kept; i++) {
            print("surprise "); print_hex(r->surprise[i].msr, 8); put_char(' '); print_hex64(r->surprise[i].wrote);
            put_char(' '); print_hex64(r->surprise[i].read); put_char('\n');
        }
        print("fuzz-msrs "); print_decimal(r->writes); print(" writes, "); print_decimal(r->faults); print(" faults, ");
        print_decimal(r->surprises); print(" surprises\n");
    }
}

// ---- flood

static uint32_t periods[PROCESSORS][16];

// The handler's own instructions count too, so the counters overflow again before it returns.
static void restart_counters(const struct frame *frame) {
    uint32_t processor = this_processor();
    count_interrupt(frame);
    if (plan.count && interrupts[processor] >= plan.count) { stop_counters(); return; }
    for (uint32_t i = 0; i < pmu.counters; i++) write_counter(i, -(uint64_t)periods[processor][i]);
}

static void overflow_everywhere(void) {
    uint32_t processor = this_processor(), random = seed_of(plan.seed);
    // All periods must be set first: the first counter interrupts before the others are started.
    for (uint32_t i = 0; i < pmu.counters; i++)
        periods[processor][i] = plan.period ? plan.period : random32(&random) % 16 + 1;
    enable_nmis();
    for (uint32_t i = 0; i < pmu.counters; i++) {
        start_counter(i, SELECT_ON | SELECT_INTERRUPT | SELECT_USER | SELECT_KERNEL | EVENT_INSTRUCTIONS,
                      -(uint64_t)periods[processor][i]);
    }
    while (!plan.count || interrupts[processor] < plan.count) {}
    disable_nmis();
}

void flood(const char *at) {
    plan.period = parse_number(&at);
    plan.count = parse_number(&at);
    run_on_all(overflow_everywhere, restart_counters);
    print("flood over\n");
}

// ---- rearm

// Interrupts are masked, so overflows come faster than with any handler.
static void overflow_while_masked(void) {
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_LVT_PMU, LVT_NMI | LVT_MASKED);
    start_counter(0, SELECT_ON | SELECT_INTERRUPT | SELECT_USER | SELECT_KERNEL | EVENT_INSTRUCTIONS, 0);
    for (uint32_t i = 0; !plan.count || i < plan.count; i++) write_counter(0, COUNTER_MASK);
    stop_counters();
}

void rearm(const char *at) {
    plan.count = parse_number(&at);
    run_on_all(overflow_while_masked, no_pmu_interrupt);
    print("rearm over\n");
}

// ---- reprogram

static void change_events(void) {
    uint32_t random = seed_of(plan.seed);
    enable_nmis();
    for (uint32_t i = 0; !plan.count || i < plan.count; i++) {
        uint64_t select = random64(&random);
        // Half of the selects have a known event and are enabled.
        if (random32(&random) % 2) {
            select = (select & ~pmu.event_bits) | pmu.events[random32(&random) % pmu.event_count];
            select |= SELECT_ON | SELECT_INTERRUPT;
        }
        start_counter(random32(&random) % pmu.counters, select & pmu.select_bits, -(uint64_t)(random32(&random) % 256));
    }
    disable_nmis();
}

void reprogram(const char *at) {
    plan.seed = parse_number(&at);
    plan.count = parse_number(&at);
    run_on_all(change_events, count_interrupt);
    for (uint32_t i = 0; i < processors(); i++) {
        print("reprogram "); print_decimal(plan.count); print(" changes, ");
        print_decimal(interrupts[i]); print(" interrupts\n");
    }
}
