/*
 * The lab CPU's performance events: what a PERF_CTL register selects.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * All functions depend on the register's value only. README.md has a table of
 * the events.
 */
#ifndef I386_TCG_PMU_EVENT_H
#define I386_TCG_PMU_EVENT_H

#include "cpu.h"
#include "pmu-model.h"

/* PERF_CTL (APM 13.2.1) */
#define SEL_USR        (1ull << 16)
#define SEL_OS         (1ull << 17)
#define SEL_EDGE       (1ull << 18)
#define SEL_INT        (1ull << 20)
#define SEL_EN         (1ull << 22)
#define SEL_INV        (1ull << 23)
#define SEL_GUEST_ONLY (1ull << 40)
#define SEL_HOST_ONLY  (1ull << 41)
/* Reserved bits read as zero whatever is written. */
#define SEL_VALID      (0xffffull | SEL_USR | SEL_OS | SEL_EDGE | SEL_INT | \
                        SEL_EN | SEL_INV | 0xffull << 24 | 0xfull << 32 |   \
                        SEL_GUEST_ONLY | SEL_HOST_ONLY)

typedef enum EventClass {
    CLASS_NONE,         /* not implemented: never counts */
    CLASS_CYCLES,
    CLASS_INSTRUCTIONS,
    CLASS_BRANCH,       /* reported by translated branches */
    CLASS_MEMORY,       /* reported for data accesses */
} EventClass;

static inline unsigned event_of(uint64_t select)
{
    return (select & 0xff) | (select >> 24 & 0xf00);
}

static inline unsigned unit_mask_of(uint64_t select)
{
    return select >> 8 & 0xff;
}

static inline unsigned count_mask_of(uint64_t select)
{
    return select >> 24 & 0xff;
}

/* INV inverts the comparison with CNT_MASK, so it has no effect without it. */
static inline bool inverted(uint64_t select)
{
    return (select & SEL_INV) && count_mask_of(select);
}

static inline EventClass class_of(uint64_t select)
{
    switch (event_of(select)) {
    case 0x76:
        return CLASS_CYCLES;
    case 0xc0:
        return CLASS_INSTRUCTIONS;
    case 0xc2:
    case 0xc3:
    case 0xc4:
    case 0xd1:
        return CLASS_BRANCH;
    case 0x40:
    case 0x60:
    case 0x64:
        return CLASS_MEMORY;
    default:
        return CLASS_NONE;
    }
}

static inline bool branch_matches(uint64_t select, X86PMUBranch kind,
                                  bool mispredicted)
{
    switch (event_of(select)) {
    case 0xc2:
        return true;
    case 0xc3:
        return mispredicted;
    case 0xc4:
        return kind != X86_PMU_COND_NOT_TAKEN;
    case 0xd1:
        return kind == X86_PMU_COND_NOT_TAKEN || kind == X86_PMU_COND_TAKEN;
    default:
        return false;
    }
}

/* The unit masks are from the PPR for family 17h; see README.md. */
static inline bool access_matches(uint64_t select, PMUCacheOutcome outcome,
                                  bool store)
{
    unsigned mask = 0;

    switch (event_of(select)) {
    case 0x40:
        return true;
    case 0x60:
        if (outcome != PMU_L1_HIT) {
            mask = store ? 0x40 : 0x80;
        }
        break;
    case 0x64:
        if (outcome == PMU_L2_MISS) {
            mask = 0x08;
        } else if (outcome == PMU_L2_HIT) {
            mask = store ? 0x10 : 0x40;
        }
        break;
    }
    return unit_mask_of(select) & mask;
}

/* Returns true if an enabled counter counts in the mode of these hflags. */
static inline bool filter_passes(uint64_t select, uint32_t hflags)
{
    uint64_t restriction = select & (SEL_GUEST_ONLY | SEL_HOST_ONLY);

    if (!(select & (hflags & HF_CPL_MASK ? SEL_USR : SEL_OS))) {
        return false;
    }
    if (!restriction || restriction == (SEL_GUEST_ONLY | SEL_HOST_ONLY)) {
        return true;
    }
    /* As hardware does: with EFER.SVME clear, either bit stops the counter. */
    if (!(hflags & HF_SVME_MASK)) {
        return false;
    }
    return restriction == (hflags & HF_GUEST_MASK ? SEL_GUEST_ONLY
                                                  : SEL_HOST_ONLY);
}

#endif
