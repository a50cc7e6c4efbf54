/*
 * The branch predictor and cache model of the lab CPUs for x86.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * README.md describes both. A change here needs a change there, and in every
 * test that expects an exact number.
 */
#include "pmu-model.h"

#include <string.h>

/*
 * Two-bit counters: 0 and 1 predict taken, 2 and 3 not taken. An untrained
 * entry is 1, "weakly taken". Entries are stored XORed with 1, so a zeroed
 * model is an untrained one.
 */
#define COND_UNTRAINED 1

static bool predict_cond(PMUModel *m, uint64_t ip, bool taken)
{
    uint8_t *entry = &m->cond[ip % PMU_COND_ENTRIES];
    unsigned state = *entry ^ COND_UNTRAINED;
    bool wrong = taken != (state <= 1);

    if (taken && state > 0) {
        state--;
    } else if (!taken && state < 3) {
        state++;
    }
    *entry = state ^ COND_UNTRAINED;
    return wrong;
}

static bool predict_indirect(PMUModel *m, uint64_t ip, uint64_t target)
{
    uint64_t *entry = &m->indirect[ip % PMU_INDIRECT_ENTRIES];
    bool wrong = *entry != target;

    *entry = target;
    return wrong;
}

static void push_return(PMUModel *m, uint64_t ip)
{
    m->ret_top = (m->ret_top + 1) % PMU_RETURN_ENTRIES;
    m->ret[m->ret_top] = ip;
}

static bool predict_return(PMUModel *m, uint64_t target)
{
    bool wrong = m->ret[m->ret_top] != target;

    m->ret_top = (m->ret_top + PMU_RETURN_ENTRIES - 1) % PMU_RETURN_ENTRIES;
    return wrong;
}

bool pmu_model_mispredicted(PMUModel *m, X86PMUBranch kind, uint64_t ip,
                            uint64_t next_ip, uint64_t target)
{
    switch (kind) {
    case X86_PMU_COND_NOT_TAKEN:
        return predict_cond(m, ip, false);
    case X86_PMU_COND_TAKEN:
        return predict_cond(m, ip, true);
    case X86_PMU_CALL:
        push_return(m, next_ip);
        return false;
    case X86_PMU_JMP_INDIRECT:
        return predict_indirect(m, ip, target);
    case X86_PMU_CALL_INDIRECT:
        push_return(m, next_ip);
        return predict_indirect(m, ip, target);
    case X86_PMU_RET:
        return predict_return(m, target);
    case X86_PMU_JMP:
    case X86_PMU_FAR:
        break;
    }
    return false;
}

/* Looks a line up and makes it the most recently used one of its set. */
static bool touch(PMUCacheSet *set, uint64_t line)
{
    uint64_t tag = line + 1;
    int way = 0;
    bool hit;

    while (way < PMU_WAYS - 1 && set->line[way] != tag) {
        way++;
    }
    hit = set->line[way] == tag;
    memmove(&set->line[1], &set->line[0], way * sizeof(set->line[0]));
    set->line[0] = tag;
    return hit;
}

PMUCacheOutcome pmu_model_access(PMUModel *m, uint64_t line)
{
    if (touch(&m->l1[line % PMU_L1_SETS], line)) {
        return PMU_L1_HIT;
    }
    return touch(&m->l2[line % PMU_L2_SETS], line) ? PMU_L2_HIT : PMU_L2_MISS;
}
