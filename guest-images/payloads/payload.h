// What the parts of the bare-metal payload share.

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
    struct cpuid said;
    __asm__ volatile("cpuid" : "=a"(said.a), "=b"(said.b), "=c"(said.c), "=d"(said.d) : "a"(leaf), "c"(subleaf));
    return said;
}

// text.c: what is printed, and the words of the command line.
void put(char c);
void say(const char *text);
void hex(uint32_t value, int digits);
void hex64(uint64_t value);
void decimal(uint32_t value);
// Ends the machine, whose words cannot be done.
void give_up(const char *why) __attribute__((noreturn));
// A number, decimal or with 0x in front, and the character that ends it; 0 if there is none.
uint32_t number(const char **text);
// Two of them, the high half first.
uint64_t number64(const char **text);
// The rest of the word after `name`, which ends it or is followed by '='; 0 if the word is another.
const char *is(const char *word, const char *name);
// The rest behind `name` and a comma; 0 if it is another name.
const char *names(const char *text, const char *name);

// instructions.S: 1 if it worked, 0 if it faulted.
int try_rdmsr(uint32_t index, uint32_t value[2]);
int try_rdpmc(uint32_t index, uint32_t value[2]);
int try_wrmsr(uint32_t index, uint32_t low, uint32_t high);
// A loop of 2 instructions, in this mode, or from `user_loop` on in the user's, with one more that ends it.
void loop_here(uint32_t rounds);
void loop_as_user(uint32_t rounds);
extern char user_loop[];

// What an interrupt found, with the registers in the order of `pusha`.
struct frame { uint32_t edi, esi, ebp, esp, ebx, edx, ecx, eax, eip, cs, eflags; };

// cpu.c: processors, and what interrupts them.
enum { VECTOR_SERIAL = 0x24, VECTOR_TIMER = 0x40, VECTOR_WORK = 0x41, VECTOR_PMU = 0x50 };
void start_cpu(void);
void start_processors(uint32_t expected);
uint32_t processors(void);
// Which of them this is, in the order of their start.
uint32_t this_processor(void);
// Has all of them do the same, and waits.
void on_all(void (*job)(void));
// What is to be done about the PMU's interrupts, NMI or not. None is expected unless a word says otherwise.
void set_pmu_handler(void (*handler)(const struct frame *frame));
void no_pmu_interrupt(const struct frame *frame);
// Gives interrupts that are still to come the time for it.
void settle(void);

// apic.c: the local APIC's registers by their offsets in memory, in either of its modes.
enum { APIC_EOI = 0xb0, APIC_SPURIOUS = 0xf0, APIC_ICR = 0x300, APIC_LVT_TIMER = 0x320, APIC_LVT_PMU = 0x340 };
enum { APIC_TIMER_START = 0x380, APIC_TIMER_DIVIDE = 0x3e0 };
enum { APIC_ON = 0x1ff, APIC_OFF = 0xff, LVT_NMI = 0x400, LVT_MASKED = 0x10000 };
enum { MSR_APIC_BASE = 0x1b, APIC_BASE_ON = 1 << 11, APIC_BASE_X2 = 1 << 10 };
uint32_t apic_read(uint32_t offset);
void apic_write(uint32_t offset, uint32_t value);
// Switches all processors to the mode in which the registers are MSRs.
void use_x2apic(void);

// pmu.c: model-specific registers, of which a fault ends the machine, and the words that count.
uint64_t get(uint32_t msr);
void set(uint32_t msr, uint64_t value);
void count(const char *at, void (*loop)(uint32_t rounds));
void take_overflows(const char *at);

// hostile.c: words that a well-behaved guest would not say.
void fuzz_msrs(const char *at);
void flood(const char *at);
void rearm(const char *at);
void reprogram(const char *at);

#endif
