//! The bodies of the statistics routes, built from a round.
//!
//! A number that the device does not report is 0, and its field is listed in `unsupported`. Used memory is the memory
//! of programs; memory that the driver reserves is neither used nor free.

use std::collections::BTreeSet;

use gpupool_api::stats::{
    GpuBody, GpuCountBody, GpuFiltering, GpuMemory, GpuPower, GpuSummary, StatsBody, SummaryBody,
};
use gpupool_core::{Bytes, DeviceHealth, Percent};
use gpupool_devices::{DetectedDevice, Milliwatts, Reported};

use super::filter::{DeviceFilter, VisibleDevices};
use super::round::{ListedDevice, SamplingRound};

/// Returns the body of `GET /gpu/stats`.
pub(super) fn stats(round: &SamplingRound) -> StatsBody {
    let gpus: Vec<GpuBody> = round.listed().map(|seen| gpu(seen, round)).collect();
    StatsBody {
        gpu_count: gpus.len(),
        gpus,
        timestamp: round.format_time(round.read_at()),
        stale: round.any_stale(),
        error: round.error(),
    }
}

/// Returns the body of `GET /gpu/count`.
pub(super) fn count(stats: &StatsBody) -> GpuCountBody {
    GpuCountBody {
        gpu_count: stats.gpu_count,
        timestamp: stats.timestamp.clone(),
        stale: stats.stale,
        error: stats.error.clone(),
    }
}

/// Returns the body of `GET /gpu/summary`.
pub(super) fn summary(round: &SamplingRound, stats: &StatsBody) -> SummaryBody {
    let counted_once = counted_once(round);
    let sum = |of: fn(&GpuMemory) -> u64| {
        let counted = stats.gpus.iter().zip(&counted_once).filter(|(_, counts)| **counts);
        counted.map(|(gpu, _)| of(&gpu.memory)).fold(0, u64::saturating_add)
    };
    let (total, used) = (sum(|memory| memory.total_mb), sum(|memory| memory.used_mb));
    let busy: Vec<Percent> = round.listed().filter_map(|seen| utilization(seen).copied()).collect();
    SummaryBody {
        gpu_count: stats.gpu_count,
        total_memory_mb: total,
        total_used_memory_mb: used,
        total_memory_usage_percent: percent(used, total),
        average_utilization_percent: average(&busy),
        average_over: busy.len(),
        gpus_summary: stats.gpus.iter().map(in_short).collect(),
        timestamp: stats.timestamp.clone(),
        stale: stats.stale,
        error: stats.error.clone(),
    }
}

/// Returns the part of `GET /config` about the listed GPUs.
pub(super) fn filtering(round: &SamplingRound, filter: &DeviceFilter, visible: &VisibleDevices) -> GpuFiltering {
    let listed = round.listed().map(|seen| seen.gpu_id.0).collect::<Vec<_>>();
    GpuFiltering {
        cuda_visible_devices: filter.as_set().map(ToOwned::to_owned),
        filtering_active: visible.ids.is_some(),
        total_system_gpus: round.devices.len(),
        visible_gpu_count: listed.len(),
        visible_gpu_ids: visible.ids.is_some().then_some(listed),
    }
}

/// Returns for each listed device whether it counts in sums: not the instances of a GPU that is listed itself.
fn counted_once(round: &SamplingRound) -> Vec<bool> {
    let is_cut = |seen: &&ListedDevice| !seen.found.takes_work();
    let cut: BTreeSet<_> = round.listed().filter(is_cut).filter_map(|seen| seen.found.pci).collect();
    let is_part = |found: &DetectedDevice| found.partition.is_some() && found.pci.is_some_and(|pci| cut.contains(&pci));
    round.listed().map(|seen| !is_part(&seen.found)).collect()
}

