//! One worker's process, whoever it works for: started with its socket, counters and bounds; spoken to over its wire; seen
//! off. Nothing here waits for long but [`start`] and [`see_off`], which are called from threads that may.

mod see_off;
mod start;
mod wire;

use std::time::Duration;

pub(crate) use see_off::{cause_of_death, see_off};
pub(crate) use start::{NotStarted, Process, start};
pub(crate) use wire::{Heard, Wire};

use crate::limits::{BACKOFF, BACKOFF_MOST};
use crate::protocol::VERSION;
use crate::worker::Ready;

/// How long to wait before a process is started that died so often in a row.
pub(crate) fn backoff(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        more => BACKOFF.saturating_mul(1 << (more - 2).min(10)).min(BACKOFF_MOST),
    }
}

/// What a worker said when it was set up, or why we cannot work with it.
pub(crate) fn ready_of(payload: &[u8]) -> Result<Ready, String> {
    let ready: Ready = serde_json::from_slice(payload).map_err(|error| format!("ready: {error}"))?;
    if ready.protocol != VERSION {
        return Err(format!("it speaks version {} of the protocol, we {VERSION}", ready.protocol));
    }
    Ok(ready)
}
