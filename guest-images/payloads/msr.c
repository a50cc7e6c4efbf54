// MSRs that must be there.

#include "payload.h"

uint64_t read_msr(uint32_t msr) {
    uint32_t value[2];
    if (!try_rdmsr(msr, value)) { print("rdmsr "); print_hex(msr, 8); fail(" fault"); }
    return (uint64_t)value[1] << 32 | value[0];
}
void write_msr(uint32_t msr, uint64_t value) {
    int worked = try_wrmsr(msr, (uint32_t)value, (uint32_t)(value >> 32));
    if (!worked) { print("wrmsr "); print_hex(msr, 8); fail(" fault"); }
}
