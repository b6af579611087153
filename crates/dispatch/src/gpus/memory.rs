//! How much GPU memory processes use, as the agent sees it.

use std::collections::HashMap;

use gpupool_api::pool::{Device, Devices};

use super::board::Held;

/// What processes used on the devices of each place, at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuMemory {
    places: Vec<Option<Seen>>,
}

/// Who is on the devices of one place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Seen {
    /// Bytes by process; `None` for one that is there and does not tell.
    used: HashMap<u32, Option<u64>>,
    /// Whether nobody else can be there.
    is_complete: bool,
}

impl GpuMemory {
    /// What the devices of held leases tell; `sees_us` is whether the agent knows processes by the numbers we know them by.
    pub(super) fn new(held: &[Option<Held>], devices: &Devices, sees_us: impl Fn(&Held) -> bool) -> Self {
        let of = |held: &Option<Held>| {
            let held = held.as_ref().filter(|held| sees_us(held))?;
            let ids = held.granted.gpu_ids();
            let own: Vec<&Device> = devices.devices.iter().filter(|device| ids.contains(&device.gpu_id)).collect();
            let is_told = own.len() == ids.len() && own.iter().all(|device| !device.stale);
            is_told.then(|| Seen::of(&own))
        };
        Self { places: held.iter().map(of).collect() }
    }

    /// Bytes these processes use together on the devices of a place; `None` where that is not told. Where only some of them
    /// are told, it is at least so much.
    pub fn of(&self, place: usize, pids: &[u32]) -> Option<u64> {
        let seen = self.places.get(place)?.as_ref()?;
        let there = pids.iter().filter_map(|pid| seen.used.get(pid));
        let told: Vec<u64> = there.clone().flatten().copied().collect();
        let is_known = !told.is_empty() || (there.count() == 0 && seen.is_complete);
        is_known.then(|| told.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)))
    }
}

impl Seen {
    fn of(devices: &[&Device]) -> Self {
        let mut used: HashMap<u32, Option<u64>> = HashMap::new();
        for process in devices.iter().flat_map(|device| &device.processes) {
            let bytes = process.memory_mib.map(|mib| mib.saturating_mul(1 << 20));
            let sum = used.entry(process.pid).or_insert(None);
            *sum = match (*sum, bytes) {
                (Some(before), Some(more)) => Some(before.saturating_add(more)),
                (before, more) => before.or(more),
            };
        }
        Self { used, is_complete: devices.iter().all(|device| device.processes_complete) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(is_complete: bool) -> GpuMemory {
        let used = HashMap::from([(1, Some(100)), (2, Some(20)), (3, None)]);
        GpuMemory { places: vec![Some(Seen { used, is_complete }), None] }
    }

    #[test]
    fn what_is_told_is_summed_and_what_is_not_is_no_number() {
        let all = memory(true);
        assert_eq!(all.of(0, &[1, 2, 9]), Some(120));
        assert_eq!(all.of(0, &[9]), Some(0), "all that are there are told of, and it is none of them");
        assert_eq!(all.of(0, &[3]), None, "it is there and does not tell");
        assert_eq!(all.of(0, &[1, 3]), Some(100));
        assert_eq!((all.of(1, &[1]), all.of(7, &[1])), (None, None));
        let some = memory(false);
        assert_eq!((some.of(0, &[1]), some.of(0, &[9])), (Some(100), None));
    }
}
