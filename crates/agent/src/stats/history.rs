//! The last readings of each GPU, in a ring: so many and no more.

use std::collections::{BTreeMap, VecDeque};

use gpupool_api::stats::{GpuHistory, HistoryOfGpu, PastReading};
use gpupool_core::Time;
use gpupool_core::ids::GpuId;
use gpupool_core::units::{Bytes, Percent};
use gpupool_devices::Watts;

use super::body::current;
use super::limits;
use super::round::{Round, Seen};

/// The last readings of every GPU.
#[derive(Debug)]
pub struct History {
    most: usize,
    rings: BTreeMap<GpuId, VecDeque<Past>>,
}

/// What a GPU read at a time.
#[derive(Debug, Clone)]
struct Past {
    at: Time,
    /// When that was for people then: the wall clock may be set meanwhile.
    wall: std::time::SystemTime,
    memory_used: Option<Bytes>,
    utilization: Option<Percent>,
    temperature_c: Option<i16>,
    power: Option<Watts>,
}

impl History {
    /// Keeps so many readings of each GPU, within [`limits::HISTORY_READINGS`].
    pub fn new(most: usize) -> Self {
        Self { most: most.min(limits::HISTORY_READINGS), rings: BTreeMap::new() }
    }

    /// Keeps what was read anew.
    pub fn keep(&mut self, round: &Round) {
        for seen in round.listed() {
            let ring = self.rings.entry(seen.gpu_id).or_default();
            if ring.back().is_some_and(|last| last.at >= seen.read_at) {
                continue;
            }
            ring.push_back(past(seen, round));
            while ring.len() > self.most {
                ring.pop_front();
            }
        }
    }

    /// The body of `GET /gpu/history`.
    pub fn body(&self, round: &Round) -> GpuHistory {
        let gpu = |seen: &Seen| HistoryOfGpu {
            gpu_id: seen.gpu_id.0,
            name: seen.found.name.as_deref().unwrap_or("unknown GPU").to_owned(),
            readings: self.rings.get(&seen.gpu_id).into_iter().flatten().map(told).collect(),
        };
        GpuHistory { max_history: self.most, gpus: round.listed().map(gpu).collect() }
    }
}

fn past(seen: &Seen, round: &Round) -> Past {
    let found = &seen.found;
    Past {
        at: seen.read_at,
        wall: crate::clock::wall(seen.read_at, round.clock),
        memory_used: current(seen, &found.memory.used_by_programs()).copied(),
        utilization: current(seen, &found.utilization).copied(),
        temperature_c: current(seen, &found.temperature_c).copied(),
        power: current(seen, &found.power).copied(),
    }
}

fn told(past: &Past) -> PastReading {
    PastReading {
        timestamp: crate::clock::iso(past.wall),
        memory_used_mb: past.memory_used.map(|bytes| bytes.as_mib()),
        utilization_percent: past.utilization.map(|busy| busy.as_number()),
        temperature_c: past.temperature_c.map(i32::from),
        power_draw_w: past.power.map(|power| power.as_number()),
    }
}
