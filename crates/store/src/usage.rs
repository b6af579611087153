//! Who held how much for how long, worked out from the audit trail.

use std::collections::BTreeMap;

use rusqlite::Connection;

use crate::trail::{HeldDevice, devices_in};

/// What a line of usage is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// An owner.
    Owner,
    /// A device, named `node/gpu_id`.
    Gpu,
}

/// What one owner held, or what was held of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageLine {
    /// The owner, or the device as `node/gpu_id`.
    pub name: String,
    /// In how many leases.
    pub leases: u64,
    /// Whole GPUs × seconds.
    pub gpu_seconds: f64,
    /// Memory in MiB × seconds.
    pub memory_mib_seconds: f64,
}

/// Sums in whole numbers, so that many small leases add up exactly.
#[derive(Default)]
struct Sum {
    leases: u64,
    /// Millionths of a GPU × milliseconds.
    share: u128,
    /// Bytes × milliseconds.
    memory: u128,
}

impl Sum {
    fn add<'a>(&mut self, devices: impl Iterator<Item = &'a HeldDevice>, held_ms: u64) {
        self.leases += 1;
        for device in devices {
            let share = u128::from(device.share.0) * u128::from(device.of_gpu.0);
            self.share = self.share.saturating_add(share.saturating_mul(held_ms.into()));
            let memory = u128::from(device.memory.0).saturating_mul(held_ms.into());
            self.memory = self.memory.saturating_add(memory);
        }
    }

    fn line(self, name: String) -> UsageLine {
        let memory_mib_seconds = self.memory as f64 / (1024.0 * 1024.0 * 1000.0);
        UsageLine { name, leases: self.leases, gpu_seconds: self.share as f64 / 1e9, memory_mib_seconds }
    }
}

/// What was held in the window, most first. Times are milliseconds since 1970.
pub(crate) fn lines(connection: &Connection, by: By, since: u64, now: u64) -> rusqlite::Result<Vec<UsageLine>> {
    let mut statement = connection.prepare_cached(
        "SELECT owner, devices, granted_at, ended_at FROM history
            WHERE event = 'ended' AND granted_at IS NOT NULL AND at > ?1 AND granted_at < ?2
         UNION ALL
         SELECT owner, devices, granted_at, NULL FROM history AS granted
            WHERE event = 'granted' AND granted_at < ?2
            AND NOT EXISTS (SELECT 1 FROM history WHERE lease = granted.lease AND event = 'ended')",
    )?;
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    let mut found = statement.query([since.cast_signed(), now.cast_signed()])?;
    while let Some(row) = found.next()? {
        let devices = devices_in(&row.get::<_, String>(1)?);
        let granted_at = row.get::<_, i64>(2)?.max(0).cast_unsigned();
        let ended_at = row.get::<_, Option<i64>>(3)?.map_or(now, |at| at.max(0).cast_unsigned());
        let held_ms = ended_at.min(now).saturating_sub(granted_at.max(since));
        match by {
            By::Owner => sums.entry(row.get(0)?).or_default().add(devices.iter(), held_ms),
            By::Gpu => {
                for device in &devices {
                    let name = format!("{}/{}", device.node, device.gpu_id);
                    sums.entry(name).or_default().add(std::iter::once(device), held_ms);
                }
            }
        }
    }
    let mut lines: Vec<UsageLine> = sums.into_iter().map(|(name, sum)| sum.line(name)).collect();
    lines.sort_by(|a, b| b.gpu_seconds.total_cmp(&a.gpu_seconds));
    Ok(lines)
}
