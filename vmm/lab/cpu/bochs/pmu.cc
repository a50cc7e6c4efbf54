/*
 * The lab CPU's performance-monitoring unit for Intel: registers, counting,
 * overflow. See pmu.h and README.md.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * "SDM" is Intel's Software Developer's Manual, volume 3, its chapter
 * "Performance Monitoring", section "Architectural Performance Monitoring".
 */
#define NEED_CPU_REG_SHORTCUTS 1
#include "bochs.h"
#include "cpu.h"
#include "apic.h"
#include "msr.h"

extern "C" {
#include "pmu-model.h"
}

/* IA32_PERFEVTSELx */
static const Bit64u SEL_USR = 1 << 16, SEL_OS = 1 << 17, SEL_EDGE = 1 << 18;
static const Bit64u SEL_INT = 1 << 20, SEL_ANY = 1 << 21, SEL_EN = 1 << 22;
static const Bit64u SEL_INV = 1 << 23;
/* IA32_FIXED_CTR_CTRL, the fields of counter 0 */
static const Bit64u FIXED_OS = 1, FIXED_USR = 2, FIXED_ANY = 4, FIXED_PMI = 8;
static const unsigned FIXED_BITS = 4;
/* IA32_PERF_GLOBAL_STATUS */
static const Bit64u STATUS_CTR_FRZ = BX_CONST64(1) << 59;
/* IA32_PERF_GLOBAL_INUSE: a counter has its interrupt enabled */
static const Bit64u INUSE_PMI = BX_CONST64(1) << 63;
static const Bit64u STATUS_LBR_FRZ = BX_CONST64(1) << 58;
static const Bit64u STATUS_COND_CHGD = BX_CONST64(1) << 63;
/* IA32_DEBUGCTL. BTF is kept, but Bochs does not implement it. */
static const Bit64u DEBUGCTL_LBR = 1 << 0, DEBUGCTL_BTF = 1 << 1;
static const Bit64u DEBUGCTL_FREEZE_LBRS_ON_PMI = 1 << 11, DEBUGCTL_FREEZE_ON_PMI = 1 << 12;
static const Bit64u DEBUGCTL_VALID = DEBUGCTL_LBR | DEBUGCTL_BTF | DEBUGCTL_FREEZE_LBRS_ON_PMI |
                                     DEBUGCTL_FREEZE_ON_PMI;
/* IA32_PERF_CAPABILITIES */
static const Bit64u LBR_FORMAT_INFO = 5, FULL_WIDTH_WRITES = 1 << 13;
/* MSR_LASTBRANCH_INFO_x */
static const Bit64u INFO_MISPREDICTED = BX_CONST64(1) << 63;

static const Bit64u WIDTH_MASK = (BX_CONST64(1) << 48) - 1;
static const unsigned FIRST_FIXED_BIT = 32;
/* No instruction touches more lines. A REP instruction is checked per round. */
static const unsigned MOST_LINES = 64;

static const Bit32u IA32_MISC_ENABLE = 0x1a0;
static const Bit32u IA32_PERF_CAPABILITIES = 0x345;
static const Bit32u IA32_FIXED_CTR_CTRL = 0x38d;
static const Bit32u IA32_PERF_GLOBAL_STATUS = 0x38e;
static const Bit32u IA32_PERF_GLOBAL_CTRL = 0x38f;
static const Bit32u IA32_PERF_GLOBAL_STATUS_RESET = 0x390; /* OVF_CTRL before version 4 */
static const Bit32u IA32_PERF_GLOBAL_STATUS_SET = 0x391;
static const Bit32u IA32_PERF_GLOBAL_INUSE = 0x392;
static const Bit32u IA32_DEBUGCTL = 0x1d9;
static const Bit32u IA32_PMC0 = 0xc1, IA32_A_PMC0 = 0x4c1, IA32_PERFEVTSEL0 = 0x186, IA32_FIXED_CTR0 = 0x309;

