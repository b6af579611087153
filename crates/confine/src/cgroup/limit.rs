//! The limits of a group, and how each generation writes them.

use std::io;
use std::path::Path;

use super::error::{At, GroupError};
use super::group::{Group, Part};
use super::observe::{kills_file, kills_told};
use super::texts::Version;

/// What a group may use; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of host memory; swap is not given on top.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time.
    pub pids: Option<u64>,
}

impl Group {
    /// Sets the limits, replacing those before; a group over its new memory limit is shrunk or killed by the kernel.
    pub fn set_limits(&self, limits: &Limits) -> Result<(), GroupError> {
        match (self.part_with(|part| part.memory), limits.host_memory) {
            (Some(part), bytes) => write_memory(part, bytes)?,
            (None, Some(_)) => return Err(not_enforceable("host memory", "memory")),
            (None, None) => {}
        }
        match (self.part_with(|part| part.pids), limits.pids) {
            (Some(part), count) => write(&part.path.join("pids.max"), &or_max(count))?,
            (None, Some(_)) => return Err(not_enforceable("the number of processes", "pids")),
            (None, None) => {}
        }
        Ok(())
    }

    /// How many processes the kernel killed because the group was over its memory limit; `None` where memory is not
    /// watched by a group.
    pub fn oom_kills(&self) -> Result<Option<u64>, GroupError> {
        let Some(part) = self.part_with(|part| part.memory) else {
            return Ok(None);
        };
        let path = part.path.join(kills_file(part.version));
        let text = std::fs::read_to_string(&path).at("reading", &path)?;
        Ok(kills_told(&text))
    }

    /// The most memory the group ever used, in bytes; `None` where no group watches memory (or the kernel is older
    /// than 5.19 and does not remember).
    pub fn memory_peak(&self) -> Result<Option<u64>, GroupError> {
        let Some(part) = self.part_with(|part| part.memory) else {
            return Ok(None);
        };
        let file = match part.version {
            Version::V2 => "memory.peak",
            Version::V1 => "memory.max_usage_in_bytes",
        };
        let path = part.path.join(file);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim().parse().ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).at("reading", &path),
        }
    }
}

fn write_memory(part: &Part, bytes: Option<u64>) -> Result<(), GroupError> {
    match part.version {
        Version::V2 => {
            write(&part.path.join("memory.max"), &or_max(bytes))?;
            let swap = if bytes.is_some() { "0" } else { "max" };
            write_if_there(&part.path.join("memory.swap.max"), swap)?;
            // A job that lost one of its processes rarely goes on well: all of it or nothing.
            write_if_there(&part.path.join("memory.oom.group"), "1")
        }
        Version::V1 => {
            let memory_and_swap = part.path.join("memory.memsw.limit_in_bytes");
            let value = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
            // Memory plus swap may never be below memory: out of the way first, then down to the same number.
            write_if_there(&memory_and_swap, "-1")?;
            write(&part.path.join("memory.limit_in_bytes"), &value)?;
            write_if_there(&memory_and_swap, &value)
        }
    }
}

fn or_max(value: Option<u64>) -> String {
    value.map_or("max".to_owned(), |value| value.to_string())
}

fn not_enforceable(limit: &'static str, controller: &str) -> GroupError {
    GroupError::NotEnforceable { limit, why: format!("the {controller} controller is not available to this group") }
}

/// Writes one of the kernel's control files, which exist already and are never created by writing.
pub(super) fn write(path: &Path, value: &str) -> Result<(), GroupError> {
    put(path, value).at("writing", path)
}

pub(super) fn put(path: &Path, value: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    io::Write::write_all(&mut file, value.as_bytes())
}

fn write_if_there(path: &Path, value: &str) -> Result<(), GroupError> {
    match put(path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.at("writing", path),
    }
}
