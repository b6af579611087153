//! What an answer says of a GPU's health.

use gpupool_core::device::Health;

use super::{cell, tree};
use crate::found::Found;
use crate::told::Told;
use crate::xml::Element;

/// The health of a GPU; `None` where the answer holds neither a reading nor a word on it.
///
/// Errors that were counted do not make a GPU unhealthy: rows were remapped for that. A remapping that failed, and
/// anything that waits for a reset, does.
pub(crate) fn of(gpu: &Element, found: &Found) -> Option<Health> {
    let unhealthy = |reason: &str| Some(Health::Unhealthy(reason.into()));
    if says(gpu, "gpu is lost") {
        return Some(Health::Lost);
    }
    let is = |paths: &[&[&str]]| {
        let flags = paths.iter().filter_map(|path| tree::first(gpu, &[path], cell::flag));
        flags.reduce(|one, other| one || other)
    };
    let failed = is(&[
        &["remapped_rows", "remapped_row_failure"],
        &["remapped_rows", "remapping_failure_occurred"],
        &["ecc_errors", "unrepairable_memory"],
    ]);
    if failed == Some(true) {
        return unhealthy("row remapping failed; replace the GPU");
    }
    let remap = is(&[&["remapped_rows", "remapped_row_pending"], &["remapped_rows", "pending"]]);
    let retired = is(&[
        &["retired_pages", "pending_retirement"],
        &["retired_pages", "pending_blacklist"],
        &["retired_pages", "pending_page_blacklist"],
        &["retired_pages", "pending"],
    ]);
    let repair = is(&[&["ecc_errors", "channel_repair_pending"], &["ecc_errors", "tpc_repair_pending"]]);
    let reset = is(&[&["gpu_reset_status", "reset_required"]]);
    let waits = [
        (remap, "row remapping is pending; reset the GPU"),
        (retired, "page retirement is pending; reset the GPU"),
        (repair, "a memory repair is pending; reset the GPU"),
        (reset.or(says(gpu, "gpu requires reset").then_some(true)), "the GPU requires a reset"),
    ];
    if let Some((_, reason)) = waits.iter().find(|(waits, _)| *waits == Some(true)) {
        return unhealthy(reason);
    }
    let action = tree::first(gpu, &[&["gpu_recovery_action"]], cell::name);
    if let Some(action) = &action {
        return unhealthy(&format!("the driver asks for a recovery: {action}"));
    }
    if let Some(words) = unreadable(found) {
        return unhealthy(&format!("the driver cannot read it: {words}"));
    }
    let looked_at = failed.or(remap).or(retired).or(repair).or(reset).is_some();
    (looked_at || has_readings(found)).then_some(Health::Healthy)
}

/// How its hardware slows a GPU down now, where it does.
///
/// That the clocks are low because nothing runs, or to keep to a limit somebody set, is nothing to tell.
pub(crate) fn slowdown(gpu: &Element) -> Option<&'static str> {
    const CAUSES: [(&str, &str); 3] = [
        ("hw_thermal_slowdown", "it is too hot"),
        ("hw_power_brake_slowdown", "the power supply asks for it"),
        ("hw_slowdown", "heat or power"),
    ];
    let active = |cause: &str| gpu.walk().any(|element| element.name.ends_with(cause) && element.text == "Active");
    CAUSES.into_iter().find(|(cause, _)| active(cause)).map(|(_, words)| words)
}

/// Whether a cell says these words, in brackets or not.
fn says(gpu: &Element, words: &str) -> bool {
    let bare = |text: &str| text.trim_start_matches('[').trim_end_matches(']').len();
    gpu.walk().any(|element| {
        let text = element.text.trim_start_matches('[');
        bare(&element.text) <= words.len() + 1
            && text.get(..words.len()).is_some_and(|start| start.eq_ignore_ascii_case(words))
    })
}

/// The driver's words where it failed on most of what it was asked about the state of a GPU.
///
/// One reading that fails is a broken sensor, and what a user may not see says nothing about the GPU.
fn unreadable(found: &Found) -> Option<&str> {
    fn failure<T>(told: &Told<T>) -> Option<&str> {
        match told {
            Told::Failed(words) if !words.to_ascii_lowercase().contains("permission") => Some(words),
            _ => None,
        }
    }
    let memory = &found.memory.used;
    let failures = [failure(memory), failure(&found.utilization), failure(&found.temperature_c), failure(&found.power)];
    let values = [
        memory.value().is_some(),
        found.utilization.value().is_some(),
        found.temperature_c.value().is_some(),
        found.power.value().is_some(),
    ];
    let failed = failures.iter().flatten().count();
    let told = values.iter().filter(|told| **told).count();
    failures.into_iter().flatten().next().filter(|_| failed >= 2 && failed > told)
}

/// Whether the device reported anything of its present state.
pub(crate) fn has_readings(found: &Found) -> bool {
    found.memory.used.value().is_some()
        || found.memory.total.value().is_some()
        || found.utilization.value().is_some()
        || found.temperature_c.value().is_some()
        || found.power.value().is_some()
}
