// What is printed on COM1, and how words are read.

#include "payload.h"

void put(char c) { outb(COM1, (uint8_t)c); }
void say(const char *text) { while (*text) put(*text++); }
void hex(uint32_t value, int digits) {
    while (digits--) put("0123456789abcdef"[(value >> (4 * digits)) & 15]);
}
void hex64(uint64_t value) { hex((uint32_t)(value >> 32), 8); hex((uint32_t)value, 8); }
void decimal(uint32_t value) {
    if (value >= 10) decimal(value / 10);
    put((char)('0' + value % 10));
}

void give_up(const char *why) {
    say(why); put('\n');
    outb(DEBUG_EXIT, 0x7f);
    for (;;) __asm__ volatile("cli; hlt");
}

uint32_t number(const char **text) {
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

uint64_t number64(const char **text) {
    uint32_t high = number(text), low = number(text);
    return (uint64_t)high << 32 | low;
}

const char *is(const char *word, const char *name) {
    while (*name) if (*word++ != *name++) return 0;
    if (*word == '=') return word + 1;
    return *word == ' ' || *word == 0 ? word : 0;
}

const char *names(const char *text, const char *name) {
    while (*name) if (*text++ != *name++) return 0;
    return *text == ',' ? text + 1 : 0;
}
