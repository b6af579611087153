//! hwloc's matrices of links between GPUs.

use std::collections::BTreeMap;

use gpupool_core::device::LinkKind;

use super::End;
use crate::snapshot::Snapshot;
use crate::topology::ways::{self, FastLinks};
use crate::xml::Element;

/// The links that the matrices of a file tell; `ends` says what its object numbers stand for.
pub(super) fn fast_links(root: &Element, ends: &BTreeMap<u64, End>, snapshot: &mut Snapshot) -> FastLinks {
    let mut fast = FastLinks::default();
    for matrix in root.children.iter().filter(|child| child.name.starts_with("distances2")) {
        match matrix.attribute("name") {
            Some("NVLinkBandwidth") => nvlinks(matrix, ends, snapshot, &mut fast),
            Some("XGMIHops") => {
                for (a, b, hops) in pairs(matrix, ends) {
                    if let (End::Gpu(a), End::Gpu(b), 1..=255) = (a, b, hops) {
                        fast.join(a, b, LinkKind::Xgmi(hops as u8));
                    }
                }
            }
            _ => {}
        }
    }
    fast
}

fn nvlinks(matrix: &Element, ends: &BTreeMap<u64, End>, snapshot: &mut Snapshot, fast: &mut FastLinks) {
    let mut odd = None;
    let mut lanes = |place: usize, bandwidth: u64| {
        let name = snapshot.devices.get(place).and_then(|device| device.name.as_deref()).unwrap_or_default();
        let lane = lane_bandwidth(name);
        if !bandwidth.is_multiple_of(lane) {
            odd = Some(bandwidth);
        }
        u32::try_from(bandwidth / lane).unwrap_or(u32::MAX).max(1)
    };
    let mut to_switch = vec![0_u64; snapshot.devices.len()];
    for (from, to, bandwidth) in pairs(matrix, ends) {
        match (from, to) {
            (End::Gpu(a), End::Gpu(b)) if a != b => fast.join(a, b, ways::nvlink(lanes(a, bandwidth))),
            (End::Gpu(a), End::Switch) => {
                if let Some(sum) = to_switch.get_mut(a) {
                    *sum = sum.saturating_add(bandwidth);
                }
            }
            _ => {}
        }
    }
    let switched = to_switch.iter().enumerate();
    let switched: Vec<u32> = switched.map(|(at, &sum)| if sum == 0 { 0 } else { lanes(at, sum) }).collect();
    fast.join_by_switch(&switched);
    if let Some(odd) = odd {
        snapshot.warn(format!("an NVLink bandwidth of {odd} MB/s is no multiple of a lane's; its lanes are a guess"));
    }
}

/// What one NVLink lane carries in one direction, in MB/s, by the generation of the GPU.
fn lane_bandwidth(name: &str) -> u64 {
    let is = |models: &[&str]| models.iter().any(|model| name.contains(model));
    match () {
        () if is(&["P100"]) => 20_000,
        () if is(&["B100", "B200", "B300"]) => 50_000,
        () => 25_000,
    }
}

/// Every pair that a matrix gives a value other than zero for, and that is known, in both directions.
fn pairs(matrix: &Element, ends: &BTreeMap<u64, End>) -> Vec<(End, End, u64)> {
    // Numbers of the operating system mean other objects (NUMA nodes, processing units).
    if matrix.attribute("indexing") == Some("os") {
        return Vec::new();
    }
    let words = |tag: &'static str| matrix.children(tag).flat_map(|part| part.text.split_whitespace());
    let number = |word: &str| word.rsplit(':').next().and_then(|digits| digits.parse().ok());
    let objects: Vec<Option<End>> = words("indexes").map(|word| ends.get(&number(word)?).copied()).collect();
    let end = |place: usize| objects.get(place).copied().flatten();
    let value = |(at, word): (usize, &str)| {
        let value = word.parse().ok().filter(|&value: &u64| value > 0)?;
        let (row, column) = (at.checked_div(objects.len())?, at.checked_rem(objects.len())?);
        Some((end(row)?, end(column)?, value))
    };
    words("u64values").enumerate().filter_map(value).collect()
}
