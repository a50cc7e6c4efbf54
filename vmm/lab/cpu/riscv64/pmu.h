/*
 * The RISC-V lab CPU's performance-monitoring unit: events and hooks.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef RISCV_PMU_H
#define RISCV_PMU_H

#include "cpu.h"

/* Events of mhpmevent: the SBI's numbers, and one more. */
#define RISCV_PMU_EVENT_MASK           0xfffff
#define RISCV_PMU_CYCLES               0x1
#define RISCV_PMU_INSTRUCTIONS         0x2
#define RISCV_PMU_BRANCHES             0x5
#define RISCV_PMU_CONDITIONAL_BRANCHES 0x15
#define RISCV_PMU_DTLB_READ_MISS       0x10019
#define RISCV_PMU_DTLB_WRITE_MISS      0x1001b
#define RISCV_PMU_ITLB_READ_MISS       0x10021
/* The numbers that are raw events as well. */
#define RISCV_PMU_RAW_MASK             0xff

void riscv_pmu_init(RISCVCPU *cpu, int counters);
void riscv_pmu_timer_cb(void *opaque);
void riscv_pmu_generate_fdt_node(void *fdt, int counters, char *node);

/* Register accesses. */
uint64_t riscv_pmu_read(CPURISCVState *env, int i);
void riscv_pmu_write(CPURISCVState *env, int i, uint64_t value);
uint64_t riscv_pmu_read_event(CPURISCVState *env, int i);
void riscv_pmu_write_event(CPURISCVState *env, int i, uint64_t value);
void riscv_pmu_inhibit(CPURISCVState *env, uint32_t inhibited);

/* To be called when the privilege mode or the virtualisation mode has changed. */
void riscv_pmu_mode_changed(CPURISCVState *env);
/* To be called when an event happens that is not an instruction. */
void riscv_pmu_count(CPURISCVState *env, uint32_t event);

#endif
