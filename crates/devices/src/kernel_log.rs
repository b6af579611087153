//! What the kernel's log says about GPUs.