/* Version of architectural performance monitoring: the variable LAB_PERFMON. */
static unsigned version()
{
    static unsigned chosen = 0;

    if (!chosen) {
        const char *text = getenv("LAB_PERFMON");
        chosen = text ? atoi(text) : 5;
    }
    return chosen;
}

/* Silicon mode: the variable LAB_SILICON, as `KNOB=VALUE,...`. */
static LabSilicon knobs()
{
    LabSilicon chosen = {};
    const struct { const char *name; Bit32u *knob; } names[] = {
        { "silicon-seed", &chosen.seed },
        { "skid-least", &chosen.skid_least },
        { "skid-most", &chosen.skid_most },
        { "skid-tail", &chosen.skid_tail },
        { "pmi-again", &chosen.pmi_again },
        { "pmi-at-exit", &chosen.pmi_at_exit },
        { "interrupt-branch", &chosen.interrupt_branch },
        { "cond-changed", &chosen.cond_changed },
    };
    const char *text = getenv("LAB_SILICON");

    while (text && *text) {
        const char *value = strchr(text, '=');
        if (!value)
            break;
        for (const auto &name : names)
            if (!strncmp(text, name.name, value - text) && !name.name[value - text])
                *name.knob = strtoul(value + 1, NULL, 0);
        text = strchr(value, ',');
        text += text != NULL;
    }
    return chosen;
}

/* As processors have it that report these versions. */
static unsigned general() { return version() >= 5 ? 8 : 4; }

/* With one thread per core, AnyThread means nothing. Version 5 has dropped it. */
static bool has_any_thread() { return version() == 4; }

static bool has_full_width() { return version() >= 4; }

static unsigned bit_of(unsigned n)
{
    return n < LAB_GENERAL ? n : n - LAB_GENERAL + FIRST_FIXED_BIT;
}

static Bit64u counter_bits()
{
    return ((BX_CONST64(1) << general()) - 1) |
           ((BX_CONST64(1) << LAB_FIXED) - 1) << FIRST_FIXED_BIT;
}

/*
 * The architectural events, and BR_INST_RETIRED.CONDITIONAL of Skylake. All
 * others count nothing, as events that a processor does not have.
 */
static lab_event event_of(Bit64u select)
{
    switch (select & 0xffff) {
    case 0x003c: /* UnHalted Core Cycles */
    case 0x013c: /* UnHalted Reference Cycles: there is one clock only */
        return LAB_CYCLES;
    case 0x00c0:
        return LAB_INSTRUCTIONS;
    case 0x4f2e:
        return LAB_REFERENCES;
    case 0x412e:
        return LAB_MISSES;
    case 0x00c4:
        return LAB_BRANCHES;
    case 0x00c5:
        return LAB_MISPREDICTED;
    case 0x01c4:
        return LAB_CONDITIONAL;
    default:
        return LAB_NO_EVENT;
    }
}

static const lab_event FIXED_EVENTS[LAB_FIXED] = { LAB_INSTRUCTIONS, LAB_CYCLES, LAB_CYCLES };

void lab_pmu_t::cpuid_leaf_a(Bit32u *eax, Bit32u *ebx, Bit32u *ecx, Bit32u *edx)
{
    const unsigned events = 7, width = 48;

    *eax = version() | general() << 8 | width << 16 | events << 24;
    *ebx = 0;
    *ecx = version() >= 5 ? (1 << LAB_FIXED) - 1 : 0;
    *edx = LAB_FIXED | width << 5 | (version() >= 5) << 15;
}

void lab_pmu_t::reset(unsigned id, Bit64u icount)
{
    PMUModel *kept = model;

    memset(this, 0, sizeof *this);
    model = kept;
    cpu = id;
    mode = &modes[0];
    since = icount;
    global_control = (1 << general()) - 1;
    silicon = knobs();
    pmi_due = NEVER;
    for (lab_counter &counter : counters)
        counter.event = LAB_NO_EVENT;
    configure();
}

