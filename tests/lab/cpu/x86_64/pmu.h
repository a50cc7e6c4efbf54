/*
 * The lab CPU's performance-monitoring unit: state and hooks.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * cpu.h includes this file, so it holds only what code outside the PMU needs.
 * Everything behind it is in pmu.c (registers, counting, overflow) and
 * pmu-model.c (branch predictor and caches).
 */
#ifndef I386_TCG_PMU_H
#define I386_TCG_PMU_H

#define X86_PMU_COUNTERS 6

/* What a branch was, as translated code reports it. */
typedef enum X86PMUBranch {
    X86_PMU_COND_NOT_TAKEN,
    X86_PMU_COND_TAKEN,
    X86_PMU_JMP,
    X86_PMU_CALL,
    X86_PMU_JMP_INDIRECT,
    X86_PMU_CALL_INDIRECT,
    X86_PMU_RET,
    X86_PMU_FAR,        /* far transfers, SYSCALL and its like, interrupts */
} X86PMUBranch;

typedef struct X86PMUCounter {
    uint64_t select;    /* PERF_CTL */
    uint64_t value;     /* PERF_CTR, 48 bits */

    /*
     * Cycles are numbered per counter, and only while it counts: an interrupt
     * between two user-mode branches does not part them for a counter that
     * counts user mode only.
     */
    uint64_t cycles;    /* cycles counted so far */
    uint64_t hit_cycle; /* the last cycle with an event */
    uint32_t hits;      /* events in that cycle */
    uint64_t true_cycle; /* the last cycle with at least CNT_MASK events */
    bool in_false_run;  /* inverted edge: this run has been counted */
} X86PMUCounter;

typedef struct X86PMU {
    X86PMUCounter counter[X86_PMU_COUNTERS];
    uint64_t global_off;    /* inverted PerfCntrGlobalCtl: all on at reset */
    uint64_t global_status;

    int64_t now;            /* the CPU's instruction total, accounted so far */
    uint64_t unretired;     /* of those, not retired; translated code adds */
    uint64_t unretired_seen;

    uint8_t enabled;        /* counters that are switched on */
    uint8_t running;        /* ... and count in the mode the CPU is in */

    /* The memory access seen last, to count an operand once per line. */
    int64_t access_cycle;
    uintptr_t access_site;
    uint64_t access_line[2];
} X86PMU;

#endif
