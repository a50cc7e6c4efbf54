// The local APIC, with memory-mapped registers or, after `access_x2apic`, with MSRs (APM volume 2, chapter 16).

#include "payload.h"

static volatile enum { XAPIC, X2APIC } mode;

static volatile uint32_t *mmio_register(uint32_t offset) { return (volatile uint32_t *)(0xfee00000u + offset); }
static uint32_t msr_of(uint32_t offset) { return 0x800 + offset / 16; }

uint32_t apic_read(uint32_t offset) {
    return mode == XAPIC ? *mmio_register(offset) : (uint32_t)read_msr(msr_of(offset));
}
void apic_write(uint32_t offset, uint32_t value) {
    if (mode == XAPIC) *mmio_register(offset) = value;
    else write_msr(msr_of(offset), value);
}

void enable_x2apic(void) { write_msr(MSR_APIC_BASE, read_msr(MSR_APIC_BASE) | APIC_BASE_X2); }
void access_x2apic(void) { mode = X2APIC; }