/* Up to now, what happened did so in the present mode. */
void lab_pmu_t::attribute(Bit64u now)
{
    mode->n[LAB_CYCLES] += now - since;
    since = now;
    mode->n[LAB_INSTRUCTIONS] += retired;
    mode->n[LAB_BRANCHES] += unconditionals + conditionals;
    mode->n[LAB_CONDITIONAL] += conditionals;
    retired = unconditionals = conditionals = 0;
}

void lab_pmu_t::enter(unsigned next, Bit64u icount)
{
    attribute(icount);
    in = next;
    mode = next == NOWHERE ? &nowhere : &modes[next];
    deadline = next == NOWHERE ? ~BX_CONST64(0) : mode->deadline;
}

void lab_pmu_t::check(Bit64u now)
{
    book(now);
    if (now >= pmi_due)
        interrupt(now);
    arm(now);
}

/*
 * Adds the events up to cycle `now` to the counters that are on. Both modes are
 * looked at, as events of the former mode may not have been booked yet.
 */
void lab_pmu_t::book(Bit64u now)
{
    attribute(now);
    for (unsigned m = 0; m < 2; m++) {
        Bit64u happened[LAB_NO_EVENT + 1];
        bool any = false;

        for (unsigned event = 0; event < LAB_EVENTS; event++) {
            happened[event] = modes[m].n[event] - modes[m].booked[event];
            any |= happened[event] != 0;
        }
        if (!any)
            continue;
        happened[LAB_NO_EVENT] = 0;
        memcpy(modes[m].booked, modes[m].n, sizeof modes[m].n);
        for (unsigned n = 0; n < LAB_COUNTERS; n++) {
            if (counters[n].on && counters[n].in_mode[m]) {
                add(&counters[n], happened[LAB_CYCLES], happened[counters[n].event]);
                if (counters[n].value > WIDTH_MASK)
                    overflow(n, now);
            }
        }
    }
}

/*
 * Adds events that happened in so many cycles. With a condition on cycles this
 * is called for each instruction, whose events are in its last cycle.
 */
void lab_pmu_t::add(lab_counter *counter, Bit64u cycles, Bit64u events)
{
    if (counter->event == LAB_CYCLES)
        events = cycles ? 1 : 0;
    if (!counter->threshold) {
        counter->value += counter->event == LAB_CYCLES ? cycles : events;
        return;
    }
    if (!cycles)
        return;
    bool idle_is_true = counter->inverted;
    if (counter->event == LAB_CYCLES)
        idle_is_true = (1 >= counter->threshold) != counter->inverted;
    const bool last_is_true = (events >= counter->threshold) != counter->inverted;
    if (!counter->edge) {
        counter->value += (idle_is_true ? cycles - 1 : 0) + last_is_true;
        return;
    }
    if (cycles > 1) {
        counter->value += idle_is_true && !counter->was_true;
        counter->was_true = idle_is_true;
    }
    counter->value += last_is_true && !counter->was_true;
    counter->was_true = last_is_true;
}

void lab_pmu_t::overflow(unsigned n, Bit64u now)
{
    counters[n].value &= WIDTH_MASK;
    global_status |= BX_CONST64(1) << bit_of(n);
    if (!counters[n].interrupts)
        return;
    if (silicon.skid_most)
        interrupt_later(now);
    else
        interrupt(now);
}

/*
 * SDM, "Architectural Performance Monitoring Version 4": with
 * FREEZE_PERFMON_ON_PMI, a PMI sets CTR_FRZ, and all counters stand still until
 * it is cleared. In earlier versions it clears IA32_PERF_GLOBAL_CTRL.
 */
