/*
 * The RISC-V lab CPU's performance-monitoring unit: registers, counting,
 * overflow. It replaces QEMU's own.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * As in the x86-64 PMU, counting cycles and instructions has no cost:
 * account() adds the instructions that icount has counted when a register is
 * accessed or the mode that filters counters changes. Branches are reported by
 * helper calls, which are translated only while a counter selects branches.
 *
 * Manual: RISC-V Privileged Architecture, "Machine-Level CSRs" (mcountinhibit,
 * mhpmcounter) and "Sscofpmf".
 */
#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "cpu.h"
#include "pmu.h"
#include "silicon-timer.h"
#include "exec/exec-all.h"
#include "exec/helper-proto.h"
#include "sysemu/cpu-timers.h"
#include "sysemu/device_tree.h"

/* mcycle and minstret have fixed events, count in all modes, never interrupt. */
#define CYCLE   0
#define INSTRET 2
#define FIRST   3

static uint32_t event_of(CPURISCVState *env, int i)
{
    switch (i) {
    case CYCLE:
        return RISCV_PMU_CYCLES;
    case INSTRET:
        return RISCV_PMU_INSTRUCTIONS;
    default:
        return env->mhpmevent_val[i] & RISCV_PMU_EVENT_MASK;
    }
}

/* Each instruction takes a cycle. All are counted, also those that fault. */
static bool counts_instructions(uint32_t event)
{
    return event == RISCV_PMU_CYCLES || event == RISCV_PMU_INSTRUCTIONS;
}

static bool counts_branches(uint32_t event)
{
    return event == RISCV_PMU_BRANCHES ||
           event == RISCV_PMU_CONDITIONAL_BRANCHES;
}

/* Returns the bit of mhpmevent that excludes the CPU's present mode. */
static uint64_t inhibit_bit(CPURISCVState *env)
{
    bool virt = riscv_cpu_virt_enabled(env);

    switch (env->priv) {
    case PRV_M:
        return MHPMEVENT_BIT_MINH;
    case PRV_S:
        return virt ? MHPMEVENT_BIT_VSINH : MHPMEVENT_BIT_SINH;
    default:
        return virt ? MHPMEVENT_BIT_VUINH : MHPMEVENT_BIT_UINH;
    }
}

/*
 * Raises the overflow interrupt, which is taken before the next instruction.
 * icount requires that only the last instruction of a block raises interrupts,
 * so that their time is exact. Every caller is at such an instruction or
 * outside of a block, except for a TLB miss.
 */
static void raise_overflow(CPURISCVState *env)
{
    CPUState *cs = env_cpu(env);
    uint32_t can_do_io = cs->can_do_io;

    cs->can_do_io = 1;
    riscv_cpu_update_mip(env_archcpu(env), MIP_LCOFIP, MIP_LCOFIP);
    cs->can_do_io = can_do_io;
}

static void skid_is_over(void *opaque)
{
    raise_overflow(opaque);
}

/*
 * A counter has overflowed. In silicon mode its interrupt may come later, or
 * with one that is under way, or not at all.
 */
static void overflowed(CPURISCVState *env)
{
    RISCVCPU *cpu = env_archcpu(env);
    CPUState *cs = env_cpu(env);
    LabSilicon *silicon = &cpu->pmu_silicon;

    if (lab_silicon_one_in(silicon, cs->cpu_index, silicon->pmi_lost)) {
        return;
    }
    if (silicon->skid_most) {
        lab_silicon_delay(silicon, cs, &cpu->pmu_skid_timer, skid_is_over, env);
    } else {
        raise_overflow(env);
    }
}

static void add(CPURISCVState *env, int i, uint64_t n)
{
    PMUCTRState *counter = &env->pmu_ctrs[i];
    uint64_t before = counter->mhpmcounter_val;

    counter->mhpmcounter_val = before + n;
    if (counter->mhpmcounter_val < before && i >= FIRST &&
        env_archcpu(env)->cfg.ext_sscofpmf &&
        !(env->mhpmevent_val[i] & MHPMEVENT_BIT_OF)) {
        env->mhpmevent_val[i] |= MHPMEVENT_BIT_OF;
        overflowed(env);
    }
}

