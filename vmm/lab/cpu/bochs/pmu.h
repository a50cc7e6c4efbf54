/*
 * The lab CPU's performance-monitoring unit for Intel: Intel's architectural
 * one (SDM volume 3, chapter "Performance Monitoring"), version 2, 4 or 5.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * README.md describes what it counts. Events are booked in two steps. While
 * instructions execute, they add to the number of events of a mode (kernel or
 * user), which costs an addition. These numbers reach the counters when a
 * register of the PMU is read or written, when the mode's counters may overflow,
 * and at VM entries and exits.
 */
#ifndef LAB_PMU_H
#define LAB_PMU_H

#include "silicon.h"

enum lab_event {
    LAB_CYCLES,         /* ticks of the clock while the CPU is not halted */
    LAB_INSTRUCTIONS,
    LAB_BRANCHES,
    LAB_CONDITIONAL,
    LAB_MISPREDICTED,
    LAB_REFERENCES,     /* lines that the L1 data cache asks the L2 for */
    LAB_MISSES,         /* those that the L2 does not have */
    LAB_EVENTS,
    LAB_NO_EVENT = LAB_EVENTS,
};

enum {
    LAB_GENERAL = 8,    /* at most, see general() */
    LAB_FIXED = 3,
    LAB_COUNTERS = LAB_GENERAL + LAB_FIXED,
    LAB_RECORDS = 32,
};

struct lab_mode {
    Bit64u n[LAB_EVENTS];
    Bit64u booked[LAB_EVENTS];  /* of which the counters know */
    Bit64u deadline;            /* icount before which none of them overflows */
};

struct lab_counter {
    Bit64u value;
    lab_event event;
    bool on, interrupts;
    bool in_mode[2];            /* kernel, user */
    /* CMASK, INV and EDGE make events of cycles: those with enough events. */
    unsigned threshold;         /* 0: every event counts */
    bool inverted, edge;
    bool was_true;              /* the condition in the previous cycle */
};

/* Last branch records (SDM volume 3, "Last Branch, Interrupt, and Exception Recording"). */
struct lab_records {
    Bit64u select, top;         /* MSR_LBR_SELECT, MSR_LASTBRANCH_TOS */
    Bit64u from[LAB_RECORDS], to[LAB_RECORDS], info[LAB_RECORDS];

    Bit64u *at(Bit32u index);   /* the register of an MSR, or NULL */
};

struct PMUModel;

class lab_pmu_t {
public:
    void begin(const bxInstruction_c *i, Bit64u icount, bool user)
    {
        insn = i;
        if (in != user)
            enter(user, icount);
    }

    void retire(Bit64u icount)
    {
        retired++;
        round(icount);
    }

    /* A round of a REP instruction, or the end of an instruction: one cycle. */
    void round(Bit64u icount)
    {
        if (icount + 1 >= deadline)
            check(icount + 1);
    }

    /* A REP instruction is interrupted. It will be reported as retired. */
    void unfinished() { retired--; }

    void conditional(Bit64u ip, Bit64u target, bool taken)
    {
        conditionals++;
        if (watches_branches)
            watch(taken ? TAKEN : NOT_TAKEN, ip, target);
    }

    void unconditional(unsigned what, Bit64u ip, Bit64u target)
    {
        unconditionals++;
        if (watches_branches)
            watch(what, ip, target);
    }

    void far_branch(Bit64u ip, Bit64u target)
    {
        unconditionals++;
        if (watches_branches)
            watch(FAR_BRANCH, ip, target);
    }

    void access(Bit64u linear, unsigned len)
    {
        if (caches && insn)
            access_lines(linear, len);
    }

    /* The present instruction does not retire. What follows is the kernel's. */
    void leave(Bit64u icount)
    {
        insn = NULL;
        if (in != KERNEL)
            enter(KERNEL, icount);
    }

    void no_instruction() { insn = NULL; }

    /* An interrupt or NMI is delivered. Not by the SDM a branch; see silicon mode. */
    void interrupted() { modes[KERNEL].n[LAB_BRANCHES] += silicon.interrupt_branch; }

    /* A VM exit, or a halt: an interrupt that is under way may come now, or does. */
    void exited(Bit64u icount)
    {
        if (pmi_due != NEVER && lab_silicon_one_in(&silicon, cpu, silicon.pmi_at_exit))
            interrupt_now(icount);
    }
    void halted(Bit64u icount)
    {
        if (pmi_due != NEVER)
            interrupt_now(icount);
    }

    void new_address_space();
    void reset(unsigned cpu, Bit64u icount);

    /* Registers. The first two return 1: done, 0: #GP, -1: not the PMU's. */
    int rdmsr(Bit32u index, Bit64u *value);
    int wrmsr(Bit32u index, Bit64u value);
    bool rdpmc(Bit32u index, Bit64u *value);

    static void cpuid_leaf_a(Bit32u *eax, Bit32u *ebx, Bit32u *ecx, Bit32u *edx);

    /* VM entries and exits: IA32_PERF_GLOBAL_CTRL and IA32_DEBUGCTL. */
    bool global_ctrl_is_valid(Bit64u value) const;
    Bit64u global_ctrl() const { return global_control; }
    void load_global_ctrl(Bit64u value);
    Bit64u debugctl() const { return debug_control; }
    void load_debugctl(Bit64u value);

private:
    /* Kinds of branches, beside Bochs' own names for unconditional ones. */
    enum { NOT_TAKEN = 1, TAKEN = 2, FAR_BRANCH = 3 };

    /* Modes. NOWHERE is that of an instruction that is booked already. */
    enum { KERNEL = 0, USER = 1, NOWHERE = 2 };

    static const Bit64u NEVER = ~BX_CONST64(0);

    Bit8u in;                       /* mode in which the present instruction began */
    bool predicts, caches;          /* a counter that is on needs a model */
    bool watches_branches;          /* one of them, or the records do */
    unsigned cpu;
    const bxInstruction_c *insn;    /* the present one; NULL between them */
    /* Events of this mode that are not in `mode->n` yet. */
    Bit64u retired, unconditionals, conditionals;
    Bit64u deadline;                /* that of the mode */
    lab_mode *mode;
    lab_records records;
    lab_mode modes[2];              /* kernel, user */
    lab_mode nowhere;
    Bit64u since;                   /* icount up to which cycles are booked */
    lab_counter counters[LAB_COUNTERS];
    Bit64u select[LAB_GENERAL], fixed_control, global_control, global_status;
    Bit64u debug_control;
    LabSilicon silicon;
    Bit64u pmi_due;                 /* icount at which an overflow's interrupt comes */
    PMUModel *model = NULL;

    void attribute(Bit64u now);
    void enter(unsigned next, Bit64u icount);
    void check(Bit64u now);
    void book(Bit64u now);
    void add(lab_counter *counter, Bit64u cycles, Bit64u events);
    void overflow(unsigned n, Bit64u now);
    void interrupt(Bit64u now);
    void interrupt_later(Bit64u now);
    void interrupt_now(Bit64u now);
    void arm(Bit64u now);
    void retire_now();
    void configure();
    lab_counter *counter_at(Bit32u index, bool *full_width);
    Bit64u in_use() const;
    bool needs(lab_event event) const;
    void watch(unsigned what, Bit64u ip, Bit64u target);
    bool is_recorded(unsigned what) const;
    void access_lines(Bit64u linear, unsigned len);
};

#endif
