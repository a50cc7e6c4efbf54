// The local APIC, by way of memory or, after `use_x2apic`, of MSRs (APM volume 2, chapter 16).

#include "payload.h"

static volatile enum { IN_MEMORY, IN_MSRS } mode;

static volatile uint32_t *in_memory(uint32_t offset) { return (volatile uint32_t *)(0xfee00000u + offset); }
static uint32_t in_msrs(uint32_t offset) { return 0x800 + offset / 16; }

uint32_t apic_read(uint32_t offset) { return mode == IN_MEMORY ? *in_memory(offset) : (uint32_t)get(in_msrs(offset)); }
void apic_write(uint32_t offset, uint32_t value) {
    if (mode == IN_MEMORY) *in_memory(offset) = value;
    else set(in_msrs(offset), value);
}

static void switch_mode(void) { set(MSR_APIC_BASE, get(MSR_APIC_BASE) | APIC_BASE_X2); }

void use_x2apic(void) {
    on_all(switch_mode);
    mode = IN_MSRS;
}
