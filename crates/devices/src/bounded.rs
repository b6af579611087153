//! Texts from outside, kept at a bounded length wherever they came from.

use std::sync::Arc;

use gpupool_core::device::Health;

use crate::found::{Found, Partition, Process};
use crate::limits;
use crate::told::{Told, words};

/// Cuts every text of a device.
pub(crate) fn device(device: &mut Found) {
    [&mut device.name, &mut device.uuid, &mut device.driver].into_iter().for_each(optional);
    match &mut device.partition {
        Some(Partition::Mig { parent_uuid, profile, .. }) => [parent_uuid, profile].into_iter().for_each(optional),
        Some(Partition::Amd { mode, .. }) => optional(mode),
        None => {}
    }
    if let Some(Health::Unhealthy(reason)) = &mut device.health {
        shared(reason);
    }
    let memory = &mut device.memory;
    let sizes = [&mut memory.total, &mut memory.reserved, &mut memory.used];
    sizes.into_iter().chain([&mut memory.host_total, &mut memory.host_used]).for_each(told);
    told(&mut device.utilization);
    told(&mut device.temperature_c);
    told(&mut device.power);
    told(&mut device.power_limit);
    told(&mut device.processes);
    if let Told::Value(processes) = &mut device.processes {
        processes.truncate(limits::PROCESSES);
        processes.iter_mut().for_each(process);
    }
}

fn process(process: &mut Process) {
    optional(&mut process.name);
    told(&mut process.memory);
}

/// A text, cut.
pub(crate) fn text(text: String) -> String {
    if is_short(&text) { text } else { words(&text).into_owned() }
}

fn optional(text: &mut Option<Arc<str>>) {
    text.iter_mut().for_each(shared);
}

fn shared(text: &mut Arc<str>) {
    if !is_short(text) {
        *text = words(text).into();
    }
}

fn told<T>(told: &mut Told<T>) {
    if let Told::Unsupported(said) | Told::Failed(said) = told
        && !is_short(said)
    {
        *said = words(said);
    }
}

/// Whether a text is surely not too long; characters are not counted before their bytes are too many.
fn is_short(text: &str) -> bool {
    text.len() <= limits::WORDS
}
