/* A program in C that is branched: prints how often, and what the kernel has counted. */
#define TALLY_EBB_IMPLEMENTATION
#include "tally-ebb.h"
#include <stdio.h>

static volatile uint64_t branches, outside;
static uint64_t bounds[2];

static void note(const struct tally_ebb_branch *branch, void *argument)
{
    (void)argument;
    branches++;
    if (branch->instruction < bounds[0] || branch->instruction > bounds[1])
        outside++;
}

static void spin(uint64_t times)
{
    __asm__ volatile("lea 1f(%%rip), %%rax\n mov %%rax, %1\n lea 2f(%%rip), %%rax\n mov %%rax, %2\n"
                     "1: dec %0\n jnz 1b\n 2:"
                     : "+r"(times), "=m"(bounds[0]), "=m"(bounds[1])
                     :
                     : "rax", "cc");
}

int main(void)
{
    uint64_t count = 0;
    int event, status = tally_ebb_begin(note, NULL);
    if (status != 0 || (event = tally_ebb_open(0xc0, 100000)) < 0) {
        printf("begin %d\n", status);
        return 1;
    }
    tally_ebb_enable();
    status = tally_ebb_start(event);
    if (status != 0) {
        printf("start %d\n", status);
        return 2;
    }
    spin(5000000);
    tally_ebb_stop(event);
    if (read(event, &count, sizeof(count)) != sizeof(count))
        return 3;
    const struct tally_ebb_slot *slot = tally_ebb_page()->slots;
    const int is_whole = count == slot->overflows * slot->period + slot->period - slot->left;
    printf("%llu branches, %llu outside, %s\n", (unsigned long long)branches, (unsigned long long)outside,
           is_whole ? "whole" : "not whole");
    tally_ebb_end();
    return 0;
}
