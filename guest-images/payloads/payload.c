// A bare-metal program that executes the words of its command line in order and reports on COM1. It tests a virtual
// machine monitor without an operating system. `../src/payloads/x86_64.rs` lists the words.

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
    while (inb(COM1 + 5) & 1) put_char((char)inb(COM1));
    outb(PIC1, 0x20);
}

static void report(const char *what, uint32_t index, int worked, const uint32_t value[2]) {
    print(what); put_char(' '); print_hex(index, 8);
    if (!worked) { print(" fault\n"); return; }
    if (value) { put_char(' '); print_hex(value[1], 8); print_hex(value[0], 8); }
    else print(" ok");
    put_char('\n');
}

static void print_machine(const struct multiboot *info, uint32_t magic) {
    print("magic "); print_hex(magic, 8); print("\nflags "); print_hex(info->flags, 8);
    print("\nlower "); print_decimal(info->mem_lower);
    print(" KiB\nupper "); print_decimal(info->mem_upper); print(" KiB\n");
    if (info->flags & 4) { print("command line: "); print((const char *)info->cmdline); put_char('\n'); }
    if (info->flags & 8) {
        const struct module *module = (const struct module *)info->mods_addr;
        for (uint32_t i = 0; i < info->mods_count; i++, module++) {
            const unsigned char *byte = (const unsigned char *)module->start;
            uint32_t sum = 0;
            while (byte < (const unsigned char *)module->end) sum += *byte++;
            print("module "); print((const char *)module->string);
            print(": "); print_decimal(module->end - module->start);
            print(" bytes, sum "); print_decimal(sum);
            print(module->start & 4095 ? ", not aligned\n" : "\n");
        }
    }
    if (info->flags & 64) {
        uint32_t at = info->mmap_addr;
        while (at < info->mmap_addr + info->mmap_length) {
            const struct region *region = (const struct region *)at;
            print("memory "); print_hex64(region->base); put_char(' '); print_hex64(region->length); put_char(' ');
            print_decimal(region->type); put_char('\n');
            at += region->size + 4;
        }
    }
}

static void wait_for_timer(uint32_t times) {
    apic_write(APIC_SPURIOUS, APIC_ON);
    apic_write(APIC_TIMER_DIVIDE, 0xb);         // divide by 1
    for (uint32_t i = 0; i < times; i++) {
        uint32_t before = timer_interrupts;
        apic_write(APIC_LVT_TIMER, VECTOR_TIMER);   // one shot
        apic_write(APIC_TIMER_START, 20000);
        // `sti` takes effect after `hlt` has started, so no interrupt is lost between the check and `hlt`.
        while (timer_interrupts == before) __asm__ volatile("sti; hlt; cli" ::: "memory");
    }
    print("timer "); print_decimal(timer_interrupts); put_char('\n');
}

static void echo(int by_interrupt) {
    if (by_interrupt) {
        outb(PIC1, 0x11); outb(PIC2, 0x11);     // initialise, vectors 0x20 and 0x28, cascade on line 2
        outb(PIC1 + 1, 0x20); outb(PIC2 + 1, 0x28);
        outb(PIC1 + 1, 4); outb(PIC2 + 1, 2);
        outb(PIC1 + 1, 1); outb(PIC2 + 1, 1);
        outb(PIC1 + 1, 0xef); outb(PIC2 + 1, 0xff);
        outb(COM1 + 4, 8);                      // OUT2 enables the UART's interrupt output
        outb(COM1 + 1, 1);                      // received data
        for (uint32_t before = 0;; before = serial_interrupts) {
            while (serial_interrupts == before) __asm__ volatile("sti; hlt; cli" ::: "memory");
        }
    }
    for (;;) {
        if (!(inb(COM1 + 5) & 1)) continue;
        char c = (char)inb(COM1);
        if (c == 'q') { put_char('\n'); return; }
        put_char(c);
    }
}

