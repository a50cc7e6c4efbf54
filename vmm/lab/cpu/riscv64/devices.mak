# The devices of the simulated RISC-V host, of QEMU's machine "virt".

CONFIG_RISCV_VIRT=y
# The processor refers to it.
CONFIG_SEMIHOSTING=y
CONFIG_ARM_COMPATIBLE_SEMIHOSTING=y

# The channels of a run: its streams, files and control.
CONFIG_VIRTIO=y
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_SERIAL=y
