//! Findings about how GPUs are read, and about settings that do nothing.

use std::time::Duration;

use super::Severity::{Notice, Warning};
use super::{Finder, Finding};
use crate::load::Loaded;

/// Reading more often than this costs more than it tells.
const OFTEN: Duration = Duration::from_millis(200);
/// Reading more seldom than this hides what happens.
const SELDOM: Duration = Duration::from_secs(60);

pub(super) fn findings(loaded: &Loaded) -> Vec<Finding> {
    let mut finder = Finder::new(loaded);
    refresh(&mut finder);
    visible_devices(&mut finder);
    without_effect(&mut finder);
    finder.found
}

fn refresh(finder: &mut Finder<'_>) {
    let interval = finder.loaded.config.monitoring.refresh_interval;
    let secs = interval.as_secs_f64();
    let remedy = "One second suits most machines; 0.2 to 60 is sensible.";
    if interval < OFTEN {
        let what = format!("GPUs are read every {secs} s; drivers take a good part of that, and the CPU with them.");
        finder.add(Warning, "refresh_often", "monitoring.refresh_interval", what, remedy);
    }
    if interval > SELDOM {
        let what = format!("GPUs are read every {secs} s; thresholds are judged by readings that old.");
        finder.add(Warning, "refresh_seldom", "monitoring.refresh_interval", what, remedy);
    }
}

fn visible_devices(finder: &mut Finder<'_>) {
    let key = "monitoring.cuda_visible_devices";
    let Some(devices) = &finder.loaded.config.monitoring.cuda_visible_devices else { return };
    let tokens = || devices.split([',', ' ', '\t']).filter(|token| !token.is_empty());
    if tokens().next().is_none() {
        let what = "CUDA_VISIBLE_DEVICES is empty: the agent shows no GPU at all.";
        finder.add(Notice, "no_visible_devices", key, what, "Unset it for all GPUs.");
        return;
    }
    let bad: Vec<_> = tokens().filter(|token| !can_name_a_device(token)).collect();
    if bad.is_empty() {
        return;
    }
    let all_bad = bad.len() == tokens().count();
    let effect = if all_bad { "no other names a GPU, so all of them are shown" } else { "they are skipped" };
    let what = format!("{} cannot name a GPU; {effect}.", crate::raw::shortened(&bad.join(", ")));
    finder.add(
        Warning,
        "bad_visible_devices",
        key,
        what,
        "Write indices (0,1) or UUIDs (GPU-5f3c…); `gpupool devices` lists them.",
    );
}

/// An index, or the beginning of a UUID in the form of either vendor.
fn can_name_a_device(token: &str) -> bool {
    if token.bytes().all(|c| c.is_ascii_digit()) {
        return token.parse::<u32>().is_ok();
    }
    let rest = ["GPU-", "MIG-"].into_iter().find_map(|start| {
        token.get(..start.len()).filter(|begin| begin.eq_ignore_ascii_case(start)).map(|_| &token[start.len()..])
    });
    let name = rest.unwrap_or(token);
    // An older name of a MIG instance is that of its GPU with two numbers: MIG-GPU-…/1/0.
    let name = name.strip_prefix("GPU-").unwrap_or(name);
    !name.is_empty()
        && name.chars().all(|c| c.is_ascii_hexdigit() || "-/".contains(c))
        && (rest.is_some() || name.contains('-') || name.len() >= 4)
}

fn without_effect(finder: &mut Finder<'_>) {
    for key in ["server.reload", "server.workers"] {
        if finder.loaded.is_set(key) {
            let what = format!("{key} is accepted and reported, and does nothing.");
            finder.add(Notice, "no_effect", key, what, "Remove it.");
        }
    }
    let monitoring = &finder.loaded.config.monitoring;
    if monitoring.simulate.is_some() && finder.loaded.is_set("monitoring.backend") {
        let what = "Devices are simulated, so the backend is not used.";
        finder.add(
            Notice,
            "backend_unused",
            "monitoring.backend",
            what,
            "Keep one of monitoring.simulate and monitoring.backend.",
        );
    }
}
