/*
 * The lab CPU's silicon mode: when the interrupt of an overflow comes, if not
 * at the next instruction.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Counters run on meanwhile, and software may stop or write them; the interrupt
 * comes all the same. An overflow while one is under way shares its interrupt,
 * as the local APIC has no memory of a second one.
 */
#include "qemu/osdep.h"
#include "qemu/timer.h"
#include "cpu.h"
#include "sysemu/cpu-timers.h"
#include "pmu-event.h"

static bool one_in(CPUX86State *env, uint32_t n)
{
    return lab_silicon_one_in(&env_archcpu(env)->pmu_silicon,
                              env_cpu(env)->cpu_index, n);
}

static void skid_is_over(void *opaque);

/* Has the interrupt come once its skid is over, or with one under way. */
static void deliver_later(CPUX86State *env)
{
    X86CPU *cpu = env_archcpu(env);
    CPUState *cs = env_cpu(env);
    uint32_t can_do_io = cs->can_do_io;
    uint32_t skid = lab_silicon_skid(&cpu->pmu_silicon, cs->cpu_index);

    if (!cpu->pmu_skid_timer) {
        cpu->pmu_skid_timer =
            timer_new_ns(QEMU_CLOCK_VIRTUAL, skid_is_over, env);
    }
    if (timer_pending(cpu->pmu_skid_timer)) {
        return;
    }
    /* The clock is exact where overflows are found. */
    cs->can_do_io = 1;
    timer_mod(cpu->pmu_skid_timer,
              qemu_clock_get_ns(QEMU_CLOCK_VIRTUAL) + icount_to_ns(skid));
    cs->can_do_io = can_do_io;
}

static void deliver(CPUX86State *env)
{
    x86_pmu_deliver(env);
    if (one_in(env, env_archcpu(env)->pmu_silicon.pmi_again)) {
        deliver_later(env);
    }
}

static void skid_is_over(void *opaque)
{
    deliver(opaque);
}

/* A counter has overflowed whose interrupt is on. */
void x86_pmu_overflowed(CPUX86State *env)
{
    if (env_archcpu(env)->pmu_silicon.skid_most) {
        deliver_later(env);
    } else {
        deliver(env);
    }
}

/* An exit: an interrupt that is under way may come now. */
void x86_pmu_exited(CPUX86State *env)
{
    X86CPU *cpu = env_archcpu(env);

    if (cpu->pmu_skid_timer && timer_pending(cpu->pmu_skid_timer) &&
        one_in(env, cpu->pmu_silicon.pmi_at_exit)) {
        timer_del(cpu->pmu_skid_timer);
        deliver(env);
    }
}

/* The guest is entered, in the mode in which it goes on. */
void x86_pmu_entered(CPUX86State *env)
{
    uint32_t tick = env_archcpu(env)->pmu_silicon.entry_tick;

    if (tick && env->pmu.enabled) {
        x86_pmu_tick(env, tick);
    }
}
