// A bare-metal program that does what its command line says, one word after the other, and reports on COM1.
// It exercises a machine monitor's run loop without an operating system. `../src/payloads.rs` lists the words.

#include <stdint.h>

enum { COM1 = 0x3f8, DEBUG_EXIT = 0xf4, I8042 = 0x64, PIC1 = 0x20, PIC2 = 0xa0 };
enum { VECTOR_TIMER = 0x40, VECTOR_SERIAL = 0x24 };

struct multiboot {
    uint32_t flags, mem_lower, mem_upper, boot_device, cmdline, mods_count, mods_addr, syms[4], mmap_length, mmap_addr;
};
struct module { uint32_t start, end, string, reserved; };
struct region { uint32_t size; uint64_t base, length; uint32_t type; } __attribute__((packed));
struct gate { uint16_t low, selector, flags, high; };

extern char exception_6[], exception_13[], exception_14[], interrupt_on_timer[], interrupt_on_serial[];
extern char rdmsr_at[], rdpmc_at[], wrmsr_at[], faulted[], trampoline[], trampoline_end[];
int try_rdmsr(uint32_t index, uint32_t value[2]);
int try_rdpmc(uint32_t index, uint32_t value[2]);
int try_wrmsr(uint32_t index, uint32_t low, uint32_t high);

static struct gate idt[256];
static volatile uint32_t timer_interrupts, serial_interrupts;

