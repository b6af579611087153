//! Asking an agent for GPUs and keeping what it granted.
