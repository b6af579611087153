//! The GPUs on the PCI bus, whether or not a driver knows them.
