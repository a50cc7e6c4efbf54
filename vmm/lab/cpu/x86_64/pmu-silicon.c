/*
 * The lab CPU's silicon mode: when the interrupt of an overflow comes, if not
 * at the next instruction.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "qemu/osdep.h"
#include "cpu.h"
#include "silicon-timer.h"
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

    lab_silicon_delay(&cpu->pmu_silicon, env_cpu(env), &cpu->pmu_skid_timer,
                      skid_is_over, env);
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