/* Adds this CPU's instructions up to number `now` to the counters. */
static void account_to(CPURISCVState *env, int64_t now)
{
    int64_t cycles = now - env->pmu_now;
    int i;

    if (cycles <= 0) {
        return;
    }
    env->pmu_now = now;
    for (i = 0; i < RV_MAX_MHPMCOUNTERS; i++) {
        if ((env->pmu_running & BIT(i)) &&
            counts_instructions(event_of(env, i))) {
            add(env, i, cycles);
        }
    }
}

static void account(CPURISCVState *env)
{
    account_to(env, icount_get_cpu_total(env_cpu(env)));
}

/* Counts a branch, which is the last instruction of its block. */
void helper_pmu_branch(CPURISCVState *env, uint32_t is_conditional)
{
    int i;

    account_to(env, icount_get_cpu_total(env_cpu(env)) - 1);
    for (i = FIRST; i < RV_MAX_MHPMCOUNTERS; i++) {
        uint32_t event = event_of(env, i);

        if ((env->pmu_running & BIT(i)) &&
            (event == RISCV_PMU_BRANCHES ||
             (event == RISCV_PMU_CONDITIONAL_BRANCHES && is_conditional))) {
            add(env, i, 1);
        }
    }
}

/* Counts a miss of the simulation's TLB. */
void riscv_pmu_count(CPURISCVState *env, uint32_t event)
{
    int i;

    for (i = FIRST; i < RV_MAX_MHPMCOUNTERS; i++) {
        if ((env->pmu_running & BIT(i)) && event_of(env, i) == event) {
            add(env, i, 1);
        }
    }
}

/*
 * Sets the timer for the next overflow of a counter of account(). Such a
 * counter adds at most one per cycle, so it cannot overflow before the timer
 * fires. If it has not overflowed by then (other CPUs ran meanwhile), the timer
 * is set again.
 */
static void arm_timer(CPURISCVState *env)
{
    RISCVCPU *cpu = env_archcpu(env);
    CPUState *cs = env_cpu(env);
    uint32_t can_do_io = cs->can_do_io;
    uint64_t left = UINT64_MAX;
    int i;

    if (!cpu->pmu_timer) {
        return;
    }
    for (i = FIRST; i < RV_MAX_MHPMCOUNTERS; i++) {
        if ((env->pmu_running & BIT(i)) &&
            counts_instructions(event_of(env, i)) &&
            !(env->mhpmevent_val[i] & MHPMEVENT_BIT_OF)) {
            left = MIN(left, UINT64_MAX - env->pmu_ctrs[i].mhpmcounter_val);
        }
    }
    /* An overflow that is more than a day away needs no timer. */
    if (left >= 1ull << 47) {
        timer_del(cpu->pmu_timer);
        return;
    }
    /* The clock is exact here; see raise_overflow(). */
    cs->can_do_io = 1;
    timer_mod(cpu->pmu_timer, qemu_clock_get_ns(QEMU_CLOCK_VIRTUAL) +
                              icount_to_ns(left + 1));
    cs->can_do_io = can_do_io;
}

void riscv_pmu_timer_cb(void *opaque)
{
    CPURISCVState *env = &RISCV_CPU(opaque)->env;

    account(env);
    arm_timer(env);
}

static void update_running(CPURISCVState *env)
{
    uint64_t inhibit = inhibit_bit(env);
    int i;

    env->pmu_running = 0;
    env->pmu_counts_branches = false;
    for (i = 0; i < RV_MAX_MHPMCOUNTERS; i++) {
        if (!(env->pmu_enabled & BIT(i)) ||
            (i >= FIRST && (env->mhpmevent_val[i] & inhibit))) {
            continue;
        }
        env->pmu_running |= BIT(i);
        env->pmu_counts_branches |= counts_branches(event_of(env, i));
    }
}

