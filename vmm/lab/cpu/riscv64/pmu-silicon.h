/*
 * The knobs of silicon mode as properties of the RISC-V lab CPU.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef RISCV_PMU_SILICON_H
#define RISCV_PMU_SILICON_H

#include "silicon.h"

#define RISCV_PMU_SILICON_PROPERTIES                                         \
    DEFINE_PROP_UINT32("silicon-seed", RISCVCPU, pmu_silicon.seed, 0),       \
    DEFINE_PROP_UINT32("skid-least", RISCVCPU, pmu_silicon.skid_least, 0),   \
    DEFINE_PROP_UINT32("skid-most", RISCVCPU, pmu_silicon.skid_most, 0),     \
    DEFINE_PROP_UINT32("skid-tail", RISCVCPU, pmu_silicon.skid_tail, 0),     \
    DEFINE_PROP_UINT32("pmi-lost", RISCVCPU, pmu_silicon.pmi_lost, 0)

#endif
