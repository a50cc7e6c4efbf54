/*
 * What Bochs tells the lab CPU's performance-monitoring unit while it executes.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * Bochs calls these macros wherever it was compiled with instrumentation (see
 * instrument/instrumentation.txt). Those that are empty here are not needed.
 */
#ifndef LAB_INSTRUMENT_H
#define LAB_INSTRUMENT_H

class bxInstruction_c;

#include "pmu.h"

#define LAB_PMU(cpu_id) (BX_CPU_THIS_PTR lab_pmu)

/* One instruction: where it begins and, if it retires, where it has ended. */
#define BX_INSTR_BEFORE_EXECUTION(cpu_id, i) \
    LAB_PMU(cpu_id).begin(i, BX_CPU_THIS_PTR icount, BX_CPU_THIS_PTR user_pl)
#define BX_INSTR_AFTER_EXECUTION(cpu_id, i) \
    LAB_PMU(cpu_id).retire(BX_CPU_THIS_PTR icount)
#define BX_INSTR_REPEAT_ITERATION(cpu_id, i) \
    LAB_PMU(cpu_id).round(BX_CPU_THIS_PTR icount)

/* Branches. Bochs calls these when nothing can keep them from retiring. */
#define BX_INSTR_CNEAR_BRANCH_TAKEN(cpu_id, ip, target) \
    LAB_PMU(cpu_id).conditional(ip, target, true)
#define BX_INSTR_CNEAR_BRANCH_NOT_TAKEN(cpu_id, ip) \
    LAB_PMU(cpu_id).conditional(ip, 0, false)
#define BX_INSTR_UCNEAR_BRANCH(cpu_id, what, ip, target) \
    LAB_PMU(cpu_id).unconditional(what, ip, target)
#define BX_INSTR_FAR_BRANCH(cpu_id, what, prev_cs, prev_ip, new_cs, new_ip) \
    LAB_PMU(cpu_id).far_branch(prev_ip, new_ip)

#define BX_INSTR_LIN_ACCESS(cpu_id, linear, phy, len, memtype, rw) \
    LAB_PMU(cpu_id).access(linear, len)

/* Events. The frames that they push are not an instruction's operands. */
#define BX_INSTR_EXCEPTION(cpu_id, vector, error_code) \
    LAB_PMU(cpu_id).leave(BX_CPU_THIS_PTR icount)
#define BX_INSTR_INTERRUPT(cpu_id, vector) LAB_PMU(cpu_id).no_instruction()
#define BX_INSTR_HWINTERRUPT(cpu_id, vector, cs, eip) LAB_PMU(cpu_id).interrupted()
#define BX_INSTR_VMEXIT(cpu_id, reason, qualification) \
    (LAB_PMU(cpu_id).leave(BX_CPU_THIS_PTR icount), LAB_PMU(cpu_id).exited(BX_CPU_THIS_PTR icount))
#define BX_INSTR_HLT(cpu_id) LAB_PMU(cpu_id).halted(BX_CPU_THIS_PTR icount)
#define BX_INSTR_TLB_CNTRL(cpu_id, what, value) \
    ((what) == BX_INSTR_MOV_CR3 ? LAB_PMU(cpu_id).new_address_space() : (void)0)
#define BX_INSTR_RESET(cpu_id, type) \
    ((type) == BX_RESET_HARDWARE ? LAB_PMU(cpu_id).reset(cpu_id, BX_CPU_THIS_PTR icount) : (void)0)

#define BX_INSTR_INIT_ENV()
#define BX_INSTR_EXIT_ENV()
#define BX_INSTR_INITIALIZE(cpu_id)
#define BX_INSTR_EXIT(cpu_id)
#define BX_INSTR_MWAIT(cpu_id, addr, len, flags)
#define BX_INSTR_DEBUG_PROMPT()
#define BX_INSTR_DEBUG_CMD(cmd)
#define BX_INSTR_OPCODE(cpu_id, i, opcode, len, is32, is64)
#define BX_INSTR_CLFLUSH(cpu_id, laddr, paddr)
#define BX_INSTR_CACHE_CNTRL(cpu_id, what)
#define BX_INSTR_PREFETCH_HINT(cpu_id, what, seg, offset)
#define BX_INSTR_PHY_ACCESS(cpu_id, phy, len, memtype, rw)
#define BX_INSTR_INP(addr, len)
#define BX_INSTR_INP2(addr, len, val)
#define BX_INSTR_OUTP(addr, len, val)
#define BX_INSTR_WRMSR(cpu_id, addr, value)

#endif
