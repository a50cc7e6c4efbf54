// Declarations shared by all parts of the bare-metal payload.

#ifndef PAYLOAD_H
#define PAYLOAD_H

#include <stdint.h>

#include "segments.h"

enum { COM1 = 0x3f8, DEBUG_EXIT = 0xf4 };

static inline void outb(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static inline uint8_t inb(uint16_t port) {
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

struct cpuid { uint32_t a, b, c, d; };
static inline struct cpuid cpuid(uint32_t leaf, uint32_t subleaf) {
    struct cpuid result;
    __asm__ volatile("cpuid"
                     : "=a"(result.a), "=b"(result.b), "=c"(result.c), "=d"(result.d) : "a"(leaf), "c"(subleaf));
    return result;
}

// text.c: printing, and parsing of the command line.
void put_char(char c);
void print(const char *text);
void print_hex(uint32_t value, int digits);
void print_hex64(uint64_t value);
void print_decimal(uint32_t value);
// Prints a message and ends the virtual machine with status 0x7f on the debug-exit port.
void fail(const char *why) __attribute__((noreturn));
// Reads a decimal number, or a hexadecimal one after 0x, and skips a comma or colon after it. Returns 0 without a
// number.
uint32_t parse_number(const char **text);
// Reads two such numbers, the high half first.
uint64_t parse_number64(const char **text);
// If the word is `name` or `name=...`, returns the text after it (and after the '='), otherwise 0.
const char *match_word(const char *word, const char *name);
// If the text starts with `name` and a comma, returns the text after them, otherwise 0.
const char *match_argument(const char *text, const char *name);

// instructions.S: these return 1, or 0 if the instruction faulted.
int try_rdmsr(uint32_t index, uint32_t value[2]);
int try_rdpmc(uint32_t index, uint32_t value[2]);
int try_wrmsr(uint32_t index, uint32_t low, uint32_t high);
// A loop of 2 instructions per round, in kernel mode, or in user mode at `user_loop` with one more instruction that
// ends it.
void loop_here(uint32_t rounds);
void loop_as_user(uint32_t rounds);
// The same with four instructions, which keeps the lower half of the time-stamp counter in `user_time`.
void clock_as_user(uint32_t rounds);
extern volatile uint32_t user_time;
extern char user_loop[];

// The interrupted context: the registers in the order of `pusha`, and the interrupt's stack frame.
struct frame { uint32_t edi, esi, ebp, esp, ebx, edx, ecx, eax, eip, cs, eflags; };

// cpu.c: processors, interrupts and exceptions.
enum { VECTOR_SERIAL = 0x24, VECTOR_TIMER = 0x40, VECTOR_WORK = 0x41, VECTOR_PMU = 0x50 };
void start_cpu(void);
void start_processors(uint32_t expected);
uint32_t processors(void);
// Returns the index of this processor, in the order in which they were started.
uint32_t this_processor(void);
// Runs a job on all processors and waits until all are done.
void on_all_processors(void (*job)(void));
// Sets the handler of PMU interrupts and NMIs. The default, `no_pmu_interrupt`, reports an unexpected interrupt and
// fails.
void set_pmu_handler(void (*handler)(const struct frame *frame));
void no_pmu_interrupt(const struct frame *frame);
// Gives pending interrupts time to be delivered.
void wait_for_interrupts(void);

// apic.c: the local APIC. Registers are named by their xAPIC (memory-mapped) offsets in both modes.
enum { APIC_EOI = 0xb0, APIC_SPURIOUS = 0xf0, APIC_ICR = 0x300, APIC_LVT_TIMER = 0x320, APIC_LVT_PMU = 0x340 };
enum { APIC_TIMER_START = 0x380, APIC_TIMER_DIVIDE = 0x3e0 };
enum { APIC_ON = 0x1ff, APIC_OFF = 0xff, LVT_NMI = 0x400, LVT_MASKED = 0x10000 };
enum { MSR_APIC_BASE = 0x1b, APIC_BASE_ON = 1 << 11, APIC_BASE_X2 = 1 << 10 };
uint32_t apic_read(uint32_t offset);
void apic_write(uint32_t offset, uint32_t value);
// Switch all processors to x2APIC mode: one is called on each, then the other one.
void enable_x2apic(void);
void access_x2apic(void);

// msr.c: MSR accesses, of which a fault ends the virtual machine.
uint64_t read_msr(uint32_t msr);
void write_msr(uint32_t msr, uint64_t value);

// counting.c: the words that count.
void count(const char *at, void (*loop)(uint32_t rounds));
void take_overflows(const char *at);
void measure_lateness(const char *at);
void measure_way(const char *at);

// hostile.c: words that do what a well-behaved guest would not.
void fuzz_msrs(const char *at);
void flood(const char *at);
void rearm(const char *at);
void reprogram(const char *at);

#endif
