/*
 * How far the lab CPU's PMU misbehaves as those of processors do.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each field is a property of the processor by its name; 0, the default, is a
 * PMU without mistakes. README.md says of each what it imitates, and who saw
 * that.
 */
#ifndef I386_TCG_PMU_SILICON_H
#define I386_TCG_PMU_SILICON_H

#include <stdint.h>

typedef struct X86PMUSilicon {
    uint32_t seed;          /* of everything that is random below */

    uint32_t skid_least;    /* instructions from an overflow to its interrupt */
    uint32_t skid_most;
    uint32_t skid_tail;     /* the same, of one interrupt in 256 */

    uint32_t pmi_again;     /* one in so many interrupts comes twice */
    uint32_t pmi_at_exit;   /* one in so many comes right after an exit */

    uint32_t entry_tick;    /* instructions and branches that an entry counts */
    uint64_t status_junk;   /* reserved bits that read as set in the status */

    uint64_t random;        /* state; not a property */
} X86PMUSilicon;

#define X86_PMU_SILICON_PROPERTIES                                           \
    DEFINE_PROP_UINT32("silicon-seed", X86CPU, pmu_silicon.seed, 0),         \
    DEFINE_PROP_UINT32("skid-least", X86CPU, pmu_silicon.skid_least, 0),     \
    DEFINE_PROP_UINT32("skid-most", X86CPU, pmu_silicon.skid_most, 0),       \
    DEFINE_PROP_UINT32("skid-tail", X86CPU, pmu_silicon.skid_tail, 0),       \
    DEFINE_PROP_UINT32("pmi-again", X86CPU, pmu_silicon.pmi_again, 0),       \
    DEFINE_PROP_UINT32("pmi-at-exit", X86CPU, pmu_silicon.pmi_at_exit, 0),   \
    DEFINE_PROP_UINT32("entry-tick", X86CPU, pmu_silicon.entry_tick, 0),     \
    DEFINE_PROP_UINT64("status-junk", X86CPU, pmu_silicon.status_junk, 0)

#endif
