/*
 * The branch predictor and cache model of the lab CPUs for x86.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * Both are so simple that the exact number of mispredictions and misses of a
 * test program can be computed by hand.
 */
#ifndef LAB_PMU_MODEL_H
#define LAB_PMU_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "pmu-branch.h"

#define PMU_COND_ENTRIES     4096
#define PMU_INDIRECT_ENTRIES 512
#define PMU_RETURN_ENTRIES   32

#define PMU_LINE_BITS 6
#define PMU_WAYS      8
#define PMU_L1_SETS   64      /* 32 KiB */
#define PMU_L2_SETS   1024    /* 512 KiB */

typedef struct PMUCacheSet {
    uint64_t line[PMU_WAYS];  /* line number + 1, most recently used first */
} PMUCacheSet;

typedef struct PMUModel {
    uint8_t cond[PMU_COND_ENTRIES];             /* distance from "taken" */
    uint64_t indirect[PMU_INDIRECT_ENTRIES];    /* last target */
    uint64_t ret[PMU_RETURN_ENTRIES];           /* ring of return addresses */
    unsigned ret_top;
    PMUCacheSet l1[PMU_L1_SETS];
    PMUCacheSet l2[PMU_L2_SETS];
} PMUModel;

typedef enum PMUCacheOutcome {
    PMU_L1_HIT,
    PMU_L2_HIT,
    PMU_L2_MISS,
} PMUCacheOutcome;

/* Predicts a branch and trains the predictor. Returns true if it was wrong. */
bool pmu_model_mispredicted(PMUModel *m, X86PMUBranch kind, uint64_t ip,
                            uint64_t next_ip, uint64_t target);

/* Accesses a line. Returns where it was found; it is in both caches then. */
PMUCacheOutcome pmu_model_access(PMUModel *m, uint64_t line);

#endif
