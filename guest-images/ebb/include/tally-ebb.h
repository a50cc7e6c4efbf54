/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Event-based branches in Tally's guests, for C on x86-64: when a counter overflows, the thread goes on at a handler
 * of its own, without a signal and without its kernel. docs/ebb.md describes the interface.
 *
 * One source file of a program defines TALLY_EBB_IMPLEMENTATION before it includes this file.
 *
 *     static void sample(const struct tally_ebb_branch *branch, void *argument) { ... }
 *
 *     int event;
 *     if (tally_ebb_begin(sample, NULL) == 0 && (event = tally_ebb_open(0xc0, 100000)) >= 0) {
 *         tally_ebb_enable();
 *         if (tally_ebb_start(event) == 0) { ... tally_ebb_stop(event); }
 *         tally_ebb_end();
 *     }
 *
 * Functions that can fail return a negative errno: EINVAL for what branches do not have and without tally_ebb_begin,
 * EBUSY if the thread has branches already or uses GS for something else, ENOSPC without a free slot, ENODEV where nobody
 * serves the thread's block.
 */
#ifndef TALLY_EBB_H
#define TALLY_EBB_H

#include <linux/perf_event.h>
#include <stdint.h>

/* The flag in an event's code: counter mask 255 and edge detect. */
#define TALLY_EBB_FLAG (0xffull << 24 | 1ull << 18)
#define TALLY_EBB_SLOTS 8
/* Shortest period: the handler's own instructions count, too. */
#define TALLY_EBB_SHORTEST_PERIOD 1000

/* Bits of the control word (BESCR). */
#define TALLY_EBB_GE (1ull << 63)
#define TALLY_EBB_PME (1ull << 32)
#define TALLY_EBB_PMEO (1ull << 0)

/* Where the thread was. */
struct tally_ebb_branch {
    uint64_t instruction, stack, frame;
};

/* Runs between any two instructions, like the handler of a signal, and may do what such a handler may do. */
typedef void tally_ebb_handler(const struct tally_ebb_branch *branch, void *argument);

struct tally_ebb_slot {
    volatile uint64_t event, period, left, overflows;
};

/* The block of a thread, and behind it what this library keeps. */
struct tally_ebb_page {
    volatile uint64_t magic, address, thread, control, handler, return_address, reserved[2];
    struct tally_ebb_slot slots[TALLY_EBB_SLOTS];
    tally_ebb_handler *call;
    void *argument;
    uint64_t components, state_size;
    int events[TALLY_EBB_SLOTS];
};

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the calling thread a block. Branches are disabled at first. */
int tally_ebb_begin(tally_ebb_handler *handler, void *argument);
/* Closes the thread's events, and takes its block away. */
void tally_ebb_end(void);
/* Opens an event by its raw code, for the calling thread; stopped at first. Returns its file descriptor. */
int tally_ebb_open(uint64_t event, uint64_t period);
/* Closes an event, and frees its slot. */
void tally_ebb_close(int event);
/* Starts and stops an event. If branches are enabled, stopping handles an overflow whose branch has not come by then:
 * the interrupts of real processors are late, and there is none once the event stands still. */
int tally_ebb_start(int event);
int tally_ebb_stop(int event);
/* Enables branches: an overflow that came while they were disabled is handled now. */
void tally_ebb_enable(void);
void tally_ebb_disable(void);
/* The thread's block, or NULL. */
struct tally_ebb_page *tally_ebb_page(void);
/* Returns 0 if such an event, opened for a task on a CPU, can have branches. */
int tally_ebb_check(const struct perf_event_attr *attr, int task, int cpu);

#ifdef __cplusplus
}
#endif

#ifdef TALLY_EBB_IMPLEMENTATION

#include <asm/prctl.h>
#include <cpuid.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void tally_ebb_entry(void);

/* Nothing of the thread's may be changed: not the 128 bytes below its stack pointer, no register and no flag. A branch
 * may come again from the call on: all that is needed is on the stack then, and RET takes the address from there. */
