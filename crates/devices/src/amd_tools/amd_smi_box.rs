//! The boxed table amd-smi prints without a command (since ROCm 7), read to the trees its JSON would have.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::table;
use crate::address;
use crate::limits;

/// Whether the box begins with this line.
pub(crate) fn begins(line: &str) -> bool {
    line.trim_start().starts_with("| AMD-SMI ")
}

/// A tree for each GPU in the box: two lines each, cut in two by a bar.
pub(crate) fn trees(text: &str) -> Vec<Value> {
    let mut found: BTreeMap<u64, Value> = BTreeMap::new();
    let mut first: Option<(&str, &str)> = None;
    let mut driver = "N/A";
    let mut in_processes = false;
    let lines = text.lines().skip_while(|line| !begins(line)).filter_map(between_bars);
    for line in lines {
        if let Some((_, version)) = line.split_once("amdgpu version:") {
            driver = version.split_whitespace().next().unwrap_or("N/A");
        }
        in_processes |= line.trim() == "Processes:";
        if in_processes {
            processes(line, &mut found);
            continue;
        }
        let Some((left, right)) = line.split_once('|') else { continue };
        let starts_gpu =
            left.split_whitespace().next().is_some_and(|word| word.contains(':') && address::parse(word).is_some());
        match first.take() {
            _ if starts_gpu => first = Some((left, right)),
            Some(upper) if found.len() < limits::DEVICES => {
                if let Some((number, tree)) = gpu(upper, (left, right), driver) {
                    found.insert(number, tree);
                }
            }
            _ => {}
        }
    }
    found.into_values().collect()
}

fn between_bars(line: &str) -> Option<&str> {
    line.trim().strip_prefix('|')?.strip_suffix('|')
}

fn gpu(upper: (&str, &str), lower: (&str, &str), driver: &str) -> Option<(u64, Value)> {
    let (bdf, name) = upper.0.trim().split_once(char::is_whitespace)?;
    let numbers: Vec<&str> = lower.0.split_whitespace().collect();
    let number: u64 = numbers.first()?.parse().ok()?;
    let mode = numbers.last().and_then(|modes| modes.split('/').next());
    let cells = |text| -> Vec<&str> { table::cells(text).iter().map(|cell| cell.text).collect() };
    let (upper, lower) = (cells(upper.1), cells(lower.1));
    let [_, temperature, errors, power] = upper[..] else { return None };
    let [busy, _, memory] = lower[..] else { return None };
    let (drawn, allowed) = of_whole(power);
    let (used, total) = of_whole(memory);
    let tree = json!({
        "gpu": number, "bdf": bdf, "asic": {"market_name": name.trim()}, "driver": {"version": driver},
        "usage": {"gfx_activity": busy}, "temperature": {"hotspot": temperature},
        "power": {"socket_power": drawn}, "limit": {"socket_power": allowed},
        "mem_usage": {"used_vram": used, "total_vram": total}, "ecc": {"total_uncorrectable_count": errors},
        "partition": {"compute_partition": mode},
    });
    Some((number, tree))
}

/// `137/750 W` as its two amounts; `14 W` has only the first, `N/A/0 W` only the second.
fn of_whole(text: &str) -> (String, String) {
    let unit = text.rsplit(' ').next().unwrap_or_default();
    match text.rsplit_once('/') {
        Some(("N/A", whole)) => ("N/A".to_owned(), whole.to_owned()),
        Some((part, whole)) if text != "N/A" => (format!("{part} {unit}"), whole.to_owned()),
        _ => (text.to_owned(), "N/A".to_owned()),
    }
}

/// One line below `Processes:`.
fn processes(line: &str, found: &mut BTreeMap<u64, Value>) {
    if line.contains("No running processes") {
        for tree in found.values_mut() {
            tree["process_info"] = json!("No running processes detected");
        }
        return;
    }
    let cells: Vec<&str> = table::cells(line).iter().map(|cell| cell.text).collect();
    let [gpu, pid, name, _, memory, ..] = cells[..] else { return };
    let (Ok(gpu), Ok(pid)) = (gpu.parse::<u64>(), pid.parse::<u32>()) else { return };
    // As soon as one is listed, the list is that of every GPU.
    for (&number, tree) in found.iter_mut() {
        if tree.get("process_info").is_none() {
            tree["process_info"] = json!([]);
        }
        if let Some(list) = tree["process_info"].as_array_mut().filter(|_| number == gpu) {
            list.push(json!({"pid": pid, "name": name, "vram_mem": memory}));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::amd_tools::amd_smi_text::{looks_like, parse};
    use crate::found::Watts;
    use crate::told::Told;
    use gpupool_core::units::{Bytes, Percent};

    const BOX: &str = "
+------------------------------------------------------------------------------+
| AMD-SMI 26.0.0+37d158ab      amdgpu version: 6.14.0   ROCm version: 7.0.0    |
| Platform: Linux Baremetal                                                    |
|-------------------------------------+----------------------------------------|
| BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
| GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |
|=====================================+========================================|
| 0000:05:00.0    AMD Instinct MI300X | 0 %      41 °C   0           137/750 W |
|   0       0       5        SPX/NPS1 | 7 %        N/A           286/196288 MB |
|-------------------------------------+----------------------------------------|
| 0000:06:00.0  Radeon 8050S Graphics | N/A      29 °C   0                14 W |
|   1       1     N/A             N/A | N/A        N/A            3056/8192 MB |
+-------------------------------------+----------------------------------------+
+------------------------------------------------------------------------------+
| Processes:                                                                   |
|  GPU        PID  Process Name          GTT_MEM  VRAM_MEM  MEM_USAGE     CU % |
|==============================================================================|
|    1       4242  python3                2.0 MB    1.0 GB     1.1 GB      N/A |
+------------------------------------------------------------------------------+
";

    #[test]
    fn an_amount_or_its_whole_may_be_missing() {
        let told = |text| super::of_whole(text);
        assert_eq!(told("137/750 W"), ("137 W".into(), "750 W".into()));
        assert_eq!(told("N/A/0 W"), ("N/A".into(), "0 W".into()));
        assert_eq!(told("14 W"), ("14 W".into(), "N/A".into()));
        assert_eq!(told("N/A"), ("N/A".into(), "N/A".into()));
    }

    #[test]
    fn the_box_is_read_like_the_json() {
        assert!(looks_like(BOX));
        let devices = parse(BOX).unwrap().devices;
        assert_eq!(devices.len(), 2);
        assert_eq!(devices[0].name.as_deref(), Some("AMD Instinct MI300X"));
        assert_eq!(devices[0].driver.as_deref(), Some("6.14.0"));
        assert_eq!(devices[0].power, Told::Value(Watts(137_000)));
        assert_eq!(devices[0].power_limit, Told::Value(Watts(750_000)));
        assert_eq!(devices[0].memory.used, Told::Value(Bytes(286 << 20)));
        assert_eq!(devices[0].memory.total, Told::Value(Bytes(196_288 << 20)));
        assert_eq!(devices[0].utilization, Told::Value(Percent(7000)));
        assert_eq!(devices[0].processes, Told::Value(Vec::new()));
        assert_eq!(devices[1].power, Told::Value(Watts(14_000)));
        assert!(matches!(devices[1].power_limit, Told::Unsupported(_)));
        assert_eq!(devices[1].processes.value().unwrap()[0].pid, 4242);
        assert_eq!(devices[1].partition, None);
    }
}
