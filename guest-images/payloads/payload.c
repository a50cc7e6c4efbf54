// A bare-metal program that does what its command line says, one word after the other, and reports on COM1.
// It exercises a machine monitor's run loop without an operating system. `../src/payloads.rs` lists the words.

#include "payload.h"

enum { I8042 = 0x64, PIC1 = 0x20, PIC2 = 0xa0 };

struct multiboot {
    uint32_t flags, mem_lower, mem_upper, boot_device, cmdline, mods_count, mods_addr, syms[4], mmap_length, mmap_addr;
};
struct module { uint32_t start, end, string, reserved; };
struct region { uint32_t size; uint64_t base, length; uint32_t type; } __attribute__((packed));

static volatile uint32_t timer_interrupts, serial_interrupts;

static void outw(uint16_t port, uint16_t value) { __asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port)); }
static void outl(uint16_t port, uint32_t value) { __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port)); }
static uint16_t inw(uint16_t port) { uint16_t v; __asm__ volatile("inw %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static uint32_t inl(uint16_t port) { uint32_t v; __asm__ volatile("inl %1, %0" : "=a"(v) : "Nd"(port)); return v; }

void on_timer(void) { timer_interrupts++; apic_write(APIC_EOI, 0); }
void on_serial(void) {
    serial_interrupts++;
    while (inb(COM1 + 5) & 1) put((char)inb(COM1));
    outb(PIC1, 0x20);
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
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_TIMER_DIVIDE, 0xb);         // by 1
    for (uint32_t i = 0; i < times; i++) {
        uint32_t before = timer_interrupts;
        apic_write(APIC_LVT_TIMER, VECTOR_TIMER);   // one shot
        apic_write(APIC_TIMER_START, 20000);
        // Interrupts open only at `hlt`, so that none is lost between the look and the sleep.
        while (timer_interrupts == before) __asm__ volatile("sti; hlt; cli" ::: "memory");
    }
    say("timer "); decimal(timer_interrupts); put('\n');
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
    else if (is(word, "x2apic")) use_x2apic();
    else if ((at = is(word, "count"))) count(at, loop_here);
    else if ((at = is(word, "count-user"))) count(at, loop_as_user);
    else if ((at = is(word, "pmi"))) take_overflows(at);
    else if ((at = is(word, "fuzz-msrs"))) fuzz_msrs(at);
    else if ((at = is(word, "flood"))) flood(at);
    else if ((at = is(word, "rearm"))) rearm(at);
    else if ((at = is(word, "reprogram"))) reprogram(at);
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
        uint32_t leaf = number(&at);
        struct cpuid said = cpuid(leaf, number(&at));
        say("cpuid "); hex(leaf, 8); put(' '); hex(said.a, 8); put(' '); hex(said.b, 8); put(' ');
        hex(said.c, 8); put(' '); hex(said.d, 8); put('\n');
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
        loop_here(number(&at));
    } else if (is(word, "spin")) for (;;) __asm__ volatile("");
    else if (is(word, "halt")) for (;;) __asm__ volatile("cli; hlt");
    else if (is(word, "reset")) { outb(I8042, 0xfe); for (;;) __asm__ volatile("hlt"); }
    else if (is(word, "triple")) {
        struct { uint16_t limit; uint32_t base; } __attribute__((packed)) none = {0, 0};
        __asm__ volatile("lidt %0; ud2" : : "m"(none));
    } else if ((at = is(word, "exit"))) outb(DEBUG_EXIT, (uint8_t)number(&at));
}

void payload_main(uint32_t magic, const struct multiboot *info) {
    start_cpu();
    const char *word = info->flags & 4 ? (const char *)info->cmdline : "hello";
    while (*word) {
        do_word(word, info, magic);
        while (*word && *word != ' ') word++;
        while (*word == ' ') word++;
    }
    outb(DEBUG_EXIT, 0);
    for (;;) __asm__ volatile("cli; hlt");
}
