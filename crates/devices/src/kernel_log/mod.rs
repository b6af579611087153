//! What the kernel's log says about GPUs: errors of NVIDIA's driver (Xids), and hangs, resets and memory errors of AMD.
//!
//! Any log that holds the kernel's messages will do: `dmesg` with any kind of time, the journal, syslog, `/dev/kmsg`.
//! Each line is read on its own ([`event`]); the whole becomes one device per place on the bus, with the worst that
//! was said of it since the last boot.

pub mod fabric_manager;
mod line;
mod tally;

pub use line::{Event, What, event};

use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Lines looked at to tell a log of the kernel that says nothing of GPUs.
const FIRST_LINES: usize = 40;

/// Whether a text is a log with the kernel's messages.
pub fn looks_like(text: &str) -> bool {
    if text.trim_start().starts_with(['{', '<']) {
        return false;
    }
    let named = |line: &str| line.contains("NVRM: ") || line.contains("SXid (") || amdgpu_line(line);
    let first = || text.lines().filter(|line| !line.trim().is_empty()).take(FIRST_LINES);
    let kernel = first().filter(|line| is_kernel_line(line)).count();
    kernel > first().count() / 2 || text.lines().any(named)
}

/// The devices a log names, with what it says of their health, and what happened in numbers as warnings.
///
/// Errors that programs cause leave a device healthy; a device that was only named has no health.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut log = tally::Log::default();
    for event in text.lines().filter_map(event) {
        log.add(&event);
    }
    Ok(log.snapshot())
}

fn amdgpu_line(line: &str) -> bool {
    line.contains("amdgpu ") && event(line).is_some_and(|event| event.pci.is_some())
}

/// `[   12.345678] …`, `kern  :warn  : …`, `Jan 21 02:21:33 host kernel: …`, `4,1234,5678,-;…`.
fn is_kernel_line(line: &str) -> bool {
    let time = line.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(time, _)| time.trim());
    let seconds = time.is_some_and(|time| time.split_once('.').is_some() && time.parse::<f64>().is_ok());
    let facility = line.strip_prefix("kern").is_some_and(|rest| rest.trim_start().starts_with(':'));
    let record = line.split_once(';').is_some_and(|(head, _)| {
        head.split(',').count() >= 4 && head.split(',').take(3).all(|part| part.parse::<u64>().is_ok())
    });
    seconds || facility || record || line.contains(" kernel: ")
}
