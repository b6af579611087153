//! Work on one device, and what it uses at any moment.

use std::sync::Arc;
use std::time::Duration;

use gpupool_core::device::Vendor;
use gpupool_core::units::{Bytes, Percent, Share};

use super::identity::mixed;
use super::spec::Timing;

/// Work that somebody does on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Load {
    /// How much of the device (of the partition, where it is one) it may use.
    pub share: Share,
    /// How much memory it may use; it uses most of it, and never less than a driver needs for a process.
    pub memory: Bytes,
    /// Its process; made up where there is none.
    pub pid: Option<u32>,
    /// The name of its process.
    pub name: Option<Arc<str>>,
}

/// A load since it began or last changed.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub holder: u64,
    pub load: Load,
    pub pid: u32,
    /// Differs between loads, so that not all of them waver alike.
    salt: u64,
    since: Duration,
    memory: (Bytes, Bytes),
    busy: (Percent, Percent),
}

/// Memory of a load that is gone, until the driver has freed it.
#[derive(Debug, Clone)]
pub(crate) struct Draining {
    since: Duration,
    memory: Bytes,
}

impl Running {
    pub fn begin(holder: u64, load: Load, salt: u64, vendor: Vendor, now: Duration, timing: &Timing) -> Self {
        let made_up = 100_000 + (mixed(salt, &[b"pid"]) % 4_000_000) as u32;
        let context = context(vendor);
        let running = Self {
            holder,
            pid: load.pid.unwrap_or(made_up),
            load: Load::default(),
            salt,
            since: now,
            memory: (context, context),
            busy: (Percent(0), Percent(0)),
        };
        running.changed(load, vendor, now, timing)
    }

    /// The same holder with another load: it goes on from what it uses now.
    pub fn changed(&self, load: Load, vendor: Vendor, now: Duration, timing: &Timing) -> Self {
        // Programs leave a few percent of what they were promised unused.
        let fill = Share(880 + (mixed(self.salt, &[b"fill"]) % 100) as u32);
        Self {
            since: now,
            memory: (self.memory_at(now, timing), load.memory.part(fill).max(context(vendor))),
            busy: (self.steady_part(now, timing), Percent::of_share(load.share.min(Share::WHOLE))),
            pid: load.pid.unwrap_or(self.pid),
            load,
            ..*self
        }
    }

    pub fn drained(&self, now: Duration, timing: &Timing) -> Draining {
        Draining { since: now, memory: self.memory_at(now, timing) }
    }

    /// Memory it uses, the driver's part for its process included.
    pub fn memory_at(&self, now: Duration, timing: &Timing) -> Bytes {
        let (from, to) = self.memory;
        Bytes(between(from.0, to.0, now.saturating_sub(self.since), timing.memory_ramp))
    }

    /// How busy it keeps the device: its share, less a tenth at most, differently each second.
    pub fn busy_at(&self, now: Duration, timing: &Timing) -> Percent {
        let second = now.as_secs().to_le_bytes();
        let waver = 900 + mixed(self.salt, &[b"waver", &second]) % 101;
        Percent((u64::from(self.steady_part(now, timing).0) * waver / 1000) as u32)
    }

    /// How busy it keeps the device in the long run.
    pub fn steady(&self) -> Percent {
        self.busy.1
    }

    fn steady_part(&self, now: Duration, timing: &Timing) -> Percent {
        let (from, to) = self.busy;
        let part = between(from.0.into(), to.0.into(), now.saturating_sub(self.since), timing.utilization_ramp);
        Percent(part as u32)
    }
}

impl Draining {
    pub fn memory_at(&self, now: Duration, timing: &Timing) -> Bytes {
        Bytes(between(self.memory.0, 0, now.saturating_sub(self.since), timing.memory_drain))
    }
}

/// Memory a driver needs for each process.
fn context(vendor: Vendor) -> Bytes {
    let mib = if vendor == Vendor::Amd { 280 } else { 416 };
    Bytes::from_mib(mib).unwrap_or_default()
}

/// The way from `from` to `to` that is done when `passed` of `whole` has passed, exactly and evenly.
fn between(from: u64, to: u64, passed: Duration, whole: Duration) -> u64 {
    if passed >= whole {
        return to;
    }
    // Not zero: something smaller was compared with it. Thousandths of milliseconds keep the products small.
    let (passed, whole) = (passed.as_micros(), whole.as_micros().max(1));
    let way = u128::from(from.abs_diff(to)) * passed / whole;
    let way = u64::try_from(way).unwrap_or(u64::MAX);
    if from < to { from.saturating_add(way).min(to) } else { from.saturating_sub(way).max(to) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn half_of_the_time_is_half_of_the_way() {
        let secs = Duration::from_secs;
        assert_eq!(between(100, 200, secs(1), secs(2)), 150);
        assert_eq!(between(200, 100, secs(1), secs(2)), 150);
        assert_eq!(between(200, 100, secs(3), secs(2)), 100);
        assert_eq!(between(200, 100, secs(0), secs(0)), 100);
    }

    proptest! {
        #[test]
        fn the_way_is_never_left_and_never_turned(from: u64, to: u64, a: u32, b: u32, whole: u32) {
            let at = |millis: u32| between(from, to, Duration::from_millis(millis.into()), Duration::from_millis(whole.into()));
            let (early, late) = (at(a.min(b)), at(a.max(b)));
            prop_assert!((from.min(to)..=from.max(to)).contains(&early));
            prop_assert!(early.abs_diff(to) >= late.abs_diff(to));
        }
    }
}
