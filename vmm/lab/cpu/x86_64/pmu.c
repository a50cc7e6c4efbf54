/*
 * The lab CPU's performance-monitoring unit: registers, counting, overflow.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The machine executes one instruction per cycle, and icount counts how many
 * each CPU has executed. So counting cycles and instructions has no cost:
 * account() adds the difference when a register is accessed or the mode that
 * filters counters changes. Other events are reported one by one by helper
 * calls, which are translated only while a counter selects such an event (the
 * HF_PMU_* bits of hflags).
 *
 * Manual: AMD64 Architecture Programmer's Manual (APM) volume 2, section 13.2.
 */
#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/timer.h"
#include "cpu.h"
#include "exec/exec-all.h"
#include "exec/helper-proto.h"
#include "hw/i386/apic.h"
#include "sysemu/cpu-timers.h"
#include "tcg/helper-tcg.h"
#include "pmu-event.h"
#include "pmu-model.h"

#define COUNTER_MASK   ((1ull << 48) - 1)
#define ALL_COUNTERS   ((1u << X86_PMU_COUNTERS) - 1)

#define MSR_K7_SEL0    0xc0010000
#define MSR_K7_CTR0    0xc0010004
#define MSR_CORE_SEL0  0xc0010200
#define K7_COUNTERS    4

#define MSR_GLOBAL_STATUS       0xc0000300
#define MSR_GLOBAL_CTL          0xc0000301
#define MSR_GLOBAL_STATUS_CLEAR 0xc0000302
#define MSR_GLOBAL_STATUS_SET   0xc0000303

static int counters_of(CPUX86State *env)
{
    return env->features[FEAT_8000_0001_ECX] & CPUID_EXT3_PERFCORE
        ? X86_PMU_COUNTERS : K7_COUNTERS;
}

/*
 * Raises the overflow interrupt, which is taken before the next instruction;
 * pmu-silicon.c decides when that is.
 * icount requires that only the last instruction of a block raises interrupts,
 * so that their time is exact. Every caller is at such an instruction or
 * outside of a block.
 */
void x86_pmu_deliver(CPUX86State *env)
{
    CPUState *cs = env_cpu(env);
    bool locked = qemu_mutex_iothread_locked();
    uint32_t can_do_io = cs->can_do_io;

    if (!locked) {
        qemu_mutex_lock_iothread();
    }
    cs->can_do_io = 1;
    apic_deliver_pmi(env_archcpu(env)->apic_state);
    cs->can_do_io = can_do_io;
    if (!locked) {
        qemu_mutex_unlock_iothread();
    }
}

static void add(CPUX86State *env, int i, uint64_t n)
{
    X86PMUCounter *c = &env->pmu.counter[i];
    uint64_t sum = c->value + n;

    c->value = sum & COUNTER_MASK;
    if (sum != c->value) {
        env->pmu.global_status |= 1u << i;
        if (c->select & SEL_INT) {
            x86_pmu_overflowed(env);
        }
    }
}

/*
 * Returns the number of events of a signal that is true in the first `high` of
 * `cycles` cycles: the number of true cycles, or with EDGE of rising edges.
 */
static uint64_t level_or_edge(X86PMUCounter *c, uint64_t cycles, uint64_t high)
{
    uint64_t rising;

    if (!(c->select & SEL_EDGE)) {
        return high;
    }
    rising = high && c->true_cycle != c->cycles;
    if (high) {
        c->true_cycle = c->cycles + cycles;
    }
    return rising;
}

/*
 * Returns what a counter of an event that is reported one by one adds in cycles
 * without the event, which is 0 unless INV is set.
 */
static uint64_t idle_cycles(X86PMUCounter *c, uint64_t cycles)
{
    bool first_is_true = c->true_cycle == c->cycles + 1;
    uint64_t idle = cycles - first_is_true;
    uint64_t n = idle;

    if (!inverted(c->select)) {
        return 0;
    }
    if (c->select & SEL_EDGE) {
        c->in_false_run &= !first_is_true;
        n = idle && !c->in_false_run;
        c->in_false_run |= idle > 0;
    }
    return n;
}