/* Computes which counters are enabled, after a register has changed. */
static void apply_controls(CPURISCVState *env)
{
    int i;

    if (!icount_enabled()) {
        warn_report_once("the lab CPU's counters stand still without "
                         "-icount shift=0,sleep=off");
        return;
    }
    env->pmu_enabled = ~env->mcountinhibit & (BIT(CYCLE) | BIT(INSTRET));
    for (i = FIRST; i < RV_MAX_MHPMCOUNTERS; i++) {
        if (!(env->mcountinhibit & BIT(i)) && event_of(env, i)) {
            env->pmu_enabled |= BIT(i);
        }
    }
    update_running(env);
    arm_timer(env);
}

void riscv_pmu_mode_changed(CPURISCVState *env)
{
    uint32_t before = env->pmu_running;

    if (!env->pmu_enabled) {
        return;
    }
    account(env);
    update_running(env);
    if (env->pmu_running != before) {
        arm_timer(env);
    }
}

uint64_t riscv_pmu_read(CPURISCVState *env, int i)
{
    account(env);
    return env->pmu_ctrs[i].mhpmcounter_val;
}

void riscv_pmu_write(CPURISCVState *env, int i, uint64_t value)
{
    account(env);
    env->pmu_ctrs[i].mhpmcounter_val = value;
    arm_timer(env);
}

uint64_t riscv_pmu_read_event(CPURISCVState *env, int i)
{
    account(env);
    return env->mhpmevent_val[i];
}

void riscv_pmu_write_event(CPURISCVState *env, int i, uint64_t value)
{
    account(env);
    env->mhpmevent_val[i] = value;
    apply_controls(env);
}

void riscv_pmu_inhibit(CPURISCVState *env, uint32_t inhibited)
{
    account(env);
    env->mcountinhibit = inhibited;
    apply_controls(env);
}

void riscv_pmu_init(RISCVCPU *cpu, int counters)
{
    cpu->pmu_avail_ctrs = MAKE_64BIT_MASK(FIRST, counters);
    if (cpu->cfg.ext_sscofpmf) {
        cpu->pmu_timer = timer_new_ns(QEMU_CLOCK_VIRTUAL, riscv_pmu_timer_cb,
                                      cpu);
    }
}

/* Tells the firmware that every counter can count every event. */
void riscv_pmu_generate_fdt_node(void *fdt, int counters, char *node)
{
    static const uint32_t events[] = {
        RISCV_PMU_CYCLES, RISCV_PMU_INSTRUCTIONS, RISCV_PMU_BRANCHES,
        RISCV_PMU_DTLB_READ_MISS, RISCV_PMU_DTLB_WRITE_MISS,
        RISCV_PMU_ITLB_READ_MISS,
    };
    uint32_t all = MAKE_64BIT_MASK(FIRST, counters);
    uint32_t generic[ARRAY_SIZE(events)][3];
    /* Raw events: a select and a mask of 64 bits each, and the counters. */
    uint32_t raw[] = {
        0, 0, cpu_to_be32(UINT32_MAX), cpu_to_be32(~RISCV_PMU_RAW_MASK),
        cpu_to_be32(all),
    };
    int i;

    for (i = 0; i < ARRAY_SIZE(events); i++) {
        uint32_t fixed = events[i] == RISCV_PMU_CYCLES ? BIT(CYCLE)
                       : events[i] == RISCV_PMU_INSTRUCTIONS ? BIT(INSTRET) : 0;

        generic[i][0] = generic[i][1] = cpu_to_be32(events[i]);
        generic[i][2] = cpu_to_be32(all | fixed);
    }
    qemu_fdt_setprop(fdt, node, "riscv,event-to-mhpmcounters", generic,
                     sizeof(generic));
    qemu_fdt_setprop(fdt, node, "riscv,raw-event-to-mhpmcounters", raw,
                     sizeof(raw));
}
