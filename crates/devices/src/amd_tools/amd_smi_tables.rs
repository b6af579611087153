//! The tables of amd-smi: monitor, topology and xgmi, read to the trees its JSON would have.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::amd_smi_box;
use super::amd_smi_tree::Trees;
use super::table::{self, Cell, Edge, Square};
use crate::address;
use crate::limits;

/// Whether one of amd-smi's tables begins with this line.
pub(crate) fn begins(line: &str) -> bool {
    line.trim().ends_with(" TABLE:") || amd_smi_box::begins(line) || monitor_header(line).is_some()
}

/// Adds what the tables of a text say of each GPU.
pub(crate) fn add(text: &str, trees: &mut Trees) {
    monitor(text, trees);
    let squares = table::squares(text);
    let others = squares.iter().flat_map(topology).chain(xgmi(text)).chain(amd_smi_box::trees(text));
    others.for_each(|tree| trees.add(tree));
}

/// The header of `amd-smi monitor`: `GPU  POWER  GPU_TEMP …`, the time before it where it goes on for ever.
fn monitor_header(line: &str) -> Option<Vec<Cell<'_>>> {
    let header = table::cells(line);
    let first = header.iter().find(|cell| cell.text != "TIMESTAMP")?;
    let is_name = |cell: &Cell| cell.text.bytes().all(|byte| !byte.is_ascii_lowercase() && byte != b' ');
    let known = ["POWER", "GPU_T", "GFX", "VRAM", "MEM_", "PID", "MEM%", "PVIOL"];
    let has = header.iter().any(|cell| known.iter().any(|name| cell.text.starts_with(name)));
    (first.text == "GPU" && header.iter().all(is_name) && has).then_some(header)
}

/// Rows of `amd-smi monitor` below their headers, the last of each GPU; a table of processes gives processes.
fn monitor(text: &str, trees: &mut Trees) {
    let mut processes: BTreeMap<u32, Vec<Value>> = BTreeMap::new();
    let mut header: Option<Vec<Cell>> = None;
    let mut listed = 0;
    for line in text.lines() {
        if let Some(next) = monitor_header(line) {
            if next.iter().any(|cell| cell.text == "PID") {
                (processes, listed) = (BTreeMap::new(), 0);
            }
            header = Some(next);
            continue;
        }
        let Some(columns) = &header else { continue };
        let fields: Map<String, Value> = table::row(columns, line, Edge::Right)
            .into_iter()
            .filter_map(|(at, cell)| Some((columns.get(at)?.text.to_ascii_lowercase(), Value::from(cell.text))))
            .collect();
        let gpu = fields.get("gpu").and_then(|gpu| gpu.as_str()?.parse::<u32>().ok());
        match gpu {
            Some(gpu) if fields.contains_key("pid") => {
                if listed < limits::PROCESSES {
                    processes.entry(gpu).or_default().push(Value::Object(fields));
                }
                listed += 1;
            }
            Some(_) => trees.add(Value::Object(fields)),
            None if line.trim().is_empty() => {}
            None => header = None,
        }
    }
    for (gpu, list) in processes {
        trees.add(json!({"gpu": gpu, "process_info": list}));
    }
}

/// One table of `amd-smi topology`. Partitions stand in it under the same place several times: it is their order that
/// counts.
fn topology(square: &Square) -> Vec<Value> {
    let table = square.title.trim_end_matches(" table:").replace(' ', "_");
    let tree = |(gpu, name): (usize, &String)| {
        let mut tree = Map::from_iter([("gpu".to_owned(), Value::from(gpu))]);
        if address::parse(name).is_some() {
            tree.insert("bdf".to_owned(), Value::from(name.as_str()));
        }
        let row = square.rows.get(gpu).into_iter().flatten().enumerate();
        let row: Map<String, Value> =
            row.map(|(other, cell)| (format!("gpu_{other}"), Value::from(cell.as_str()))).collect();
        if ["hops", "weight", "link_type"].contains(&table.as_str()) {
            tree.insert(table.clone(), Value::Object(row));
        }
        Value::Object(tree)
    };
    square.names.iter().enumerate().map(tree).collect()
}