/* Adds this CPU's instructions up to number `now` to the counters. */
static void account_to(CPUX86State *env, int64_t now)
{
    X86PMU *pmu = &env->pmu;
    int64_t cycles = now - pmu->now;
    uint64_t unretired, n;
    int i;

    if (cycles <= 0) {
        return;
    }
    unretired = pmu->unretired - pmu->unretired_seen;
    pmu->now = now;
    pmu->unretired_seen = pmu->unretired;

    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        X86PMUCounter *c = &pmu->counter[i];
        EventClass class = class_of(c->select);

        if (!(pmu->running & 1u << i) || class == CLASS_NONE) {
            continue;
        }
        if (class == CLASS_CYCLES || class == CLASS_INSTRUCTIONS) {
            /* At most one event per cycle, so a larger CNT_MASK never counts. */
            n = class == CLASS_CYCLES ? cycles : cycles - unretired;
            if (count_mask_of(c->select) > 1) {
                n = 0;
            }
            if (inverted(c->select)) {
                n = cycles - n;
            }
            n = level_or_edge(c, cycles, n);
        } else {
            n = idle_cycles(c, cycles);
        }
        c->cycles += cycles;
        if (n) {
            add(env, i, n);
        }
    }
}

static void account(CPUX86State *env)
{
    account_to(env, icount_get_cpu_total(env_cpu(env)));
}

/* Counts one event for one counter, in the current cycle. */
static void count_event(CPUX86State *env, int i)
{
    X86PMUCounter *c = &env->pmu.counter[i];
    unsigned count_mask = count_mask_of(c->select);
    bool accounted = env->pmu.now == icount_get_cpu_total(env_cpu(env));
    uint64_t cycle = c->cycles + !accounted;
    bool rising;

    c->hits = c->hit_cycle == cycle ? c->hits + 1 : 1;
    c->hit_cycle = cycle;
    if (!count_mask && !(c->select & SEL_EDGE)) {
        add(env, i, 1);
        return;
    }
    if (c->hits != MAX(count_mask, 1)) {
        return;
    }
    rising = c->true_cycle + 1 != cycle;
    c->true_cycle = cycle;
    if (!inverted(c->select)) {
        add(env, i, c->select & SEL_EDGE ? rising : 1);
    } else if (accounted) {
        /* account_to() has counted the cycle as one without the event. */
        c->in_false_run = false;
        if (!(c->select & SEL_EDGE)) {
            c->value = (c->value - 1) & COUNTER_MASK;
        }
    }
}

static void report_branch(CPUX86State *env, uint32_t hflags, X86PMUBranch kind,
                          uint64_t ip, uint64_t next_ip, uint64_t target)
{
    bool mispredicted = false, predicted = false;
    int i;

    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        uint64_t select = env->pmu.counter[i].select;

        if (!(env->pmu.enabled & 1u << i) || class_of(select) != CLASS_BRANCH ||
            !filter_passes(select, hflags)) {
            continue;
        }
        if (event_of(select) == 0xc3 && !predicted) {
            mispredicted = pmu_model_mispredicted(env_archcpu(env)->pmu_model,
                                                  kind, ip, next_ip, target);
            predicted = true;
        }
        if (branch_matches(select, kind, mispredicted)) {
            count_event(env, i);
        }
    }
}

/* Counts a near branch, which is the last instruction of its block. */
void helper_pmu_branch(CPUX86State *env, uint32_t kind_and_len,
                       target_ulong ip, target_ulong target)
{
    account_to(env, icount_get_cpu_total(env_cpu(env)) - 1);
    report_branch(env, env->hflags, kind_and_len & 0xff, ip,
                  ip + (kind_and_len >> 8), target);
}

