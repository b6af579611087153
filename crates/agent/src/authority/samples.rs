//! The newest sample of each node, beside the channel of messages.
//!
//! A node samples at a fixed interval, even while the authority waits for its disk. A new sample replaces the previous
//! one, so that samples never fill the channel.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::messages::NodeSample;

use super::Refusal;

/// The samples that the authority has not taken yet. A lock rather than messages: it is held for one access to a map.
#[derive(Debug, Default)]
pub(super) struct LatestSamples(Mutex<PendingSamples>);

#[derive(Debug, Default)]
struct PendingSamples {
    by_node: HashMap<Arc<str>, Box<NodeSample>>,
    /// Whether a message that announces the samples is on its way.
    is_announced: bool,
}

impl LatestSamples {
    /// Replaces the previous sample, and announces the new one unless an announcement is pending. Readings that the new
    /// sample lacks are kept.
    pub(super) fn put(
        &self,
        mut sample: Box<NodeSample>,
        announce: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut pending = self.lock();
        if let Some(before) = pending.by_node.remove(&sample.node.name) {
            retain_readings(*before, &mut sample);
        }
        pending.by_node.insert(sample.node.name.clone(), sample);
        if !pending.is_announced {
            announce()?;
            pending.is_announced = true;
        }
        Ok(())
    }

    /// Takes all samples.
    pub(super) fn take(&self) -> impl Iterator<Item = Box<NodeSample>> + use<> {
        let mut pending = self.lock();
        pending.is_announced = false;
        std::mem::take(&mut pending.by_node).into_values()
    }

    fn lock(&self) -> MutexGuard<'_, PendingSamples> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn retain_readings(before: NodeSample, sample: &mut NodeSample) {
    let mut readings: HashMap<_, _> =
        before.devices.into_iter().map(|device| (device.facts.identity.clone(), device.reading)).collect();
    for device in sample.devices.iter_mut().filter(|device| device.reading.is_none()) {
        device.reading = readings.remove(&device.facts.identity).flatten();
    }
}