void lab_pmu_t::interrupt(Bit64u now)
{
    pmi_due = NEVER;
    if (lab_silicon_one_in(&silicon, cpu, silicon.cond_changed))
        global_status |= STATUS_COND_CHGD;
    if (debug_control & DEBUGCTL_FREEZE_LBRS_ON_PMI) {
        if (version() >= 4)
            global_status |= STATUS_LBR_FRZ;
        else
            debug_control &= ~DEBUGCTL_LBR;
    }
    if (debug_control & DEBUGCTL_FREEZE_ON_PMI) {
        if (version() >= 4)
            global_status |= STATUS_CTR_FRZ;
        else
            global_control = 0;
        for (lab_counter &counter : counters)
            counter.on = false;
    }
    BX_CPU(cpu)->lapic->perfmon_interrupt();
    if (lab_silicon_one_in(&silicon, cpu, silicon.pmi_again))
        interrupt_later(now);
}

/* Has the interrupt come once its skid is over, or with one that is under way. */
void lab_pmu_t::interrupt_later(Bit64u now)
{
    if (pmi_due == NEVER)
        pmi_due = now + lab_silicon_skid(&silicon, cpu);
}

void lab_pmu_t::interrupt_now(Bit64u now)
{
    book(now);
    interrupt(now);
    arm(now);
}

/*
 * Computes for each mode when the next of its counters may overflow. Only those
 * with an interrupt matter: the others are found full when they are read.
 */
void lab_pmu_t::arm(Bit64u now)
{
    for (unsigned m = 0; m < 2; m++) {
        Bit64u left = BX_CONST64(1) << 62;

        for (const lab_counter &counter : counters) {
            if (!counter.on || !counter.in_mode[m] || counter.event == LAB_NO_EVENT)
                continue;
            if (counter.threshold) {
                left = 1;
            } else if (counter.interrupts) {
                Bit64u cycles = WIDTH_MASK + 1 - counter.value;
                if (counter.event == LAB_REFERENCES || counter.event == LAB_MISSES)
                    cycles /= MOST_LINES;
                left = BX_MIN(left, BX_MAX(cycles, 1));
            }
        }
        modes[m].deadline = BX_MIN(now + left, pmi_due);
    }
    if (in != NOWHERE)
        deadline = mode->deadline;
}

bool lab_pmu_t::needs(lab_event event) const
{
    for (const lab_counter &counter : counters)
        if (counter.on && counter.event == event)
            return true;
    return false;
}

/* Applies the control registers. Everything before has been booked. */
void lab_pmu_t::configure()
{
    for (unsigned n = 0; n < LAB_COUNTERS; n++) {
        lab_counter *counter = &counters[n];

        counter->on = (global_control >> bit_of(n) & 1) && !(global_status & STATUS_CTR_FRZ);
        if (n < LAB_GENERAL) {
            counter->event = event_of(select[n]);
            counter->in_mode[0] = (select[n] & SEL_OS) != 0;
            counter->in_mode[1] = (select[n] & SEL_USR) != 0;
            counter->interrupts = (select[n] & SEL_INT) != 0;
            counter->edge = (select[n] & SEL_EDGE) != 0;
            counter->threshold = select[n] >> 24 & 0xff;
            /* INV inverts the comparison with CMASK: it means nothing without. */
            counter->inverted = (select[n] & SEL_INV) && counter->threshold;
            if (counter->edge && !counter->threshold)
                counter->threshold = 1;
            counter->on &= (select[n] & SEL_EN) != 0;
        } else {
            const Bit64u fields = fixed_control >> FIXED_BITS * (n - LAB_GENERAL);
            counter->event = FIXED_EVENTS[n - LAB_GENERAL];
            counter->in_mode[0] = (fields & FIXED_OS) != 0;
            counter->in_mode[1] = (fields & FIXED_USR) != 0;
            counter->interrupts = (fields & FIXED_PMI) != 0;
        }
    }
    predicts = needs(LAB_MISPREDICTED);
    caches = needs(LAB_REFERENCES) || needs(LAB_MISSES);
    watches_branches = predicts ||
                       ((debug_control & DEBUGCTL_LBR) && !(global_status & STATUS_LBR_FRZ));
    if (!model)
        model = new PMUModel();
    arm(since);
}