__asm__(".text\n"
        ".globl tally_ebb_entry\n"
        ".type tally_ebb_entry, @function\n"
        "tally_ebb_entry:\n"
        "lea -128(%rsp), %rsp\n"
        "pushq %gs:40\n"
        "pushfq\n"
        "cld\n"
        "push %rax\npush %rcx\npush %rdx\npush %rsi\npush %rdi\n"
        "push %r8\npush %r9\npush %r10\npush %r11\npush %rbx\npush %rbp\n"
        "mov %rsp, %rdi\n"
        "mov %rsp, %rbp\n"
        "sub %gs:344, %rsp\n"
        "and $-64, %rsp\n"
        "xor %eax, %eax\n"
        "mov $512, %ebx\n"
        "1: mov %rax, (%rsp,%rbx)\n"
        "add $8, %ebx\n"
        "cmp $576, %ebx\n"
        "jne 1b\n"
        /* In a child that the handler has made, the block is empty. */
        "mov %gs:336, %ebx\n"
        "mov %ebx, %eax\n"
        "xor %edx, %edx\n"
        "xsave64 (%rsp)\n"
        "call tally_ebb_dispatch\n"
        "mov %ebx, %eax\n"
        "xor %edx, %edx\n"
        "xrstor64 (%rsp)\n"
        "mov %rbp, %rsp\n"
        "pop %rbp\npop %rbx\npop %r11\npop %r10\npop %r9\npop %r8\n"
        "pop %rdi\npop %rsi\npop %rdx\npop %rcx\npop %rax\n"
        "popfq\n"
        "ret $128\n"
        ".size tally_ebb_entry, . - tally_ebb_entry\n");

/* What the code above relies on. */
_Static_assert(offsetof(struct tally_ebb_page, return_address) == 40, "EBBRR");
_Static_assert(offsetof(struct tally_ebb_page, components) == 336, "components");
_Static_assert(offsetof(struct tally_ebb_page, state_size) == 344, "their size");

/* This program has had a block. */
static volatile int tally_ebb_begun;
/* The thread's block. A child process finds it empty. */
static __thread struct tally_ebb_page *tally_ebb_mine;

struct tally_ebb_page *tally_ebb_page(void)
{
    struct tally_ebb_page *page = tally_ebb_mine;
    return page && page->address == (uint64_t)page ? page : NULL;
}

static void tally_ebb_call(struct tally_ebb_page *page, const struct tally_ebb_branch *branch)
{
    __atomic_fetch_and(&page->control, ~TALLY_EBB_PMEO, __ATOMIC_RELAXED);
    page->call(branch, page->argument);
}

/* Enables branches. Returns whether the caller has to handle an overflow that came while they were disabled; they are
 * disabled again then. */
static int tally_ebb_enable_or_take(struct tally_ebb_page *page)
{
    const uint64_t enabled = TALLY_EBB_GE | TALLY_EBB_PME;
    for (;;) {
        __atomic_fetch_or(&page->control, enabled, __ATOMIC_RELEASE);
        if (!(page->control & TALLY_EBB_PMEO))
            return 0;
        if (__atomic_fetch_and(&page->control, ~enabled, __ATOMIC_ACQ_REL) & TALLY_EBB_PMEO)
            return 1;
    }
}

/* `frame` is what the entry has pushed, from RBP to the return address. */
__attribute__((used)) static void tally_ebb_dispatched(const uint64_t *frame)
{
    struct tally_ebb_page *page;
    const struct tally_ebb_branch branch = {
        .instruction = frame[12], .stack = (uint64_t)(frame + 13) + 128, .frame = frame[0]};
    __asm__("mov %%gs:8, %0" : "=r"(page));
    do
        tally_ebb_call(page, &branch);
    while (tally_ebb_enable_or_take(page));
}
__asm__(".set tally_ebb_dispatch, tally_ebb_dispatched\n");

/* Enables branches, and handles the overflows that came while they were disabled, for code at an address. */
static void tally_ebb_take_waiting(struct tally_ebb_page *page, void *instruction, void *frame)
{
    const struct tally_ebb_branch here = {
        .instruction = (uint64_t)instruction, .stack = (uint64_t)frame, .frame = (uint64_t)frame};
    while (tally_ebb_enable_or_take(page))
        tally_ebb_call(page, &here);
}

void tally_ebb_enable(void)
{
    struct tally_ebb_page *page = tally_ebb_page();
    if (page)
        tally_ebb_take_waiting(page, __builtin_return_address(0), __builtin_frame_address(0));
}

void tally_ebb_disable(void)
{
    struct tally_ebb_page *page = tally_ebb_page();
    if (page)
        __atomic_fetch_and(&page->control, ~(TALLY_EBB_GE | TALLY_EBB_PME), __ATOMIC_ACQUIRE);
}

