//! What a device reports now.

use std::borrow::Cow;
use std::fmt::Display;

use gpupool_core::device::Health;
use gpupool_core::units::{Bytes, Percent};

use super::code::{Against, Answer, Code};
use super::library::{Handle, Library, MemoryInfo};
use super::opened::{Opened, Repair};
use super::processes::{Room, running};
use crate::found::{Found, Memory, UsedMeans, Watts};
use crate::told::Told;

/// What a device and its instances report.
pub(super) struct Seen {
    /// The device, and then its instances.
    pub found: Vec<Found>,
    /// What the answers speak against at worst.
    pub against: Against,
}

/// Reads a device and its instances; an error only where the driver as a whole is bad.
pub(super) fn read(library: &Library, device: &Opened, room: &mut Room) -> Answer<Seen> {
    let mut asked = Asked::default();
    let mut found = Vec::with_capacity(1 + device.instances.len());
    let mut whole = device.facts.clone();
    whole.power_limit = if device.has_power_limit {
        asked.about(library.power_limit(device.handle)).map(watts)
    } else {
        Told::Unsupported(Code::NOT_SUPPORTED.words().into())
    };
    fill(&mut whole, library, device.handle, room, &mut asked);
    let no_own_memory = Code::NOT_SUPPORTED.words();
    whole.memory.unified = matches!(&whole.memory.total, Told::Unsupported(words) if words == no_own_memory);
    found.push(whole);
    for instance in &device.instances {
        let mut part = instance.facts.clone();
        fill(&mut part, library, instance.handle, room, &mut asked);
        found.push(part);
    }
    let against = asked.worst.map_or(Against::Field, Code::against);
    let health = match (against, asked.worst) {
        (Against::Driver, Some(code)) => return Err(code),
        (Against::Presence, Some(code)) => {
            let lost = |facts: Found| unreadable(facts, code, Some(Health::Lost));
            return Ok(Seen { found: found.into_iter().map(lost).collect(), against });
        }
        (Against::Device, Some(code)) => Health::Unhealthy(code.words().into()),
        _ => repaired(library, device),
    };
    // What is wrong with a GPU is wrong with every part of it.
    for part in &mut found {
        part.health = Some(health.clone());
    }
    Ok(Seen { found, against })
}

/// A device of which only is known what it is.
pub(super) fn unreadable(facts: Found, code: Code, health: Option<Health>) -> Found {
    fn failed<T>(code: Code) -> Told<T> {
        Told::Failed(code.words().into())
    }
    Found {
        memory: Memory { total: failed(code), reserved: failed(code), used: failed(code), ..Memory::default() },
        utilization: failed(code),
        temperature_c: failed(code),
        power: failed(code),
        power_limit: failed(code),
        processes: failed(code),
        health,
        ..facts
    }
}

/// The worst answer while a device was asked.
#[derive(Default)]
struct Asked {
    worst: Option<Code>,
}

impl Asked {
    fn about<T>(&mut self, answer: Answer<T>) -> Told<T> {
        match answer {
            Ok(value) => Told::Value(value),
            Err(code) => {
                if self.worst.is_none_or(|worst| worst.against() < code.against()) {
                    self.worst = Some(code);
                }
                code.told()
            }
        }
    }
}

fn fill(found: &mut Found, library: &Library, device: Handle, room: &mut Room, asked: &mut Asked) {
    found.memory = memory(asked.about(library.memory(device)));
    found.utilization =
        checked(asked.about(library.utilization(device)), "%", |percent| Percent::from_number(f64::from(percent)));
    found.temperature_c = checked(asked.about(library.temperature(device)), "°C", |celsius| celsius.try_into().ok());
    found.power = asked.about(library.power(device)).map(watts);
    found.processes = asked.about(running(library, device, room));
}

fn memory(told: Told<MemoryInfo>) -> Memory {
    let used_means = match told.value() {
        Some(MemoryInfo { reserved: Some(_), .. }) => UsedMeans::WithoutReserved,
        Some(MemoryInfo { reserved: None, .. }) => UsedMeans::WithReserved,
        None => UsedMeans::Unknown,
    };
    let reserved = match &told {
        Told::Value(MemoryInfo { reserved: Some(reserved), .. }) => Told::Value(Bytes(*reserved)),
        Told::Value(_) => Told::Unsupported("this driver counts it as used".into()),
        Told::Unsupported(words) => Told::Unsupported(words.clone()),
        Told::Failed(words) => Told::Failed(words.clone()),
    };
    Memory {
        total: told.clone().map(|info| Bytes(info.total)),
        reserved,
        used: told.map(|info| Bytes(info.used)),
        used_means,
        ..Memory::default()
    }
}

/// A number the library gave, unless it cannot be.
fn checked<N: Copy + Display, T>(told: Told<N>, unit: &str, sound: impl FnOnce(N) -> Option<T>) -> Told<T> {
    match told {
        Told::Value(number) => {
            sound(number).map_or_else(|| Told::Failed(Cow::Owned(format!("{number} {unit} cannot be"))), Told::Value)
        }
        Told::Unsupported(words) => Told::Unsupported(words),
        Told::Failed(words) => Told::Failed(words),
    }
}

fn watts(milliwatts: u32) -> Watts {
    Watts(u64::from(milliwatts))
}

/// What bad memory says about a device: errors alone say nothing while they were repaired.
fn repaired(library: &Library, device: &Opened) -> Health {
    const RESET: &str = "bad memory waits to be put out of use: reset the GPU";
    let bad = match device.repair {
        Repair::Rows => library.remapped_rows(device.handle).ok().and_then(|rows| match (rows.failed, rows.pending) {
            (true, _) => Some("bad memory could not be put out of use: replace the GPU"),
            (false, true) => Some(RESET),
            (false, false) => None,
        }),
        Repair::Pages => library.retired_pages_pending(device.handle).ok().filter(|pending| *pending).map(|_| RESET),
        Repair::Untold => None,
    };
    bad.map_or(Health::Healthy, |text| Health::Unhealthy(text.into()))
}