fn gpu(seen: &ListedDevice, round: &SamplingRound) -> GpuBody {
    let found = &seen.found;
    let mut unsupported = Vec::new();
    let utilization_percent = match utilization(seen) {
        Some(busy) => (busy.as_number().round() as u32).min(100),
        None => {
            unsupported.push("utilization_percent".to_owned());
            0
        }
    };
    let health = match &seen.health {
        DeviceHealth::Healthy | DeviceHealth::ClaimedElsewhere(_) => "healthy",
        DeviceHealth::Unhealthy(_) => "unhealthy",
        DeviceHealth::Lost => "lost",
    };
    let health_reason = match &seen.health {
        DeviceHealth::Unhealthy(why) => Some(why.to_string()),
        DeviceHealth::Healthy | DeviceHealth::Lost | DeviceHealth::ClaimedElsewhere(_) => None,
    };
    let watts =
        |reported| current(seen, reported).map(|power: &Milliwatts| (power.as_number() * 100.0).round() / 100.0);
    GpuBody {
        gpu_id: seen.gpu_id.0,
        name: found.name.as_deref().unwrap_or("unknown GPU").to_owned(),
        memory: memory(seen, &mut unsupported),
        utilization_percent,
        temperature_c: current(seen, &found.temperature_c).map(|&degrees| degrees.into()),
        power: GpuPower { draw_w: watts(&found.power), limit_w: watts(&found.power_limit) },
        uuid: found.uuid.as_deref().map(ToOwned::to_owned),
        vendor: found.vendor.name().to_owned(),
        health: health.to_owned(),
        health_reason,
        stale: round.is_stale(seen),
        timestamp: round.format_time(seen.read_at),
        asleep: found.asleep,
        unsupported,
    }
}

fn memory(seen: &ListedDevice, unsupported: &mut Vec<String>) -> GpuMemory {
    let memory = &seen.found.memory;
    let mib = |reported| current(seen, reported).map(|bytes: &Bytes| bytes.as_mib());
    // The total of a lost device is still known, its use is not.
    let total = memory.total.value().copied();
    let used_by_programs = memory.used_by_programs();
    let used = current(seen, &used_by_programs).copied().zip(total).map(|(used, total)| used.min(total));
    let mut missing = |names: &[&str]| unsupported.extend(names.iter().map(|name| format!("memory.{name}")));
    if total.is_none() {
        missing(&["total_mb"]);
    }
    if used.is_none() {
        missing(&["used_mb", "free_mb", "usage_percent"]);
    }
    let (total, used_or_none) = (total.unwrap_or_default(), used.unwrap_or_default());
    let reserved = memory.reserved.value().copied().unwrap_or_default();
    let free = used.map_or(Bytes::ZERO, |used| total.saturating_sub(used).saturating_sub(reserved));
    GpuMemory {
        total_mb: total.as_mib(),
        used_mb: used_or_none.as_mib(),
        free_mb: free.as_mib(),
        usage_percent: percent(used_or_none.0, total.0),
        reserved_mb: memory.reserved.value().map(|reserved| reserved.as_mib()),
        host_total_mb: mib(&memory.host_total),
        host_used_mb: mib(&memory.host_used),
    }
}

/// Returns a reported value, unless the device is lost: its last values are no longer valid.
pub(super) fn current<'a, T>(seen: &ListedDevice, reported: &'a Reported<T>) -> Option<&'a T> {
    reported.value().filter(|_| !seen.is_lost())
}

fn utilization(seen: &ListedDevice) -> Option<&Percent> {
    current(seen, &seen.found.utilization)
}

fn in_short(gpu: &GpuBody) -> GpuSummary {
    let name = |name: &String| match name.as_str() {
        "memory.usage_percent" => Some("memory_usage_percent".to_owned()),
        "utilization_percent" => Some(name.clone()),
        _ => None,
    };
    GpuSummary {
        gpu_id: gpu.gpu_id,
        name: gpu.name.clone(),
        memory_usage_percent: gpu.memory.usage_percent,
        utilization_percent: gpu.utilization_percent,
        unsupported: gpu.unsupported.iter().filter_map(name).collect(),
    }
}

/// Returns the percentage of `part` in `whole`, with two digits; 0 if `whole` is 0.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    two_digits(part as f64 * 100.0 / whole as f64)
}

fn average(busy: &[Percent]) -> f64 {
    let sum: f64 = busy.iter().map(|busy| busy.as_number()).sum();
    if busy.is_empty() { 0.0 } else { two_digits(sum / busy.len() as f64) }
}

fn two_digits(percent: f64) -> f64 {
    ((percent * 100.0).round() / 100.0).clamp(0.0, 100.0)
}
