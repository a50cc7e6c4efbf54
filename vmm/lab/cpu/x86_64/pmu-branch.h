/*
 * The kinds of branches, as both lab CPUs for x86 report them.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 */
#ifndef LAB_PMU_BRANCH_H
#define LAB_PMU_BRANCH_H

typedef enum X86PMUBranch {
    X86_PMU_COND_NOT_TAKEN,
    X86_PMU_COND_TAKEN,
    X86_PMU_JMP,
    X86_PMU_CALL,
    X86_PMU_JMP_INDIRECT,
    X86_PMU_CALL_INDIRECT,
    X86_PMU_RET,
    X86_PMU_FAR,        /* far transfers, SYSCALL and the like, interrupts */
} X86PMUBranch;

#endif