/*
 * Books the present instruction before it changes the configuration. It counts
 * under the one in which it began: a WRMSR that stops a counter counts, one that
 * starts it does not, and VMRESUME is the host's.
 */
void lab_pmu_t::retire_now()
{
    if (in == NOWHERE)
        return;
    retired++;
    book(BX_CPU(cpu)->icount + 1);
    enter(NOWHERE, since);
}

lab_counter *lab_pmu_t::counter_at(Bit32u index, bool *full_width)
{
    *full_width = true;
    if (index - IA32_FIXED_CTR0 < LAB_FIXED)
        return &counters[LAB_GENERAL + index - IA32_FIXED_CTR0];
    if (index - IA32_A_PMC0 < general() && has_full_width())
        return &counters[index - IA32_A_PMC0];
    *full_width = false;
    return index - IA32_PMC0 < general() ? &counters[index - IA32_PMC0] : NULL;
}

Bit64u lab_pmu_t::in_use() const
{
    Bit64u bits = 0;

    for (unsigned n = 0; n < LAB_COUNTERS; n++) {
        const lab_counter &counter = counters[n];
        if (n < LAB_GENERAL ? (select[n] & 0xff) != 0 : counter.in_mode[0] || counter.in_mode[1])
            bits |= BX_CONST64(1) << bit_of(n);
        if (counter.interrupts)
            bits |= INUSE_PMI;
    }
    return bits;
}

int lab_pmu_t::rdmsr(Bit32u index, Bit64u *value)
{
    bool full_width;

    if (lab_counter *counter = counter_at(index, &full_width)) {
        check(BX_CPU(cpu)->icount);
        *value = counter->value;
        return 1;
    }
    if (index - IA32_PERFEVTSEL0 < general()) {
        *value = select[index - IA32_PERFEVTSEL0];
        return 1;
    }
    if (const Bit64u *record = records.at(index)) {
        *value = *record;
        return 1;
    }
    switch (index) {
    case IA32_PERF_CAPABILITIES:
        *value = LBR_FORMAT_INFO | (has_full_width() ? FULL_WIDTH_WRITES : 0);
        return 1;
    case IA32_FIXED_CTR_CTRL:
        *value = fixed_control;
        return 1;
    case IA32_PERF_GLOBAL_STATUS:
        check(BX_CPU(cpu)->icount);
        *value = global_status;
        return 1;
    case IA32_PERF_GLOBAL_CTRL:
        *value = global_control;
        return 1;
    case IA32_PERF_GLOBAL_STATUS_RESET:
        *value = 0;
        return 1;
    case IA32_PERF_GLOBAL_STATUS_SET:
        *value = 0;
        return version() >= 4;
    case IA32_PERF_GLOBAL_INUSE:
        *value = in_use();
        return version() >= 4;
    case IA32_DEBUGCTL:
        *value = debug_control;
        return 1;
    case IA32_MISC_ENABLE:
        /* Fast strings, performance monitoring, no BTS, no PEBS, MONITOR. */
        *value = 1 | 1 << 7 | 1 << 11 | 1 << 12 | 1 << 18;
        return 1;
    default:
        return -1;
    }
}