static void do_word(const char *word, const struct multiboot *info, uint32_t magic) {
    const char *at;
    uint32_t value[2] = {0, 0};
    if (match_word(word, "hello")) print("Hello from the guest\n");
    else if (match_word(word, "machine")) print_machine(info, magic);
    else if (match_word(word, "echo")) echo(0);
    else if (match_word(word, "echo-irq")) echo(1);
    else if ((at = match_word(word, "timer"))) wait_for_timer(parse_number(&at));
    else if ((at = match_word(word, "smp"))) start_processors(parse_number(&at));
    else if (match_word(word, "x2apic")) { on_all_processors(enable_x2apic); access_x2apic(); }
    else if ((at = match_word(word, "count"))) count(at, loop_here);
    else if ((at = match_word(word, "count-user"))) count(at, loop_as_user);
    else if ((at = match_word(word, "pmi"))) take_overflows(at);
    else if ((at = match_word(word, "late"))) measure_lateness(at);
    else if ((at = match_word(word, "way"))) measure_way(at);
    else if ((at = match_word(word, "fuzz-msrs"))) fuzz_msrs(at);
    else if ((at = match_word(word, "flood"))) flood(at);
    else if ((at = match_word(word, "rearm"))) rearm(at);
    else if ((at = match_word(word, "reprogram"))) reprogram(at);
    else if ((at = match_word(word, "rdmsr"))) {
        uint32_t index = parse_number(&at);
        int worked = try_rdmsr(index, value);
        report("rdmsr", index, worked, value);
    } else if ((at = match_word(word, "wrmsr"))) {
        uint32_t index = parse_number(&at), high = parse_number(&at), low = parse_number(&at);
        report("wrmsr", index, try_wrmsr(index, low, high), 0);
    } else if ((at = match_word(word, "rdpmc"))) {
        uint32_t index = parse_number(&at);
        int worked = try_rdpmc(index, value);
        report("rdpmc", index, worked, value);
    } else if ((at = match_word(word, "cpuid"))) {
        uint32_t leaf = parse_number(&at);
        struct cpuid result = cpuid(leaf, parse_number(&at));
        print("cpuid "); print_hex(leaf, 8); put_char(' ');
        print_hex(result.a, 8); put_char(' '); print_hex(result.b, 8); put_char(' ');
        print_hex(result.c, 8); put_char(' '); print_hex(result.d, 8); put_char('\n');
    } else if ((at = match_word(word, "in"))) {
        uint16_t port = (uint16_t)parse_number(&at);
        uint32_t size = parse_number(&at);
        print("in "); print_hex(port, 4); put_char(' ');
        if (size == 4) print_hex(inl(port), 8);
        else if (size == 2) print_hex(inw(port), 4);
        else print_hex(inb(port), 2);
        put_char('\n');
    } else if ((at = match_word(word, "out"))) {
        uint16_t port = (uint16_t)parse_number(&at);
        uint32_t datum = parse_number(&at), size = parse_number(&at);
        if (size == 4) outl(port, datum);
        else if (size == 2) outw(port, (uint16_t)datum);
        else outb(port, (uint8_t)datum);
    } else if ((at = match_word(word, "peek"))) {
        uint32_t address = parse_number(&at);
        print("peek "); print_hex(address, 8); put_char(' ');
        print_hex(*(volatile uint32_t *)address, 8); put_char('\n');
    } else if ((at = match_word(word, "poke"))) {
        uint32_t address = parse_number(&at);
        *(volatile uint32_t *)address = parse_number(&at);
    } else if ((at = match_word(word, "jump"))) ((void (*)(void))parse_number(&at))();
    else if ((at = match_word(word, "loop"))) {
        loop_here(parse_number(&at));
    } else if (match_word(word, "spin")) for (;;) __asm__ volatile("");
    else if (match_word(word, "halt")) for (;;) __asm__ volatile("cli; hlt");
    else if (match_word(word, "reset")) { outb(I8042, 0xfe); for (;;) __asm__ volatile("hlt"); }
    else if (match_word(word, "triple")) {
        struct { uint16_t limit; uint32_t base; } __attribute__((packed)) none = {0, 0};
        __asm__ volatile("lidt %0; ud2" : : "m"(none));
    } else if ((at = match_word(word, "exit"))) outb(DEBUG_EXIT, (uint8_t)parse_number(&at));
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
