/* What each of QEMU's files includes first: read once for each library, as meson.build in hooks.patch says. */
#include "qemu/osdep.h"