/* Counts a far transfer, which has retired, in the mode that it came from. */
void helper_pmu_far_branch(CPUX86State *env, uint32_t cpl)
{
    account(env);
    report_branch(env, (env->hflags & ~HF_CPL_MASK) | cpl, X86_PMU_FAR,
                  0, 0, 0);
}

/* Counts the delivery of an exception or interrupt in its handler's mode. */
void x86_pmu_interrupt(CPUX86State *env)
{
    if (env->hflags & HF_PMU_BRANCH_MASK) {
        account(env);
        report_branch(env, env->hflags, X86_PMU_FAR, 0, 0, 0);
    }
}

/* Resets the model at a MOV to CR3, as linear addresses are mapped anew. */
void x86_pmu_address_space_changed(CPUX86State *env)
{
    PMUModel *model = env_archcpu(env)->pmu_model;

    if (model) {
        memset(model, 0, sizeof(*model));
    }
}

static void report_access(CPUX86State *env, uint64_t line, bool store)
{
    PMUCacheOutcome outcome =
        pmu_model_access(env_archcpu(env)->pmu_model, line);
    int i;

    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        uint64_t select = env->pmu.counter[i].select;

        if ((env->pmu.running & 1u << i) && class_of(select) == CLASS_MEMORY &&
            access_matches(select, outcome, store)) {
            count_event(env, i);
        }
    }
}

/*
 * Counts the lines that a memory operand touches, each once. QEMU makes several
 * accesses of an operand that is misaligned, and many of one that a helper
 * accesses. All accesses of an operand come from one site in one instruction.
 * The stack frame of an exception has no site and is not counted.
 */
static void observe_access(CPUState *cs, vaddr addr, vaddr len, int flags,
                           uintptr_t site)
{
    CPUX86State *env = cs->env_ptr;
    X86PMU *pmu = &env->pmu;
    int64_t now;
    uint64_t line;

    if (!site || !(env->hflags & HF_PMU_STEP_MASK)) {
        return;
    }
    now = icount_get_cpu_total(cs);
    if (now != pmu->access_cycle || site != pmu->access_site) {
        pmu->access_cycle = now;
        pmu->access_site = site;
        pmu->access_line[0] = pmu->access_line[1] = UINT64_MAX;
    }
    account_to(env, now - 1);
    for (line = addr >> PMU_LINE_BITS;
         line <= (addr + len - 1) >> PMU_LINE_BITS; line++) {
        if (line != pmu->access_line[0] && line != pmu->access_line[1]) {
            pmu->access_line[1] = pmu->access_line[0];
            pmu->access_line[0] = line;
            report_access(env, line, flags & BP_MEM_WRITE);
        }
    }
}

/*
 * Sets the timer for the next overflow of a counter of account(). Such a
 * counter adds at most one per cycle, so it cannot overflow before the timer
 * fires. If it has not overflowed by then (other CPUs ran meanwhile, or REP
 * rounds did not retire), the timer is set again.
 */
static void arm_timer(CPUX86State *env)
{
    X86CPU *cpu = env_archcpu(env);
    CPUState *cs = env_cpu(env);
    uint32_t can_do_io = cs->can_do_io;
    uint64_t left = UINT64_MAX;
    int i;

    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        X86PMUCounter *c = &env->pmu.counter[i];
        EventClass class = class_of(c->select);

        if ((env->pmu.running & 1u << i) && (c->select & SEL_INT) &&
            (class == CLASS_CYCLES || class == CLASS_INSTRUCTIONS ||
             (class != CLASS_NONE && inverted(c->select)))) {
            left = MIN(left, COUNTER_MASK + 1 - c->value);
        }
    }
    /* An overflow that is more than a day away needs no timer. */
    if (left >= 1ull << 47) {
        timer_del(cpu->pmu_timer);
        return;
    }
    /* The clock is exact here; see x86_pmu_deliver(). */
    cs->can_do_io = 1;
    timer_mod(cpu->pmu_timer, qemu_clock_get_ns(QEMU_CLOCK_VIRTUAL) +
                              icount_to_ns(left));
    cs->can_do_io = can_do_io;
}

