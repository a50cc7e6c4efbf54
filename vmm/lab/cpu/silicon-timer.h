/*
 * Silicon mode of the lab CPUs that are QEMU's: an interrupt that comes later.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Counters run on meanwhile, and software may stop or write them; the interrupt
 * comes all the same. An overflow while one is under way shares its interrupt,
 * as an interrupt controller has no memory of a second one.
 */
#ifndef LAB_SILICON_TIMER_H
#define LAB_SILICON_TIMER_H

#include "qemu/timer.h"
#include "sysemu/cpu-timers.h"
#include "silicon.h"

/* Has the interrupt come once its skid is over, or with one under way. */
static inline void lab_silicon_delay(LabSilicon *silicon, CPUState *cs,
                                     QEMUTimer **timer, QEMUTimerCB *deliver,
                                     void *env)
{
    uint32_t skid = lab_silicon_skid(silicon, cs->cpu_index);
    uint32_t can_do_io = cs->can_do_io;

    if (!*timer) {
        *timer = timer_new_ns(QEMU_CLOCK_VIRTUAL, deliver, env);
    }
    if (timer_pending(*timer)) {
        return;
    }
    /* The clock is exact where overflows are found. */
    cs->can_do_io = 1;
    timer_mod(*timer,
              qemu_clock_get_ns(QEMU_CLOCK_VIRTUAL) + icount_to_ns(skid));
    cs->can_do_io = can_do_io;
}

#endif
