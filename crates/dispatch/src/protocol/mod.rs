//! What dispatcher and worker say to each other: frames over a socket, and counters in memory both see.

mod counters;
mod frame;
mod handing;
mod outbox;
mod reading;

pub use counters::{Counted, Counters, Interrupt};
pub use frame::{Decoder, Frame, Garbage, HEADER_BYTES, Kind};
pub use handing::{receive, send_with};
pub(crate) use reading::read_into;

/// The version of all of it. A worker refuses another one.
pub const VERSION: u32 = 1;
/// Tells a worker the number of its socket: 0, its standard input, unless something else is there.
pub const SOCKET_VARIABLE: &str = "GPUPOOL_WORKER_FD";
