//! The node's authority: samples GPUs, grants leases, answers over HTTP.

pub mod net;
