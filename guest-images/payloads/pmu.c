// The PMU of this processor, and what is the same for either vendor's.

#include "pmu.h"

struct pmu pmu;

uint64_t read_counter(uint32_t counter) { return read_msr(pmu.counter_register(counter)); }
// Some registers fault if bits beyond the counter's width are set.
void write_counter(uint32_t counter, uint64_t value) { write_msr(pmu.counter_register(counter), value & COUNTER_MASK); }

void start_counter(uint32_t counter, uint64_t select, uint64_t value) {
    write_counter(counter, value);
    pmu.select(counter, select);
}
void stop_counters(void) {
    for (uint32_t i = 0; i < pmu.counters; i++) pmu.select(i, 0);
}
void enable_global_control(void) {
    if (!pmu.has_global_registers) return;
    write_msr(pmu.global_status_clear, pmu.status_bits);
    write_msr(pmu.global_control, pmu.control_bits);
}
uint32_t counters_in(uint64_t global) {
    uint32_t counters = 0;
    for (uint32_t i = 0; i < pmu.counters; i++) if (global & pmu.global_bit(i)) counters |= 1u << i;
    return counters;
}
int has_overflowed(uint64_t value) { return !(value >> 47); }