static void outb(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static void outw(uint16_t port, uint16_t value) { __asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port)); }
static void outl(uint16_t port, uint32_t value) { __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port)); }
static uint8_t inb(uint16_t port) { uint8_t v; __asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static uint16_t inw(uint16_t port) { uint16_t v; __asm__ volatile("inw %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static uint32_t inl(uint16_t port) { uint32_t v; __asm__ volatile("inl %1, %0" : "=a"(v) : "Nd"(port)); return v; }

static volatile uint32_t *apic(uint32_t offset) { return (volatile uint32_t *)(0xfee00000u + offset); }

static void put(char c) { outb(COM1, (uint8_t)c); }
static void say(const char *text) { while (*text) put(*text++); }
static void hex(uint32_t value, int digits) {
    while (digits--) put("0123456789abcdef"[(value >> (4 * digits)) & 15]);
}
static void hex64(uint64_t value) { hex((uint32_t)(value >> 32), 8); hex((uint32_t)value, 8); }
static void decimal(uint32_t value) {
    if (value >= 10) decimal(value / 10);
    put((char)('0' + value % 10));
}

static void set_gate(int vector, const char *handler) {
    uint32_t at = (uint32_t)handler;
    idt[vector] = (struct gate){(uint16_t)at, 0x08, 0x8e00, (uint16_t)(at >> 16)};
}

// Where to continue: after one of the instructions that may fault, or nowhere.
uint32_t exception(uint32_t vector, uint32_t edi, uint32_t esi, uint32_t ebp, uint32_t esp, uint32_t ebx, uint32_t edx,
                   uint32_t ecx, uint32_t eax, uint32_t code, uint32_t eip) {
    (void)edi, (void)esi, (void)ebp, (void)esp, (void)ebx, (void)edx, (void)ecx, (void)eax, (void)code;
    const char *at = (const char *)eip;
    if (at == rdmsr_at || at == rdpmc_at || at == wrmsr_at) return (uint32_t)faulted;
    say("exception "); decimal(vector); say(" at "); hex(eip, 8); put('\n');
    outb(DEBUG_EXIT, 0x7f);
    for (;;) __asm__ volatile("cli; hlt");
}

void on_timer(void) { timer_interrupts++; *apic(0xb0) = 0; }
void on_serial(void) {
    serial_interrupts++;
    while (inb(COM1 + 5) & 1) put((char)inb(COM1));
    outb(PIC1, 0x20);
}

static uint32_t number(const char **text) {
    uint32_t value = 0, base = 10;
    const char *at = *text;
    if (at[0] == '0' && at[1] == 'x') { base = 16; at += 2; }
    for (;; at++) {
        uint32_t digit;
        if (*at >= '0' && *at <= '9') digit = (uint32_t)(*at - '0');
        else if (base == 16 && *at >= 'a' && *at <= 'f') digit = (uint32_t)(*at - 'a' + 10);
        else break;
        value = value * base + digit;
    }
    *text = *at == ',' || *at == ':' ? at + 1 : at;
    return value;
}

// The rest of the word after `name`, which ends it or is followed by '='; 0 if the word is another.
static const char *is(const char *word, const char *name) {
    while (*name) if (*word++ != *name++) return 0;
    if (*word == '=') return word + 1;
    return *word == ' ' || *word == 0 ? word : 0;
}

static void report(const char *what, uint32_t index, int worked, const uint32_t value[2]) {
    say(what); put(' '); hex(index, 8);
    if (!worked) { say(" fault\n"); return; }
    if (value) { put(' '); hex(value[1], 8); hex(value[0], 8); }
    else say(" ok");
    put('\n');
}

static void say_machine(const struct multiboot *info, uint32_t magic) {
    say("magic "); hex(magic, 8); say("\nflags "); hex(info->flags, 8);
    say("\nlower "); decimal(info->mem_lower); say(" KiB\nupper "); decimal(info->mem_upper); say(" KiB\n");
    if (info->flags & 4) { say("command line: "); say((const char *)info->cmdline); put('\n'); }
    if (info->flags & 8) {
        const struct module *module = (const struct module *)info->mods_addr;
        for (uint32_t i = 0; i < info->mods_count; i++, module++) {
            const unsigned char *byte = (const unsigned char *)module->start;
            uint32_t sum = 0;
            while (byte < (const unsigned char *)module->end) sum += *byte++;
            say("module "); say((const char *)module->string); say(": "); decimal(module->end - module->start);
            say(" bytes, sum "); decimal(sum);
            say(module->start & 4095 ? ", not aligned\n" : "\n");
        }
    }
    if (info->flags & 64) {
        uint32_t at = info->mmap_addr;
        while (at < info->mmap_addr + info->mmap_length) {
            const struct region *region = (const struct region *)at;
            say("memory "); hex64(region->base); put(' '); hex64(region->length); put(' ');
            decimal(region->type); put('\n');
            at += region->size + 4;
        }
    }
}

static void wait_for_timer(uint32_t times) {
    *apic(0xf0) = 0x1ff;                        // on, spurious vector 0xff
    *apic(0x3e0) = 0xb;                         // divide by 1
    for (uint32_t i = 0; i < times; i++) {
        uint32_t before = timer_interrupts;
        *apic(0x320) = VECTOR_TIMER;            // one shot
        *apic(0x380) = 20000;
        // Interrupts open only at `hlt`, so that none is lost between the look and the sleep.
        while (timer_interrupts == before) __asm__ volatile("sti; hlt; cli" ::: "memory");
    }
    say("timer "); decimal(timer_interrupts); put('\n');
}

static void start_processors(uint32_t expected) {
    volatile uint16_t *started = (volatile uint16_t *)0x7ff0;
    *started = 0;
    for (char *from = trampoline, *to = (char *)0x8000; from < trampoline_end;) *to++ = *from++;
    *apic(0xf0) = 0x1ff;
    *apic(0x300) = 0xc4500;                     // INIT to all others
    for (volatile uint32_t i = 0; i < 10000; i++) {}
    for (int again = 0; again < 2; again++) {
        *apic(0x300) = 0xc4608;                 // start at page 8
        for (volatile uint32_t i = 0; i < 100000 && *started + 1u < expected; i++) {}
    }
    say("processors "); decimal(*started + 1u); put('\n');
}

static void echo(int by_interrupt) {
    if (by_interrupt) {
        outb(PIC1, 0x11); outb(PIC2, 0x11);     // initialise, vectors 0x20 and 0x28, cascade on line 2
        outb(PIC1 + 1, 0x20); outb(PIC2 + 1, 0x28);
        outb(PIC1 + 1, 4); outb(PIC2 + 1, 2);
        outb(PIC1 + 1, 1); outb(PIC2 + 1, 1);
        outb(PIC1 + 1, 0xef); outb(PIC2 + 1, 0xff);
        outb(COM1 + 4, 8);                      // OUT2 lets the UART's interrupts through
        outb(COM1 + 1, 1);                      // received data
        for (uint32_t before = 0;; before = serial_interrupts) {
            while (serial_interrupts == before) __asm__ volatile("sti; hlt; cli" ::: "memory");
        }
    }
    for (;;) {
        if (!(inb(COM1 + 5) & 1)) continue;
        char c = (char)inb(COM1);
        if (c == 'q') { put('\n'); return; }
        put(c);
    }
}

static void do_word(const char *word, const struct multiboot *info, uint32_t magic) {
    const char *at;
    uint32_t value[2] = {0, 0};
    if (is(word, "hello")) say("Hello from the guest\n");
    else if (is(word, "machine")) say_machine(info, magic);
    else if (is(word, "echo")) echo(0);
    else if (is(word, "echo-irq")) echo(1);
    else if ((at = is(word, "timer"))) wait_for_timer(number(&at));
    else if ((at = is(word, "smp"))) start_processors(number(&at));
    else if ((at = is(word, "rdmsr"))) {
        uint32_t index = number(&at);
        int worked = try_rdmsr(index, value);
        report("rdmsr", index, worked, value);
    } else if ((at = is(word, "wrmsr"))) {
        uint32_t index = number(&at), high = number(&at), low = number(&at);
        report("wrmsr", index, try_wrmsr(index, low, high), 0);
    } else if ((at = is(word, "rdpmc"))) {
        uint32_t index = number(&at);
        int worked = try_rdpmc(index, value);
        report("rdpmc", index, worked, value);
    } else if ((at = is(word, "cpuid"))) {
        uint32_t leaf = number(&at), a = leaf, b, c = number(&at), d;
        __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        say("cpuid "); hex(leaf, 8); put(' '); hex(a, 8); put(' '); hex(b, 8); put(' '); hex(c, 8); put(' ');
        hex(d, 8); put('\n');
    } else if ((at = is(word, "in"))) {
        uint16_t port = (uint16_t)number(&at);
        uint32_t size = number(&at);
        say("in "); hex(port, 4); put(' ');
        if (size == 4) hex(inl(port), 8);
        else if (size == 2) hex(inw(port), 4);
        else hex(inb(port), 2);
        put('\n');
    } else if ((at = is(word, "out"))) {
        uint16_t port = (uint16_t)number(&at);
        uint32_t datum = number(&at), size = number(&at);
        if (size == 4) outl(port, datum);
        else if (size == 2) outw(port, (uint16_t)datum);
        else outb(port, (uint8_t)datum);
    } else if ((at = is(word, "peek"))) {
        uint32_t address = number(&at);
        say("peek "); hex(address, 8); put(' '); hex(*(volatile uint32_t *)address, 8); put('\n');
    } else if ((at = is(word, "poke"))) {
        uint32_t address = number(&at);
        *(volatile uint32_t *)address = number(&at);
    } else if ((at = is(word, "jump"))) ((void (*)(void))number(&at))();
    else if ((at = is(word, "loop"))) {
        uint32_t times = number(&at);
        __asm__ volatile("1: dec %0; jnz 1b" : "+r"(times) : : "cc");
    } else if (is(word, "spin")) for (;;) __asm__ volatile("");
    else if (is(word, "halt")) for (;;) __asm__ volatile("cli; hlt");
    else if (is(word, "reset")) { outb(I8042, 0xfe); for (;;) __asm__ volatile("hlt"); }
    else if (is(word, "triple")) {
        struct { uint16_t limit; uint32_t base; } __attribute__((packed)) none = {0, 0};
        __asm__ volatile("lidt %0; ud2" : : "m"(none));
    } else if ((at = is(word, "exit"))) outb(DEBUG_EXIT, (uint8_t)number(&at));
}

void payload_main(uint32_t magic, const struct multiboot *info) {
    struct { uint16_t limit; uint32_t base; } __attribute__((packed)) pointer = {sizeof idt - 1, (uint32_t)idt};
    set_gate(6, exception_6);
    set_gate(13, exception_13);
    set_gate(14, exception_14);
    set_gate(VECTOR_TIMER, interrupt_on_timer);
    set_gate(VECTOR_SERIAL, interrupt_on_serial);
    __asm__ volatile("lidt %0" : : "m"(pointer));

    const char *word = info->flags & 4 ? (const char *)info->cmdline : "hello";
    while (*word) {
        do_word(word, info, magic);
        while (*word && *word != ' ') word++;
        while (*word == ' ') word++;
    }
    outb(DEBUG_EXIT, 0);
    for (;;) __asm__ volatile("cli; hlt");
}