static void timer_fired(void *opaque)
{
    CPUX86State *env = opaque;

    account(env);
    arm_timer(env);
}

static void update_running(CPUX86State *env)
{
    X86PMU *pmu = &env->pmu;
    int i;

    pmu->running = 0;
    env->hflags &= ~(HF_PMU_BRANCH_MASK | HF_PMU_STEP_MASK);
    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        uint64_t select = pmu->counter[i].select;
        EventClass class = class_of(select);

        if (!(pmu->enabled & 1u << i) || !filter_passes(select, env->hflags)) {
            continue;
        }
        pmu->running |= 1u << i;
        if (class == CLASS_BRANCH) {
            env->hflags |= HF_PMU_BRANCH_MASK;
        } else if (class == CLASS_MEMORY) {
            env->hflags |= HF_PMU_STEP_MASK;
        }
    }
}

void x86_pmu_update_mode(CPUX86State *env)
{
    uint8_t before = env->pmu.running;

    account(env);
    update_running(env);
    if (env->pmu.running != before) {
        arm_timer(env);
    }
}

/*
 * Counts an entry into the guest as instructions and as branches. Nobody has
 * seen what it is to counters with CNT_MASK or EDGE: here it is nothing.
 */
void x86_pmu_tick(CPUX86State *env, uint64_t n)
{
    int i;

    account(env);
    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        uint64_t select = env->pmu.counter[i].select;

        if ((env->pmu.running & 1u << i) && !count_mask_of(select) &&
            !(select & SEL_EDGE) &&
            (class_of(select) == CLASS_INSTRUCTIONS ||
             (class_of(select) == CLASS_BRANCH &&
              branch_matches(select, X86_PMU_FAR, false)))) {
            add(env, i, n);
        }
    }
    arm_timer(env);
}

/* Makes what the PMU needs beside its state: before it is used, or loaded. */
void x86_pmu_prepare(CPUX86State *env)
{
    X86CPU *cpu = env_archcpu(env);

    if (!cpu->pmu_timer) {
        cpu->pmu_timer = timer_new_ns(QEMU_CLOCK_VIRTUAL, timer_fired, env);
        cpu->pmu_model = g_new0(PMUModel, 1);
    }
}

/* Computes which counters are enabled, after a control register has changed. */
static void apply_controls(CPUX86State *env)
{
    CPUState *cs = env_cpu(env);
    bool observe = false;
    int i;

    if (!icount_enabled()) {
        warn_report_once("the lab CPU's counters stand still without "
                         "-icount shift=0,sleep=off");
        return;
    }
    x86_pmu_prepare(env);
    env->pmu.enabled = 0;
    for (i = 0; i < X86_PMU_COUNTERS; i++) {
        uint64_t select = env->pmu.counter[i].select;

        if ((select & SEL_EN) && !(env->pmu.global_off & 1u << i)) {
            env->pmu.enabled |= 1u << i;
            observe |= class_of(select) == CLASS_MEMORY;
        }
    }
    /*
     * Pages in the TLB must be entered again as observed ones. When the
     * observer is removed, they can stay: they are slow, but correct.
     */
    if (observe && !cs->mem_observer) {
        tlb_flush(cs);
    }
    cs->mem_observer = observe ? observe_access : NULL;
    update_running(env);
    arm_timer(env);
}

/*
 * Restarts edge detection, for a counter whose event has changed. The event is
 * assumed to have happened before the first cycle. Disabling, enabling or
 * writing a counter does not restart it: kernels do this at task switches, and
 * edges must not depend on them.
 */