/// The table of `amd-smi xgmi`: a line for each GPU, and lines of what was read and written below it.
fn xgmi(text: &str) -> Vec<Value> {
    let mut found: Vec<Value> = Vec::new();
    let mut peers: Vec<&str> = Vec::new();
    for line in text.lines() {
        let cells = table::cells(line);
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some((&first, rest)) = words.split_first() else { continue };
        if first == "bdf" && rest.contains(&"link_type") {
            peers = words.iter().copied().filter(|word| word.contains(':')).collect();
        } else if let Some(gpu) = first.strip_prefix("GPU").and_then(|digits| digits.parse::<u32>().ok())
            && let [bdf, .., kind] = rest
            && !peers.is_empty()
            && address::parse(bdf).is_some()
        {
            found.push(json!({"gpu": gpu, "bdf": bdf, "link_metrics": {"link_type": kind, "links": []}}));
        } else if first == "Read"
            && let Some(links) = found.last_mut().and_then(|tree| tree["link_metrics"]["links"].as_array_mut())
        {
            let read = cells.iter().skip(1).map(|cell| cell.text);
            links.extend(
                peers
                    .iter()
                    .zip(read)
                    .enumerate()
                    .map(|(gpu, (bdf, read))| json!({"gpu": gpu, "bdf": bdf, "read": read})),
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::amd_tools::amd_smi_text::{looks_like, parse};
    use crate::found::Watts;
    use crate::told::Told;
    use gpupool_core::device::{Health, LinkKind};
    use gpupool_core::units::{Bytes, Percent};

    #[test]
    fn a_monitor_table_is_read_by_its_columns() {
        let text = "
GPU  POWER  GPU_TEMP  MEM_TEMP  GFX_UTIL  VRAM_USED  VRAM_TOTAL
  0  248 W     55 °C     48 °C      97 %     283 MB   196300 MB
  1    N/A     55 °C                 N/A     283 MB   196300 MB
";
        assert!(looks_like(text));
        let devices = parse(text).unwrap().devices;
        assert_eq!(devices[0].power, Told::Value(Watts(248_000)));
        assert_eq!(devices[0].utilization, Told::Value(Percent(97_000)));
        assert_eq!(devices[0].memory.used, Told::Value(Bytes(283 << 20)));
        assert_eq!(devices[1].power, Told::Unsupported("N/A".into()));
        assert_eq!(devices[1].temperature_c, Told::Value(55));
        assert_eq!(devices[1].memory.total, Told::Value(Bytes(196_300 << 20)));
        assert_eq!(devices[1].health, Some(Health::Healthy));
    }

    #[test]
    fn the_newer_monitor_has_memory_in_one_cell_and_processes_below() {
        let text = "
GPU  XCP  POWER   GPU_T   MEM_T   GFX%      VRAM_USAGE
  0    0  140 W   38 °C   32 °C    3 %    0.5/192.0 GB
  0    1    N/A     N/A     N/A   99 %             N/A

PROCESS INFO:
GPU                  NAME      PID   GTT_MEM   CPU_MEM  VRAM_MEM  MEM_USAGE
  0               python3       77    2.0 MB    0.0 B    1.0 GB     1.0 GB
";
        let devices = parse(text).unwrap().devices;
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].power, Told::Value(Watts(140_000)));
        assert_eq!(devices[0].utilization, Told::Value(Percent(3000)));
        assert_eq!(devices[0].memory.total, Told::Value(Bytes(192 << 30)));
        assert_eq!(devices[0].memory.used, Told::Value(Bytes(1 << 29)));
        let processes = devices[0].processes.value().unwrap();
        assert_eq!((processes[0].pid, &processes[0].memory), (77, &Told::Value(Bytes(1 << 30))));
    }

    #[test]
    fn topology_tables_become_links() {
        let text = "$ amd-smi topology
HOPS TABLE:
             0000:0c:00.0 0000:22:00.0
0000:0c:00.0 0            1
0000:22:00.0 1            0

LINK TYPE TABLE:
             0000:0c:00.0 0000:22:00.0
0000:0c:00.0 SELF         XGMI
0000:22:00.0 XGMI         SELF
";
        assert!(looks_like(text));
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices[1].pci.unwrap().to_string(), "0000:22:00.0");
        assert_eq!(snapshot.devices[1].health, None);
        assert_eq!(snapshot.links.iter().map(|link| link.kind).collect::<Vec<_>>(), [LinkKind::Xgmi(1)]);
    }

    #[test]
    fn an_xgmi_table_becomes_links() {
        let text = "LINK METRIC TABLE:
       bdf          bit_rate max_bandwidth link_type 0000:0c:00.0 0000:22:00.0
GPU0   0000:0c:00.0 32 Gb/s  512 Gb/s      XGMI
 Read                                                N/A          2 KB
 Write                                               N/A          1 KB
GPU1   0000:22:00.0 32 Gb/s  512 Gb/s      XGMI
 Read                                                0 KB         N/A
";
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices.len(), 2);
        assert_eq!(snapshot.links.len(), 1);
    }
}
