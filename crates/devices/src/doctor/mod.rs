//! What is wrong with the GPUs of a machine, why, and what to do about it.