int lab_pmu_t::wrmsr(Bit32u index, Bit64u value)
{
    const unsigned event_select = index - IA32_PERFEVTSEL0;
    Bit64u reserved = 0;
    bool full_width;
    lab_counter *counter = counter_at(index, &full_width);

    if (Bit64u *record = records.at(index)) {
        *record = record == &records.top ? value % LAB_RECORDS : value;
        return 1;
    }
    if (counter) {
        reserved = full_width ? ~WIDTH_MASK : 0;
    } else if (event_select < general()) {
        reserved = ~BX_CONST64(0xffffffff) | (has_any_thread() ? 0 : SEL_ANY);
    } else {
        switch (index) {
        case IA32_FIXED_CTR_CTRL:
            reserved = ~(BX_CONST64(0xfff) & ~(has_any_thread() ? 0 : 0x444));
            break;
        case IA32_PERF_GLOBAL_CTRL:
            reserved = ~counter_bits();
            break;
        case IA32_PERF_GLOBAL_STATUS_RESET:
            /* From bit 55 on: trace, LBRs, freezing, uncore, PEBS, changes. */
            reserved = ~(counter_bits() | BX_CONST64(0x3) << 62 |
                         (version() >= 4 ? BX_CONST64(0x3c8) << 52 : 0));
            break;
        case IA32_PERF_GLOBAL_STATUS_SET:
            if (version() < 4)
                return 0;
            reserved = ~(counter_bits() | STATUS_CTR_FRZ | STATUS_LBR_FRZ);
            break;
        case IA32_DEBUGCTL:
            reserved = ~DEBUGCTL_VALID;
            break;
        case IA32_MISC_ENABLE:
            return 1;
        case IA32_PERF_CAPABILITIES:
        case IA32_PERF_GLOBAL_STATUS:
        case IA32_PERF_GLOBAL_INUSE:
            return 0;
        default:
            return -1;
        }
    }
    if (value & reserved)
        return 0;

    retire_now();
    if (counter) {
        counter->value = full_width ? value : (Bit64u)(Bit64s)(Bit32s)value & WIDTH_MASK;
    } else if (event_select < general()) {
        /* Edges start again, as if the event had just happened. */
        if ((select[event_select] ^ value) & ~SEL_EN)
            counters[event_select].was_true = !(value & SEL_INV);
        select[event_select] = value;
    } else if (index == IA32_FIXED_CTR_CTRL) {
        fixed_control = value;
    } else if (index == IA32_PERF_GLOBAL_CTRL) {
        global_control = value;
    } else if (index == IA32_PERF_GLOBAL_STATUS_RESET) {
        global_status &= ~value;
    } else if (index == IA32_PERF_GLOBAL_STATUS_SET) {
        global_status |= value;
    } else {
        debug_control = value;
    }
    configure();
    return 1;
}

bool lab_pmu_t::rdpmc(Bit32u index, Bit64u *value)
{
    const Bit32u FIXED = 1 << 30;
    const bool fixed = (index & FIXED) != 0;
    const Bit32u n = index & ~FIXED;

    if (n >= (fixed ? (unsigned)LAB_FIXED : general()))
        return false;
    check(BX_CPU(cpu)->icount);
    *value = counters[fixed ? LAB_GENERAL + n : n].value;
    return true;
}

bool lab_pmu_t::global_ctrl_is_valid(Bit64u value) const
{
    return !(value & ~counter_bits());
}

/* At a VM exit, leave() has come before, and the instruction has not retired. */
void lab_pmu_t::load_global_ctrl(Bit64u value)
{
    if (insn)
        retire_now();
    else
        book(BX_CPU(cpu)->icount);
    global_control = value;
    configure();
}

void lab_pmu_t::load_debugctl(Bit64u value)
{
    book(BX_CPU(cpu)->icount);
    debug_control = value & DEBUGCTL_VALID;
    configure();
}

/* The models see only what counters count that are on, in these modes. */

static bool counts(const lab_counter *counters, lab_event event, bool user)
{
    for (unsigned n = 0; n < LAB_COUNTERS; n++)
        if (counters[n].on && counters[n].event == event && counters[n].in_mode[user])
            return true;
    return false;
}

