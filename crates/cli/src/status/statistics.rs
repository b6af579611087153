//! What a server of statistics tells, on a page for people.

use std::fmt::Write as _;

use gpupool_api::stats::{Gpu, Stats};

use super::page::{UNKNOWN, memory, section};
use crate::table::{Column, Table};
use crate::terminal::{Paint, Screen};
use crate::text::clean;

pub(super) fn page(endpoint: &str, stats: &Stats, screen: Screen) -> String {
    let gpus = if stats.gpu_count == 1 { "1 GPU".to_owned() } else { format!("{} GPUs", stats.gpu_count) };
    let mut text = format!("{endpoint}: {gpus}, statistics only: nobody leases GPUs there\n");
    if let Some(error) = &stats.error {
        let _ = writeln!(text, "{}", screen.paint(Paint::Bad, &format!("error: {}", clean(error))));
    }
    section(&mut text, "", &table(stats), screen);
    text
}

fn table(stats: &Stats) -> Table<7> {
    let mut table = Table::new([
        Column::number("GPU"),
        Column::words("NAME").at_least(12),
        Column::number("BUSY"),
        Column::number("MEMORY GiB").weighs(4),
        Column::number("TEMP").weighs(3),
        Column::number("POWER").weighs(1),
        Column::words("STATE").at_least(12).weighs(2).wraps(),
    ]);
    for gpu in &stats.gpus {
        let tells = |field: &str| !gpu.unsupported.iter().any(|other| other == field);
        let known = |is_known: bool, value: u64| Some(value).filter(|_| is_known);
        let (state, paint) = state(gpu, stats.stale);
        let busy = if tells("utilization_percent") { format!("{}%", gpu.utilization_percent) } else { UNKNOWN.into() };
        let cells = [
            gpu.gpu_id.to_string(),
            gpu.name.clone(),
            busy,
            memory(known(tells("memory.used_mb"), gpu.memory.used_mb), known(tells("memory.total_mb"), gpu.memory.total_mb)),
            gpu.temperature_c.map_or_else(|| UNKNOWN.into(), |degrees| format!("{degrees} °C")),
            gpu.power.draw_w.map_or_else(|| UNKNOWN.into(), |watts| format!("{watts:.0} W")),
            state,
        ];
        table.row(cells, paint);
    }
    table
}

/// Empty where the server does not tell.
fn state(gpu: &Gpu, all_stale: bool) -> (String, Paint) {
    if gpu.stale || all_stale {
        return ("not read lately".into(), Paint::Faint);
    }
    match &gpu.health_reason {
        Some(reason) => (format!("{}: {reason}", gpu.health), Paint::Bad),
        None => (gpu.health.clone(), Paint::Plain),
    }
}
