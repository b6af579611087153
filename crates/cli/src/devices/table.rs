//! Devices as a table for people.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gpupool_devices::Partition;
use gpupool_devices::report::{DeviceReport, LinkReport, Report};

/// Writes one line for each device, then how they are joined.
pub(crate) fn write(out: &mut impl Write, report: &Report) -> io::Result<()> {
    if report.devices.is_empty() {
        if report.error.is_none() {
            writeln!(out, "no GPU found")?;
        }
        return Ok(());
    }
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(report.devices.iter().map(row));
    let widths: Vec<usize> = (0..HEADINGS.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if RIGHT.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    write_links(out, &report.links)
}

const HEADINGS: [&str; 9] = ["GPU", "NAME", "PCI", "MEMORY MiB", "BUSY", "TEMP", "POWER", "PROC", "HEALTH"];
/// Columns of numbers.
const RIGHT: [usize; 6] = [0, 3, 4, 5, 6, 7];
/// Where the device does not say.
const UNKNOWN: &str = "?";

fn row(device: &DeviceReport) -> [String; 9] {
    let or_unknown = |value: Option<String>| value.unwrap_or_else(|| UNKNOWN.to_owned());
    let has = |field: &str| device.unsupported.contains(&field) || device.failed.contains_key(field);
    let power = match (device.power_w, device.power_limit_w) {
        (None, None) => UNKNOWN.to_owned(),
        (draw, limit) => {
            let watts = |watts: Option<f64>| watts.map_or_else(|| UNKNOWN.to_owned(), |watts| format!("{watts:.0}"));
            format!("{}/{} W", watts(draw), watts(limit))
        }
    };
    [
        device.gpu_id.to_string(),
        name(device),
        or_unknown(device.pci.clone()),
        memory(device),
        or_unknown(device.utilization_percent.map(|busy| format!("{busy:.0}%"))),
        or_unknown(device.temperature_c.map(|degrees| format!("{degrees}°C"))),
        power,
        if has("processes") { UNKNOWN.to_owned() } else { device.processes.len().to_string() },
        health(device),
    ]
}

fn name(device: &DeviceReport) -> String {
    let name = device.name.as_deref().unwrap_or("unknown GPU");
    match &device.partition {
        None => name.to_owned(),
        Some(Partition::Mig { profile, .. }) => {
            let profile = profile.as_deref().unwrap_or("?");
            if name.contains(profile) { name.to_owned() } else { format!("{name} MIG {profile}") }
        }
        Some(Partition::Amd { id, mode, .. }) => {
            format!("{name} {} {id}", mode.as_deref().unwrap_or("partition"))
        }
    }
}

fn memory(device: &DeviceReport) -> String {
    let number = |mib: Option<u64>| mib.map_or_else(|| UNKNOWN.to_owned(), |mib| mib.to_string());
    if device.unified_memory {
        return "shared".to_owned();
    }
    format!("{}/{}", number(device.memory_used_mib), number(device.memory_total_mib))
}

fn health(device: &DeviceReport) -> String {
    if device.asleep {
        return "asleep".to_owned();
    }
    let state = device.health.unwrap_or(UNKNOWN);
    match &device.health_reason {
        Some(reason) => format!("{state}: {reason}"),
        None => state.to_owned(),
    }
}

/// One line for each kind of link: `nvlink ×12: 0-1 0-2 1-2`.
fn write_links(out: &mut impl Write, links: &[LinkReport]) -> io::Result<()> {
    let mut by_kind: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for link in links {
        let kind = match (link.lanes, link.hops) {
            (Some(lanes), _) => format!("{} ×{lanes}", link.kind),
            (_, Some(hops)) => format!("{}, {hops} hop{}", link.kind, if hops == 1 { "" } else { "s" }),
            _ => link.kind.to_owned(),
        };
        by_kind.entry(kind).or_default().push(format!("{}-{}", link.a, link.b));
    }
    if !by_kind.is_empty() {
        writeln!(out)?;
    }
    for (kind, pairs) in by_kind {
        const SHOWN: usize = 28;
        let more = pairs.len().saturating_sub(SHOWN);
        let shown = pairs[..pairs.len() - more].join(" ");
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        writeln!(out, "{kind}: {shown}{rest}")?;
    }
    Ok(())
}
