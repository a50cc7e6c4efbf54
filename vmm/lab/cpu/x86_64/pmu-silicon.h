/*
 * The knobs of silicon mode as properties of the lab CPU; virtual NMIs are no
 * mistake, but some processors have them and some have not.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef I386_TCG_PMU_SILICON_H
#define I386_TCG_PMU_SILICON_H

#include "silicon.h"

#define X86_PMU_SILICON_PROPERTIES                                           \
    DEFINE_PROP_UINT32("silicon-seed", X86CPU, pmu_silicon.seed, 0),         \
    DEFINE_PROP_UINT32("skid-least", X86CPU, pmu_silicon.skid_least, 0),     \
    DEFINE_PROP_UINT32("skid-most", X86CPU, pmu_silicon.skid_most, 0),       \
    DEFINE_PROP_UINT32("skid-tail", X86CPU, pmu_silicon.skid_tail, 0),       \
    DEFINE_PROP_UINT32("pmi-again", X86CPU, pmu_silicon.pmi_again, 0),       \
    DEFINE_PROP_UINT32("pmi-at-exit", X86CPU, pmu_silicon.pmi_at_exit, 0),   \
    DEFINE_PROP_UINT32("entry-tick", X86CPU, pmu_silicon.entry_tick, 0),     \
    DEFINE_PROP_UINT64("status-junk", X86CPU, pmu_silicon.status_junk, 0),   \
    DEFINE_PROP_UINT32("virtual-nmi", X86CPU, virtual_nmi, 0)

#endif
