/*
 * The lab CPU's performance-monitoring unit: state and hooks.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * cpu.h includes this file, so it has only what code outside the PMU needs. The
 * rest is in pmu.c (registers, counting, overflow), pmu-silicon.c (when overflow
 * interrupts come) and pmu-model.c (branch predictor and caches).
 */
#ifndef I386_TCG_PMU_H
#define I386_TCG_PMU_H

#include "pmu-branch.h"
#include "pmu-silicon.h"

#define X86_PMU_COUNTERS 6

typedef struct X86PMUCounter {
    uint64_t select;    /* PERF_CTL */
    uint64_t value;     /* PERF_CTR, 48 bits */

    /*
     * Cycles are numbered per counter, and only those in which it counts. So
     * two user-mode branches are in adjacent cycles for a counter of user mode,
     * even if an interrupt comes between them.
     */
    uint64_t cycles;    /* cycles counted so far */
    uint64_t hit_cycle; /* the last cycle with an event */
    uint32_t hits;      /* number of events in that cycle */
    uint64_t true_cycle; /* the last cycle with at least CNT_MASK events */
    bool in_false_run;  /* inverted edge: this run of cycles was counted */
} X86PMUCounter;

typedef struct X86PMU {
    X86PMUCounter counter[X86_PMU_COUNTERS];
    uint64_t global_off;    /* inverted PerfCntrGlobalCtl: 0 at reset, all on */
    uint64_t global_status;

    int64_t now;            /* number of the CPU's instructions accounted for */
    uint64_t unretired;     /* those not retired; added by translated code */
    uint64_t unretired_seen;

    uint8_t enabled;        /* mask of the enabled counters */
    uint8_t running;        /* those that count in the CPU's present mode */

    /* The last memory access, to count an operand once per line. */
    int64_t access_cycle;
    uintptr_t access_site;
    uint64_t access_line[2];
} X86PMU;

#endif
