/*
 * The channels between the lab's simulated host and tally-lab: a virtio console
 * with several ports, and a monitor.
 *
 * SPDX-License-Identifier: LGPL-2.1-or-later
 *
 * Bochs has no virtio, and a serial port is slow, as its baud rate is simulated.
 * This device has the register layout of virtio over MMIO (VIRTIO 1.2, 4.2.2)
 * and is the console device (5.3) with VIRTIO_CONSOLE_F_MULTIPORT. So the host's
 * init finds the same ports as on the other hosts. Output leaves at the moment
 * of the driver's notification, and the device blocks until it is taken: the
 * machine's time does not depend on the reader. Input is looked for at fixed
 * intervals of virtual time.
 *
 * The variable LAB_CHANNELS connects it: `1=FD,2=FD,...,monitor=FD`. At any byte
 * from the monitor's socket, it answers with the first CPU's RIP.
 */
#include "iodev.h"
#include "cpu/cpu.h"

#include <poll.h>
#include <unistd.h>
#include <sys/socket.h>

#define LOG_THIS

namespace {

const bx_phy_address BASE = 0xfeb00000;
const bx_phy_address SIZE = 0x200;
/* Not an ISA interrupt that the BIOS's tables describe as level-triggered. */
const unsigned IRQ = 7;
const unsigned PORT_COUNT = 6;
const unsigned QUEUES = 2 * (PORT_COUNT + 1);
const unsigned QUEUE_SIZE = 128;
const unsigned POLL_MICROSECONDS = 1000;

const Bit32u MAGIC = 0x74726976, VERSION = 2, DEVICE_CONSOLE = 3;
const Bit32u FEATURE_MULTIPORT = 1 << 1; /* of features 0 to 31 */
const Bit32u FEATURE_VERSION_1 = 1 << 0; /* of features 32 to 63 */
const Bit16u DESCRIPTOR_NEXT = 1, DESCRIPTOR_WRITE = 2;
const Bit16u NO_INTERRUPT = 1;
const Bit32u INTERRUPT_USED = 1;

enum { CONTROL_IN = 2, CONTROL_OUT = 3 };
enum { DEVICE_READY = 0, PORT_ADD = 1, PORT_READY = 3, PORT_OPEN = 6 };

struct Control {
    Bit32u port;
    Bit16u event, value;
};

struct Descriptor {
    Bit64u address;
    Bit32u length;
    Bit16u flags, next;
};

struct Queue {
    Bit64u descriptors, available, used;
    Bit32u size, ready;
    Bit16u next_available, next_used;
};

struct Port {
    int fd;
    bool exists, reads, opened;
};

void read_memory(Bit64u address, void *to, unsigned length)
{
    DEV_MEM_READ_PHYSICAL_DMA((bx_phy_address)address, length, (Bit8u *)to);
}

void write_memory(Bit64u address, const void *from, unsigned length)
{
    DEV_MEM_WRITE_PHYSICAL_DMA((bx_phy_address)address, length, (Bit8u *)from);
}

Bit16u read16(Bit64u address)
{
    Bit16u value;

    read_memory(address, &value, sizeof value);
    return value;
}

bool is_readable(int fd)
{
    struct pollfd one = { fd, POLLIN, 0 };

    return poll(&one, 1, 0) > 0;
}

class Console {
public:
    void start();
    void poll_input();
    bool access(bx_phy_address address, unsigned length, void *data, bool is_write);

private:
    Bit32u status, features_select, driver_features_select, queue_select, interrupt;
    Queue queues[QUEUES];
    Port ports[PORT_COUNT];
    int monitor;