void lab_pmu_t::watch(unsigned what, Bit64u ip, Bit64u target)
{
    const Bit64u next_ip = insn ? ip + insn->ilen() : ip;
    X86PMUBranch kind;
    bool mispredicted = false;

    switch (what) {
    case NOT_TAKEN:
        kind = X86_PMU_COND_NOT_TAKEN;
        break;
    case TAKEN:
        kind = X86_PMU_COND_TAKEN;
        break;
    case FAR_BRANCH:
        kind = X86_PMU_FAR;
        break;
    case BX_INSTR_IS_CALL:
        kind = X86_PMU_CALL;
        break;
    case BX_INSTR_IS_CALL_INDIRECT:
        kind = X86_PMU_CALL_INDIRECT;
        break;
    case BX_INSTR_IS_JMP_INDIRECT:
        kind = X86_PMU_JMP_INDIRECT;
        break;
    case BX_INSTR_IS_RET:
        kind = X86_PMU_RET;
        break;
    default:
        kind = X86_PMU_JMP;
    }
    if (predicts && in != NOWHERE && counts(counters, LAB_MISPREDICTED, in == USER)) {
        mispredicted = pmu_model_mispredicted(model, kind, ip, next_ip, target);
        mode->n[LAB_MISPREDICTED] += mispredicted;
    }
    if (is_recorded(what)) {
        records.top = (records.top + 1) % LAB_RECORDS;
        records.from[records.top] = ip;
        records.to[records.top] = target;
        records.info[records.top] = mispredicted ? INFO_MISPREDICTED : 0;
    }
}

/* MSR_LBR_SELECT has a bit for each kind of branch that is not recorded. */
bool lab_pmu_t::is_recorded(unsigned what) const
{
    const bool user = in == USER;
    unsigned excluded;

    switch (what) {
    case NOT_TAKEN:
        return false;
    case TAKEN:
        excluded = 2;
        break;
    case BX_INSTR_IS_CALL:
        excluded = 3;
        break;
    case BX_INSTR_IS_CALL_INDIRECT:
        excluded = 4;
        break;
    case BX_INSTR_IS_RET:
        excluded = 5;
        break;
    case BX_INSTR_IS_JMP_INDIRECT:
        excluded = 6;
        break;
    case FAR_BRANCH:
        excluded = 8;
        break;
    default:
        excluded = 7;
    }
    return (debug_control & DEBUGCTL_LBR) && !(global_status & STATUS_LBR_FRZ) &&
           !(records.select >> excluded & 1) && !(records.select >> user & 1);
}

Bit64u *lab_records::at(Bit32u index)
{
    const Bit32u MSR_LBR_SELECT = 0x1c8, MSR_LASTBRANCH_TOS = 0x1c9;
    const Bit32u FROM_0 = 0x680, TO_0 = 0x6c0, INFO_0 = 0xdc0;

    if (index == MSR_LBR_SELECT)
        return &select;
    if (index == MSR_LASTBRANCH_TOS)
        return &top;
    if (index - FROM_0 < LAB_RECORDS)
        return &from[index - FROM_0];
    if (index - TO_0 < LAB_RECORDS)
        return &to[index - TO_0];
    return index - INFO_0 < LAB_RECORDS ? &info[index - INFO_0] : NULL;
}

void lab_pmu_t::access_lines(Bit64u linear, unsigned len)
{
    if (in == NOWHERE || !(counts(counters, LAB_REFERENCES, in == USER) ||
                           counts(counters, LAB_MISSES, in == USER)))
        return;
    for (Bit64u line = linear >> PMU_LINE_BITS; line <= (linear + len - 1) >> PMU_LINE_BITS; line++) {
        const PMUCacheOutcome outcome = pmu_model_access(model, line);
        mode->n[LAB_REFERENCES] += outcome != PMU_L1_HIT;
        mode->n[LAB_MISSES] += outcome == PMU_L2_MISS;
    }
}

/* MOV to CR3 maps linear addresses anew, by which the models are indexed. */
void lab_pmu_t::new_address_space()
{
    if (model)
        memset(model, 0, sizeof *model);
}
