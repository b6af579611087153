//! What an endpoint was last seen to have, and whether a request would find room in it. A guess by which endpoints are
//! chosen; whoever decides there has the last word.

use gpupool_api::RequestBody;
use gpupool_api::pool::Device;
use gpupool_core::body::OneOrMany;
use gpupool_core::ids::labels_match;
use gpupool_core::model_matches;
use serde::Serialize;
use tokio::time::Instant;

/// The endpoint's GPUs as they were seen at a time.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub at: Instant,
    pub gpus: Vec<Gpu>,
}

/// A GPU as it was last seen.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gpu {
    /// Its number on its server.
    pub gpu_id: u32,
    /// Its UUID, where the server tells it.
    pub uuid: Option<String>,
    /// `nvidia`, `amd`, `intel` or `other`; empty where the server does not tell.
    pub vendor: String,
    /// Its name.
    pub name: String,
    /// Its memory, in MiB, where it is known.
    pub memory_mib: Option<u64>,
    /// Memory in use, in percent; `None` where it cannot be told.
    pub memory_usage_percent: Option<f64>,
    /// How busy it is, in percent; `None` where it cannot be told.
    pub utilization_percent: Option<f64>,
    /// Memory in use that no lease explains, in percent.
    pub foreign_memory_percent: Option<f64>,
    /// Utilization that no lease explains, in percent.
    pub foreign_utilization_percent: Option<f64>,
    /// How much of it is promised, 0..=1.
    pub promised: f64,
    /// How much of its memory is promised, in MiB.
    pub promised_memory_mib: u64,
    /// How many hold a part of it.
    pub holders: usize,
    /// Why it takes no new work; `None` where it does.
    pub closed: Option<String>,
    /// Its labels.
    #[serde(skip)]
    pub labels: gpupool_core::ids::Labels,
}

impl From<Device> for Gpu {
    fn from(device: Device) -> Self {
        let percent = |part: Option<u64>| match (part, device.memory_mib) {
            (Some(part), Some(all)) if all > 0 => Some(part as f64 * 100.0 / all as f64),
            _ => None,
        };
        let foreign = device.foreign.as_ref();
        Self {
            gpu_id: device.gpu_id,
            memory_usage_percent: percent(device.memory_used_mib),
            utilization_percent: device.utilization_percent,
            foreign_memory_percent: percent(foreign.and_then(|foreign| foreign.memory_mib)),
            foreign_utilization_percent: foreign.and_then(|foreign| foreign.utilization_percent),
            promised: device.promised,
            promised_memory_mib: device.promised_memory_mib,
            holders: device.leases.len(),
            memory_mib: device.memory_mib,
            uuid: Some(device.uuid),
            vendor: device.vendor,
            name: device.name,
            closed: device.closed,
            labels: device.labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
        }
    }
}

/// The part of a request by which a GPU is judged.
#[derive(Debug, Clone)]
pub(super) struct Need<'a> {
    body: &'a RequestBody,
    memory_threshold: f64,
    utilization_threshold: f64,
}

impl<'a> Need<'a> {
    pub fn of(body: &'a RequestBody) -> Self {
        Self {
            body,
            memory_threshold: body.memory_threshold.unwrap_or(80.0),
            utilization_threshold: body.utilization_threshold.unwrap_or(90.0),
        }
    }

    /// How many GPUs it needs at once.
    pub fn gpus(&self) -> usize {
        self.body.gpus.unwrap_or(1).into()
    }

    /// Whether a GPU would do.
    pub fn is_met_by(&self, gpu: &Gpu) -> bool {
        gpu.closed.is_none() && self.is_below_thresholds(gpu) && self.has_room(gpu) && self.is_selected(gpu)
    }

    fn is_below_thresholds(&self, gpu: &Gpu) -> bool {
        let is_below = |foreign: Option<f64>, threshold: f64| foreign.is_none_or(|percent| percent < threshold);
        is_below(gpu.foreign_memory_percent, self.memory_threshold)
            && is_below(gpu.foreign_utilization_percent, self.utilization_threshold)
    }

    fn has_room(&self, gpu: &Gpu) -> bool {
        let (share, memory) = (self.body.fraction, self.body.memory_mib);
        let is_whole = share.is_none_or(|share| share >= 1.0) && memory.is_none() && !self.body.sharing;
        if is_whole {
            return gpu.holders == 0;
        }
        // Thousandths: ten tenths are one.
        let is_share_free = share.is_none_or(|share| gpu.promised + share < 1.0005);
        let free = gpu.memory_mib.map(|all| all.saturating_sub(gpu.promised_memory_mib));
        is_share_free && gpu.promised < 0.9995 && memory.is_none_or(|memory| free.is_none_or(|free| memory <= free))
    }