    void connect(const char *channels);
    void reset();
    Bit32u read_register(Bit32u offset);
    void write_register(Bit32u offset, Bit32u value);
    bool take(Queue *queue, Bit16u *head);
    void give_back(Queue *queue, Bit16u head, Bit32u length);
    void notified(unsigned number);
    void output(unsigned number);
    void from_driver(const Control &message);
    void to_driver(Bit32u port, Bit16u event, Bit16u value);
    bool input(Queue *queue, const void *from, unsigned length);
    void answer_monitor();
};

Console console;

/* Splits `1=5,2=6,monitor=7`. */
void Console::connect(const char *channels)
{
    monitor = -1;
    while (channels && *channels) {
        char *end;
        if (!strncmp(channels, "monitor=", 8)) {
            monitor = strtol(channels + 8, &end, 10);
        } else {
            const unsigned number = strtol(channels, &end, 10);
            const int fd = *end == '=' ? strtol(end + 1, &end, 10) : -1;
            if (number < PORT_COUNT && fd >= 0) {
                int type;
                socklen_t size = sizeof type;
                ports[number].exists = true;
                ports[number].fd = fd;
                /* Outputs are pipes. What is a socket may send as well. */
                ports[number].reads = !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
            }
        }
        channels = *end == ',' ? end + 1 : "";
    }
}

void Console::reset()
{
    status = features_select = driver_features_select = queue_select = interrupt = 0;
    memset(queues, 0, sizeof queues);
    for (Port &port : ports)
        port.opened = false;
}

bool read_handler(bx_phy_address address, unsigned length, void *data, void *)
{
    return console.access(address, length, data, false);
}

bool write_handler(bx_phy_address address, unsigned length, void *data, void *)
{
    return console.access(address, length, data, true);
}

void poll_handler(void *) { console.poll_input(); }

void Console::start()
{
    connect(getenv("LAB_CHANNELS"));
    reset();
    DEV_register_memory_handlers(this, read_handler, write_handler, BASE, BASE + SIZE - 1);
    bx_pc_system.register_timer(this, poll_handler, POLL_MICROSECONDS, true, true, "lab console");
}

bool Console::access(bx_phy_address address, unsigned length, void *data, bool is_write)
{
    Bit32u value = 0;

    if (length > sizeof value)
        return false;
    if (is_write) {
        memcpy(&value, data, length);
        write_register((Bit32u)(address - BASE), value);
    } else {
        value = read_register((Bit32u)(address - BASE));
        memcpy(data, &value, length);
    }
    return true;
}

Bit32u Console::read_register(Bit32u offset)
{
    switch (offset) {
    case 0x000:
        return MAGIC;
    case 0x004:
        return VERSION;
    case 0x008:
        return DEVICE_CONSOLE;
    case 0x010: /* DeviceFeatures */
        return features_select == 0 ? FEATURE_MULTIPORT : features_select == 1 ? FEATURE_VERSION_1 : 0;
    case 0x034: /* QueueNumMax */
        return queue_select < QUEUES ? QUEUE_SIZE : 0;
    case 0x044: /* QueueReady */
        return queue_select < QUEUES ? queues[queue_select].ready : 0;
    case 0x060: /* InterruptStatus */
        return interrupt;
    case 0x070:
        return status;
    case 0x104: /* max_nr_ports of the configuration */
        return PORT_COUNT;
    default:
        return 0;
    }
}

static void set_half(Bit64u *address, unsigned half, Bit32u value)
{
    ((Bit32u *)address)[half] = value;
}

void Console::write_register(Bit32u offset, Bit32u value)
{
    Queue *queue = queue_select < QUEUES ? &queues[queue_select] : NULL;

    switch (offset) {
    case 0x014:
        features_select = value;
        break;
    case 0x030: /* QueueSel */
        queue_select = value;
        break;
    case 0x050: /* QueueNotify */
        notified(value);
        break;
    case 0x064: /* InterruptACK */
        interrupt &= ~value;
        if (!interrupt)
            DEV_pic_lower_irq(IRQ);
        break;
    case 0x070: /* Status */
        status = value;
        if (!value)
            reset();
        break;
    }
    if (!queue)
        return;
    switch (offset) {
    case 0x038: /* QueueNum */
        queue->size = value <= QUEUE_SIZE ? value : 0;
        break;
    case 0x044:
        queue->ready = value && queue->size;
        break;
    case 0x080:
    case 0x084:
        set_half(&queue->descriptors, (offset - 0x080) / 4, value);
        break;
    case 0x090:
    case 0x094:
        set_half(&queue->available, (offset - 0x090) / 4, value);
        break;
    case 0x0a0:
    case 0x0a4:
        set_half(&queue->used, (offset - 0x0a0) / 4, value);
        break;
    }
}

/* The rings: VIRTIO 1.2, 2.7. */

bool Console::take(Queue *queue, Bit16u *head)
{
    if (!queue->ready || read16(queue->available + 2) == queue->next_available)
        return false;
    *head = read16(queue->available + 4 + 2 * (queue->next_available++ % queue->size)) % queue->size;
    return true;
}

void Console::give_back(Queue *queue, Bit16u head, Bit32u length)
{
    const Bit32u element[2] = { head, length };

    write_memory(queue->used + 4 + 8 * (queue->next_used++ % queue->size), element, sizeof element);
    write_memory(queue->used + 2, &queue->next_used, sizeof queue->next_used);
    if (!(read16(queue->available) & NO_INTERRUPT)) {
        interrupt |= INTERRUPT_USED;
        DEV_pic_raise_irq(IRQ);
    }
}

void Console::notified(unsigned number)
{
    if (number >= QUEUES)
        return;
    if (number % 2)
        output(number);
    else if (number != CONTROL_IN)
        poll_input();
}

/* Takes all that the driver sends on a queue. */
void Console::output(unsigned number)
{
    Queue *queue = &queues[number];
    const unsigned port = number == 1 ? 0 : (number - CONTROL_OUT) / 2;
    Bit16u head;

    while (take(queue, &head)) {
        Descriptor part;
        Bit16u at = head;
        unsigned count = 0;
        do {
            Bit8u bytes[4096];
            read_memory(queue->descriptors + sizeof part * (at % queue->size), &part, sizeof part);
            for (Bit32u done = 0; done < part.length && !(part.flags & DESCRIPTOR_WRITE);) {
                const unsigned length = BX_MIN(part.length - done, (Bit32u)sizeof bytes);
                read_memory(part.address + done, bytes, length);
                done += length;
                if (number == CONTROL_OUT) {
                    Control message;
                    if (length >= sizeof message) {
                        memcpy(&message, bytes, sizeof message);
                        from_driver(message);
                    }
                } else if (port < PORT_COUNT && ports[port].exists) {
                    for (unsigned sent = 0; sent < length;) {
                        const ssize_t n = write(ports[port].fd, bytes + sent, length - sent);
                        if (n <= 0)
                            break; /* the reader is gone */
                        sent += n;
                    }
                }
            }
            at = part.next;
        } while ((part.flags & DESCRIPTOR_NEXT) && ++count < queue->size);
        give_back(queue, head, 0);
    }
}

void Console::from_driver(const Control &message)
{
    if (message.event == DEVICE_READY) {
        for (unsigned port = 0; port < PORT_COUNT; port++)
            if (ports[port].exists)
                to_driver(port, PORT_ADD, 1);
    } else if (message.event == PORT_READY && message.port < PORT_COUNT) {
        to_driver(message.port, PORT_OPEN, 1);
        ports[message.port].opened = true;
    }
}

void Console::to_driver(Bit32u port, Bit16u event, Bit16u value)
{
    const Control message = { port, event, value };

    input(&queues[CONTROL_IN], &message, sizeof message);
}

/* Puts bytes into the driver's next buffer, which is long enough. */
bool Console::input(Queue *queue, const void *from, unsigned length)
{
    Descriptor part;
    Bit16u head;

    if (!take(queue, &head))
        return false;
    read_memory(queue->descriptors + sizeof part * head, &part, sizeof part);
    length = BX_MIN(length, part.length);
    write_memory(part.address, from, length);
    give_back(queue, head, length);
    return true;
}

void Console::poll_input()
{
    if (monitor >= 0 && is_readable(monitor))
        answer_monitor();
    for (unsigned number = 0; number < PORT_COUNT; number++) {
        Port *port = &ports[number];
        Queue *queue = &queues[number ? 2 * number + 2 : 0];
        while (port->reads && port->opened && queue->ready &&
               read16(queue->available + 2) != queue->next_available && is_readable(port->fd)) {
            Bit8u bytes[2048];
            const ssize_t length = read(port->fd, bytes, sizeof bytes);
            if (length > 0) {
                input(queue, bytes, (unsigned)length);
            } else {
                port->reads = false;
                to_driver(number, PORT_OPEN, 0);
            }
        }
    }
}

void Console::answer_monitor()
{
    char line[32];
    char request;

    if (read(monitor, &request, 1) != 1) {
        monitor = -1;
        return;
    }
    const int length = snprintf(line, sizeof line, "RIP=%016llx\n",
                                (unsigned long long)BX_CPU(0)->get_instruction_pointer());
    if (write(monitor, line, length) != length)
        monitor = -1;
}

} // namespace

void lab_console_start() { console.start(); }