int tally_ebb_begin(tally_ebb_handler *handler, void *argument)
{
    const size_t size = sizeof(struct tally_ebb_page);
    unsigned int eax, offset, ecx, edx, component;
    uint64_t base = 0;
    struct tally_ebb_page *page;
    /* A thread inherits GS from the one that has made it, if that has a block. */
    if (tally_ebb_page() || syscall(SYS_arch_prctl, ARCH_GET_GS, &base) != 0 || (base != 0 && !tally_ebb_begun))
        return -EBUSY;
    page = (struct tally_ebb_page *)mmap(NULL, size, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (page == MAP_FAILED)
        return -errno;
    /* A child finds an empty page. A block that was swapped out serves again once it is touched, so MLOCK may fail. */
    if (madvise(page, size, MADV_WIPEONFORK) != 0)
        goto failed;
    (void)mlock(page, size);
    /* x87, SSE, AVX, AVX-512. The first two are in the legacy region, which the header follows. */
    __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    page->components = eax & 0xe7;
    page->state_size = 576;
    for (component = 2; component < 8; component++)
        if (page->components >> component & 1) {
            __cpuid_count(0xd, component, eax, offset, ecx, edx);
            if (page->state_size < eax + offset)
                page->state_size = eax + offset;
        }
    page->call = handler;
    page->argument = argument;
    page->address = (uint64_t)page;
    if (syscall(SYS_arch_prctl, ARCH_GET_FS, &page->thread) != 0)
        goto failed;
    page->handler = (uint64_t)tally_ebb_entry;
    memcpy((void *)&page->magic, "TALLYEBB", 8);
    tally_ebb_begun = 1;
    if (syscall(SYS_arch_prctl, ARCH_SET_GS, page) != 0)
        goto failed;
    tally_ebb_mine = page;
    return 0;
failed:
    eax = errno;
    munmap(page, size);
    return -(int)eax;
}

void tally_ebb_end(void)
{
    struct tally_ebb_page *page = tally_ebb_page();
    if (!page)
        return;
    for (int slot = 0; slot < TALLY_EBB_SLOTS; slot++)
        if (page->slots[slot].event)
            close(page->events[slot]);
    tally_ebb_disable();
    syscall(SYS_arch_prctl, ARCH_SET_GS, 0);
    tally_ebb_mine = NULL;
    munmap(page, sizeof(*page));
}

void tally_ebb_close(int event)
{
    struct tally_ebb_page *page = tally_ebb_page();
    int slot;
    for (slot = 0; page && slot < TALLY_EBB_SLOTS; slot++)
        if (page->slots[slot].event && page->events[slot] == event) {
            (void)tally_ebb_stop(event);
            close(event);
            page->slots[slot].event = 0;
        }
}

int tally_ebb_check(const struct perf_event_attr *attr, int task, int cpu)
{
    if (attr->type != PERF_TYPE_RAW || (attr->config & TALLY_EBB_FLAG) != TALLY_EBB_FLAG || task < 0 || cpu >= 0 ||
        !attr->pinned || !attr->exclusive || !attr->exclude_kernel || attr->inherit || attr->freq ||
        attr->sample_period || attr->enable_on_exec)
        return -EINVAL;
    return 0;
}

int tally_ebb_open(uint64_t event, uint64_t period)
{
    struct tally_ebb_page *page = tally_ebb_page();
    struct perf_event_attr attr;
    int number, fd, slot = -1;
    memset(&attr, 0, sizeof(attr));
    attr.type = PERF_TYPE_RAW;
    attr.size = sizeof(attr);
    attr.config = event | TALLY_EBB_FLAG;
    attr.disabled = attr.pinned = attr.exclusive = attr.exclude_kernel = attr.exclude_hv = 1;
    if (!page || period < TALLY_EBB_SHORTEST_PERIOD)
        return -EINVAL;
    for (number = TALLY_EBB_SLOTS - 1; number >= 0; number--) {
        if (page->slots[number].event == attr.config)
            return -ENOSPC;
        if (page->slots[number].event == 0)
            slot = number;
    }
    if (slot < 0)
        return -ENOSPC;
    fd = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
    if (fd < 0)
        return -errno;
    page->events[slot] = fd;
    page->slots[slot].period = period;
    page->slots[slot].left = page->slots[slot].overflows = 0;
    page->slots[slot].event = attr.config;
    return fd;
}

int tally_ebb_start(int event)
{
    struct tally_ebb_page *page = tally_ebb_page();
    if (!page)
        return -EINVAL;
    if (ioctl(event, PERF_EVENT_IOC_ENABLE, 0) != 0)
        return -errno;
    for (int slot = 0; slot < TALLY_EBB_SLOTS; slot++)
        if (page->slots[slot].event && page->events[slot] == event && page->slots[slot].left == 0) {
            tally_ebb_stop(event);
            return -ENODEV;
        }
    return 0;
}

int tally_ebb_stop(int event)
{
    const uint64_t due = TALLY_EBB_GE | TALLY_EBB_PME | TALLY_EBB_PMEO;
    struct tally_ebb_page *page = tally_ebb_page();
    if (ioctl(event, PERF_EVENT_IOC_DISABLE, 0) != 0)
        return -errno;
    if (page && page->handler == (uint64_t)tally_ebb_entry && (page->control & due) == due)
        tally_ebb_take_waiting(page, __builtin_return_address(0), __builtin_frame_address(0));
    return 0;
}

#endif /* TALLY_EBB_IMPLEMENTATION */
#endif /* TALLY_EBB_H */