static void restart_edges(X86PMUCounter *c)
{
    c->cycles = c->true_cycle = 1;
    c->hit_cycle = 0;
    c->in_false_run = false;
}

static void write_select(CPUX86State *env, int i, uint64_t val)
{
    X86PMUCounter *c = &env->pmu.counter[i];

    val &= SEL_VALID;
    if ((val ^ c->select) & ~SEL_EN) {
        restart_edges(c);
    }
    c->select = val;
    apply_controls(env);
}

/*
 * Returns the counter of an MSR, or -1. Sets is_select if the MSR is the
 * counter's PERF_CTL.
 */
static int find_counter(CPUX86State *env, uint32_t msr, bool *is_select)
{
    if (!IS_AMD_CPU(env)) {
        return -1;
    }
    if (msr >= MSR_K7_SEL0 && msr < MSR_K7_CTR0 + K7_COUNTERS) {
        *is_select = msr < MSR_K7_CTR0;
        return (msr - MSR_K7_SEL0) % K7_COUNTERS;
    }
    if (msr >= MSR_CORE_SEL0 && msr < MSR_CORE_SEL0 + 2 * X86_PMU_COUNTERS &&
        counters_of(env) == X86_PMU_COUNTERS) {
        *is_select = !(msr & 1);
        return (msr - MSR_CORE_SEL0) / 2;
    }
    return -1;
}

static bool is_global(CPUX86State *env, uint32_t msr)
{
    return env_archcpu(env)->perfmon_v2 && msr >= MSR_GLOBAL_STATUS &&
           msr <= MSR_GLOBAL_STATUS_SET;
}

/* This and x86_pmu_rdmsr() return false if the MSR is not one of the PMU's. */
bool x86_pmu_wrmsr(CPUX86State *env, uint32_t msr, uint64_t val, uintptr_t ra)
{
    X86PMU *pmu = &env->pmu;
    bool is_select;
    int i = find_counter(env, msr, &is_select);

    if (i < 0 && !is_global(env, msr)) {
        return false;
    }
    account(env);
    if (i >= 0 && is_select) {
        write_select(env, i, val);
        return true;
    }
    if (i >= 0) {
        pmu->counter[i].value = val & COUNTER_MASK;
        if (pmu->running & 1u << i) {
            arm_timer(env);
        }
        return true;
    }
    switch (msr) {
    case MSR_GLOBAL_STATUS:
        raise_exception_err_ra(env, EXCP0D_GPF, 0, ra);
    case MSR_GLOBAL_CTL:
        pmu->global_off = ~val & ALL_COUNTERS;
        apply_controls(env);
        break;
    case MSR_GLOBAL_STATUS_CLEAR:
        pmu->global_status &= ~val;
        break;
    case MSR_GLOBAL_STATUS_SET:
        pmu->global_status |= val & ALL_COUNTERS;
        break;
    }
    return true;
}

bool x86_pmu_rdmsr(CPUX86State *env, uint32_t msr, uint64_t *val)
{
    X86PMU *pmu = &env->pmu;
    bool is_select;
    int i = find_counter(env, msr, &is_select);

    if (i < 0 && !is_global(env, msr)) {
        return false;
    }
    account(env);
    if (i >= 0) {
        *val = is_select ? pmu->counter[i].select : pmu->counter[i].value;
    } else if (msr == MSR_GLOBAL_STATUS) {
        *val = pmu->global_status |
               env_archcpu(env)->pmu_silicon.status_junk;
    } else if (msr == MSR_GLOBAL_CTL) {
        *val = ~pmu->global_off & ALL_COUNTERS;
    } else {
        *val = 0;
    }
    return true;
}

bool x86_pmu_rdpmc(CPUX86State *env, uint32_t index, uint64_t *val)
{
    if (!IS_AMD_CPU(env) || index >= counters_of(env)) {
        return false;
    }
    account(env);
    *val = env->pmu.counter[index].value;
    return true;
}