    fn is_selected(&self, gpu: &Gpu) -> bool {
        let select = &self.body.select;
        let is_model = match &select.model {
            OneOrMany::One(model) => model_matches(&gpu.name, model),
            OneOrMany::Many(models) => models.is_empty() || models.iter().any(|one| model_matches(&gpu.name, one)),
        };
        let is_vendor = select
            .vendor
            .is_none_or(|vendor| gpu.vendor.is_empty() || format!("{vendor:?}").eq_ignore_ascii_case(&gpu.vendor));
        is_model
            && is_vendor
            && select.min_memory_mib.is_none_or(|least| gpu.memory_mib.is_none_or(|memory| memory >= least))
            && (select.gpu_ids.is_empty() || select.gpu_ids.iter().any(|id| id.0 == gpu.gpu_id))
            && (select.uuids.is_empty()
                || gpu.uuid.as_ref().is_none_or(|uuid| select.uuids.iter().any(|wanted| **wanted == **uuid)))
            && labels_match(&gpu.labels, &select.labels)
    }
}

impl Seen {
    /// How many GPUs would do; none where they are fewer than are needed.
    pub fn room_for(&self, need: &Need<'_>) -> usize {
        let found = self.gpus.iter().filter(|gpu| need.is_met_by(gpu)).count();
        if found < need.gpus().max(1) { 0 } else { found }
    }

    /// Somebody was given this much of a GPU, or gave it back: known before the next look.
    pub fn count(&mut self, gpu_id: u32, fraction: f64, memory_mib: u64, is_given: bool) {
        let Some(gpu) = self.gpus.iter_mut().find(|gpu| gpu.gpu_id == gpu_id) else { return };
        if is_given {
            gpu.promised = (gpu.promised + fraction).min(1.0);
            gpu.promised_memory_mib = gpu.promised_memory_mib.saturating_add(memory_mib);
            gpu.holders += 1;
        } else {
            gpu.promised = (gpu.promised - fraction).max(0.0);
            gpu.promised_memory_mib = gpu.promised_memory_mib.saturating_sub(memory_mib);
            gpu.holders = gpu.holders.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(gpu_id: u32) -> Gpu {
        Gpu {
            gpu_id,
            uuid: Some(format!("GPU-{gpu_id}")),
            vendor: "nvidia".into(),
            name: "NVIDIA H100 80GB HBM3".into(),
            memory_mib: Some(80_000),
            memory_usage_percent: Some(0.0),
            utilization_percent: Some(0.0),
            foreign_memory_percent: Some(0.0),
            foreign_utilization_percent: Some(0.0),
            promised: 0.0,
            promised_memory_mib: 0,
            holders: 0,
            closed: None,
            labels: Default::default(),
        }
    }

    fn room(gpus: &[Gpu], json: &str) -> usize {
        let body: RequestBody = serde_json::from_str(json).unwrap();
        Seen { at: Instant::now(), gpus: gpus.to_vec() }.room_for(&Need::of(&body))
    }

    #[test]
    fn a_whole_gpu_must_be_nobodys_and_strictly_below_both_thresholds() {
        let held = Gpu { promised: 0.1, holders: 1, ..gpu(0) };
        let at_memory = Gpu { foreign_memory_percent: Some(80.0), ..gpu(1) };
        let busy = Gpu { foreign_utilization_percent: Some(90.0), ..gpu(2) };
        let below = Gpu { foreign_memory_percent: Some(79.9), foreign_utilization_percent: Some(89.9), ..gpu(3) };
        let closed = Gpu { closed: Some("hot".into()), ..gpu(4) };
        assert_eq!(room(&[held, at_memory.clone(), busy, below, closed], "{}"), 1);
        assert_eq!(room(&[at_memory], r#"{"memory_threshold":80.1}"#), 1);
    }

    #[test]
    fn parts_are_counted_and_several_must_all_be_there() {
        let mut seen = Seen { at: Instant::now(), gpus: vec![gpu(0)] };
        let body: RequestBody = serde_json::from_str(r#"{"fraction":0.1}"#).unwrap();
        for _ in 0..10 {
            assert_eq!(seen.room_for(&Need::of(&body)), 1);
            seen.count(0, 0.1, 8_000, true);
        }
        assert_eq!(seen.room_for(&Need::of(&body)), 0);
        seen.count(0, 0.1, 8_000, false);
        assert_eq!(seen.room_for(&Need::of(&body)), 1);
        assert_eq!(room(&[gpu(0), gpu(1)], r#"{"gpus":3}"#), 0);
        assert_eq!(room(&[gpu(0), gpu(1)], r#"{"gpus":2}"#), 2);
        assert_eq!(room(&[gpu(0)], r#"{"memory_mib":80001}"#), 0);
    }

    #[test]
    fn what_is_selected_is_looked_for() {
        let gpus = [gpu(0), Gpu { name: "NVIDIA A100".into(), memory_mib: Some(40_000), ..gpu(1) }];
        assert_eq!(room(&gpus, r#"{"select":{"model":"H100"}}"#), 1);
        assert_eq!(room(&gpus, r#"{"select":{"min_memory_mib":50000}}"#), 1);
        assert_eq!(room(&gpus, r#"{"select":{"gpu_ids":[1]}}"#), 1);
        assert_eq!(room(&gpus, r#"{"select":{"uuids":["GPU-1"]}}"#), 1);
        assert_eq!(room(&gpus, r#"{"select":{"vendor":"amd"}}"#), 0);
        assert_eq!(room(&gpus, r#"{"select":{"labels":{"a":"b"}}}"#), 0);
    }
}
