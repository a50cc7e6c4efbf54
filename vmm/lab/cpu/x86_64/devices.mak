# The devices of the simulated AMD host, of QEMU's machine "pc".

CONFIG_I440FX=y
# Exists on each such machine, and is compiled into one file with the machine above.
CONFIG_ISAPC=y
CONFIG_HPET=y
CONFIG_VMPORT=y
CONFIG_VMMOUSE=y

# The channels of a run: its streams, files and control.
CONFIG_VIRTIO=y
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_SERIAL=y

# For hosts that are saved: the files of a run, and how the host says that it is ready.
CONFIG_NVDIMM=y
CONFIG_PVPANIC_PCI=y
