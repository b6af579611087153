//! NVIDIA's management library as a source.

pub mod xid;
