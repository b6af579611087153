//! Killing whatever is below this process.

use rustix::process::Signal;

use super::{ProcFs, ProcessHandle};

/// Kills all there is below this process now; how many there were. Whoever they start meanwhile needs another round.
pub fn kill_descendants() -> usize {
    let found = ProcFs::here().tree(std::process::id()).unwrap_or_default();
    for id in &found {
        if let Ok(Some(handle)) = ProcessHandle::open(*id) {
            // Not permitted means another user's process (sudo): it is counted as left.
            let _ = handle.signal(Signal::KILL);
        }
    }
    found.len()
}
