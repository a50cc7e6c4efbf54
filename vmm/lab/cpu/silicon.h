/*
 * Silicon mode: how far the PMU of a lab CPU misbehaves, as those of real
 * processors do.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * 0, the default of each knob, is a PMU without that mistake. README.md says of
 * each what it imitates, who saw that, and which of the lab CPUs has it.
 */
#ifndef LAB_SILICON_H
#define LAB_SILICON_H

#include <stdbool.h>
#include <stdint.h>

typedef struct LabSilicon {
    uint32_t seed;          /* of everything that is random below */

    uint32_t skid_least;    /* instructions from an overflow to its interrupt */
    uint32_t skid_most;
    uint32_t skid_tail;     /* the same, of one interrupt in 256 */

    uint32_t pmi_again;     /* one in so many interrupts comes twice */
    uint32_t pmi_at_exit;   /* one in so many comes right after an exit */
    uint32_t pmi_lost;      /* one in so many does not come */

    uint32_t entry_tick;    /* instructions and branches that an entry counts */
    uint32_t interrupt_branch; /* branches that an interrupt counts */
    uint32_t cond_changed;  /* one in so many interrupts finds CondChgd set */
    uint64_t status_junk;   /* reserved bits that read as set in the status */

    uint64_t random;        /* state; not a knob */
} LabSilicon;

/* One interrupt in so many has the long tail's skid. */
enum { LAB_SILICON_TAIL_EVERY = 256 };

/* xorshift64*: the same seed and the same program have the same mistakes. */
static inline uint32_t lab_silicon_draw(LabSilicon *s, unsigned cpu)
{
    if (!s->random) {
        s->random = (s->seed + UINT64_C(1)) * UINT64_C(0x9e3779b97f4a7c15) + cpu;
    }
    s->random ^= s->random >> 12;
    s->random ^= s->random << 25;
    s->random ^= s->random >> 27;
    return (uint32_t)(s->random * UINT64_C(0x2545f4914f6cdd1d) >> 32);
}

static inline bool lab_silicon_one_in(LabSilicon *s, unsigned cpu, uint32_t n)
{
    return n && lab_silicon_draw(s, cpu) % n == 0;
}

/* Returns how late the next interrupt is, in instructions. */
static inline uint32_t lab_silicon_skid(LabSilicon *s, unsigned cpu)
{
    uint32_t least = s->skid_least, most = s->skid_most;

    if (s->skid_tail > most &&
        lab_silicon_one_in(s, cpu, LAB_SILICON_TAIL_EVERY)) {
        least = most;
        most = s->skid_tail;
    }
    return least + lab_silicon_draw(s, cpu) %
                       ((most > least ? most : least) - least + 1);
}

#endif
