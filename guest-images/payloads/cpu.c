// Processors: descriptor tables, interrupts and exceptions, and jobs that run on all processors.

#include "payload.h"

struct gate { uint16_t low, selector, flags, high; };
// A task state segment, of which only the stack for interrupts from user mode is used (APM volume 2, section 12.2.4).
struct task { uint32_t link, esp0, ss0, unused[23]; };
struct descriptor { uint16_t limit, base; uint8_t base_16, type, limit_16, base_24; };
// The stack at an exception: the registers that `pusha` pushes, the error code and the return address.
struct fault { uint32_t registers[8], code, eip; };

enum { INTERRUPT_GATE = 0x8e00, USER_INTERRUPT_GATE = 0xee00, AVAILABLE_TASK = 0x89, VECTOR_NMI = 2 };

extern char exception_6[], exception_13[], exception_14[], interrupt_on_timer[], interrupt_on_serial[], interrupt_on_work[];
extern char interrupt_on_nmi[], interrupt_on_performance_interrupt[], user_done[];
extern char rdmsr_at[], rdpmc_at[], wrmsr_at[], faulted[], trampoline[], trampoline_end[];
extern struct descriptor gdt[];

static struct gate idt[256];
static struct task tasks[PROCESSORS];
static volatile uint32_t online = 1, busy;
static volatile uint8_t has_work[PROCESSORS];
static void (*volatile current_job)(void);
static void (*volatile pmu_handler)(const struct frame *frame) = no_pmu_interrupt;

static void set_gate(int vector, const char *handler, uint16_t flags) {
    uint32_t at = (uint32_t)handler;
    idt[vector] = (struct gate){(uint16_t)at, KERNEL_CODE, flags, (uint16_t)(at >> 16)};
}

static void load_tables(uint32_t processor) {
    struct { uint16_t limit; uint32_t base; } __attribute__((packed)) pointer = {sizeof idt - 1, (uint32_t)idt};
    uint16_t selector = (uint16_t)(TASKS + 8 * processor);
    uint32_t at = (uint32_t)&tasks[processor];
    tasks[processor].ss0 = KERNEL_DATA;
    gdt[selector / 8] = (struct descriptor){
        sizeof(struct task) - 1, (uint16_t)at, (uint8_t)(at >> 16), AVAILABLE_TASK, 0, (uint8_t)(at >> 24)};
    __asm__ volatile("lidt %0; ltr %1" : : "m"(pointer), "r"(selector) : "memory");
}

void start_cpu(void) {
    set_gate(6, exception_6, INTERRUPT_GATE);
    set_gate(13, exception_13, INTERRUPT_GATE);
    set_gate(14, exception_14, INTERRUPT_GATE);
    set_gate(VECTOR_NMI, interrupt_on_nmi, INTERRUPT_GATE);
    set_gate(VECTOR_SERIAL, interrupt_on_serial, INTERRUPT_GATE);
    set_gate(VECTOR_USER_DONE, user_done, USER_INTERRUPT_GATE);
    set_gate(VECTOR_TIMER, interrupt_on_timer, INTERRUPT_GATE);
    set_gate(VECTOR_WORK, interrupt_on_work, INTERRUPT_GATE);
    set_gate(VECTOR_PMU, interrupt_on_performance_interrupt, INTERRUPT_GATE);
    load_tables(0);
}

uint32_t this_processor(void) {
    uint16_t selector;
    __asm__("str %0" : "=r"(selector));
    return (selector - TASKS) / 8u;
}

uint32_t processors(void) { return online; }
uint32_t *task_stack(void) { return &tasks[this_processor()].esp0; }

// Returns the address to continue at, which is `faulted` for an instruction that may fault. Other exceptions are fatal.
uint32_t exception(uint32_t vector, struct fault fault) {
    const char *at = (const char *)fault.eip;
    if (at == rdmsr_at || at == rdpmc_at || at == wrmsr_at) return (uint32_t)faulted;
    print("exception "); print_decimal(vector); print(" at "); print_hex(fault.eip, 8);
    fail("");
}

void on_nmi(const struct frame *frame) { pmu_handler(frame); }
void on_performance_interrupt(const struct frame *frame) {
    pmu_handler(frame);
    apic_write(APIC_EOI, 0);
}
void no_pmu_interrupt(const struct frame *frame) {
    print("PMU interrupt at "); print_hex(frame->eip, 8);
    fail("");
}
void set_pmu_handler(void (*handler)(const struct frame *frame)) { pmu_handler = handler; }

void wait_for_interrupts(void) {
    __asm__ volatile("sti");
    loop_here(1000);
    __asm__ volatile("cli");
}

void on_work(void) {
    has_work[this_processor()] = 1;
    apic_write(APIC_EOI, 0);
}

void processor_main(uint32_t processor) {
    load_tables(processor);
    apic_write(APIC_SPURIOUS, APIC_ON);
    __atomic_fetch_add(&online, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        // `sti` takes effect after `hlt` has started, so no interrupt is lost between the check and `hlt`.
        while (!has_work[processor]) __asm__ volatile("sti; hlt; cli" ::: "memory");
        has_work[processor] = 0;
        current_job();
        __atomic_fetch_sub(&busy, 1, __ATOMIC_SEQ_CST);
    }
}

void on_all_processors(void (*job)(void)) {
    current_job = job;
    busy = online - 1;
    if (busy) apic_write(APIC_ICR, 0xc4000 | VECTOR_WORK);
    job();
    while (busy) __asm__ volatile("pause");
}

void start_processors(uint32_t expected) {
    for (char *from = trampoline, *to = (char *)0x8000; from < trampoline_end;) *to++ = *from++;
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_ICR, 0xc4500);              // INIT to all others
    for (volatile uint32_t i = 0; i < 10000; i++) {}
    apic_write(APIC_ICR, 0xc4608);              // start at page 8
    for (volatile uint32_t i = 0; i < 100000 && online < expected; i++) {}
    apic_write(APIC_ICR, 0xc4608);
    // The host may not have a CPU for them at once.
    for (volatile uint32_t i = 0; i < 20000000 && online < expected; i++) __asm__ volatile("pause");
    print("processors "); print_decimal(online); put_char('\n');
}
