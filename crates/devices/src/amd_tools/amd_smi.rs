//! `amd-smi … --json` for all its commands: static, metric, list, process, monitor, topology, xgmi.

use std::collections::BTreeMap;
use std::str::FromStr;

use gpupool_core::Vendor;
use serde_json::{Map, Value};

use crate::address::parse_pci_address;
use crate::amd_tools::output;
use crate::amd_tools::values::{self, ReportedLink, ReportedPartition, complete_devices};
use crate::detected_device::{DetectedDevice, DeviceProcess};
use crate::reported::{Reported, truncate_text};
use crate::source::SourceError;
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{amounts, limits};

const FORMAT: &str = "amd-smi JSON";

/// Whether a text is amd-smi's JSON, or an error text of either AMD tool.
pub(crate) fn looks_like(text: &str) -> bool {
    let has = |word: &str| text.contains(word);
    let numbered = has("\"gpu\":") || has("\"gpu\" :");
    let known = ["asic", "bus", "usage", "power", "bdf", "process_list", "link_type", "vram_total", "power_usage"];
    let is_error = text.len() < 1 << 12 && has("\"error\":") && has("\"code\":");
    is_error
        || output::is_error_text(text)
        || has("\"gpu_data\"")
        || numbered && known.iter().any(|key| has(&format!("\"{key}\"")))
}

/// Parses the devices in amd-smi's JSON; several outputs in one text are combined by GPU.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    let (trees, warnings) = parse_trees(text)?;
    let mut reading = trees.to_reading();
    warnings.into_iter().for_each(|warning| reading.warn(warning));
    Ok(reading)
}

/// Parses the trees in amd-smi's JSON, and its other output as warnings.
pub(crate) fn parse_trees(text: &str) -> Result<(AmdSmiGpus, Vec<String>), SourceError> {
    let found = output::find_json(text);
    let (mut trees, mut lines, mut answered) = (AmdSmiGpus::default(), found.lines, false);
    for document in found.documents {
        match document.get("error").and_then(Value::as_str) {
            Some(error) => lines.push(format!("error: {error}")),
            None => {
                answered |= document.as_array().is_some_and(Vec::is_empty) || document.get("gpu_data").is_some();
                trees.add_document(document);
            }
        }
    }
    if !trees.is_empty() {
        lines.extend(found.problem.map(|problem| format!("{FORMAT}: devices after the cut are missing: {problem}")));
        return Ok((trees, lines));
    }
    match found.problem {
        Some(problem) if lines.is_empty() => Err(SourceError::malformed(FORMAT, problem)),
        None if answered => Ok((trees, lines)),
        _ => output::interpret_without_devices(&lines, FORMAT).map(|reading| (trees, reading.warnings)),
    }
}

// Meaning of amd-smi's fields: one JSON tree for each GPU.

/// GPUs in one or several outputs of amd-smi, each with all its fields.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct AmdSmiGpus {
    /// Trees by amd-smi's number of the GPU.
    gpus: BTreeMap<u32, Value>,
}

impl AmdSmiGpus {
    /// Adds the GPUs of a document: a list of them, bare or under `gpu_data`, or a single one.
    pub(crate) fn add_document(&mut self, document: Value) {
        match document {
            Value::Array(items) => items.into_iter().for_each(|item| self.add(item)),
            Value::Object(mut root) => match root.remove("gpu_data") {
                Some(Value::Array(items)) => items.into_iter().for_each(|item| self.add(item)),
                Some(one) => self.add(one),
                None => self.add(Value::Object(root)),
            },
            _ => {}
        }
    }

    /// Adds the fields of one GPU; items without a number, such as CPUs, are left out.
    pub(crate) fn add(&mut self, tree: Value) {
        let Some(number) = tree.get("gpu").and_then(parse_number) else { return };
        // `monitor` repeats a GPU for each of its partitions; the first one has the values of the GPU.
        if tree.get("xcp").and_then(parse_number::<u32>).is_some_and(|part| part > 0) {
            return;
        }
        // One GPU beyond the limit is enough to warn about it.
        if self.gpus.len() > limits::DEVICES && !self.gpus.contains_key(&number) {
            return;
        }
        let known = self.gpus.entry(number).or_insert_with(|| Value::Object(Map::new()));
        overlay(known, tree);
    }

    /// Adds the fields of other outputs, replacing known ones.
    pub(crate) fn add_all(&mut self, other: &Self) {
        other.gpus.values().cloned().for_each(|tree| self.add(tree));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }

    /// Returns the numbers of the GPUs.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.gpus.keys().copied()
    }

    /// Returns the devices, in amd-smi's order.
    pub(crate) fn to_reading(&self) -> SourceReading {
        let mut reading = SourceReading::default();
        let (mut partitions, mut indices) = (Vec::new(), BTreeMap::new());
        for (&number, tree) in &self.gpus {
            let tree = GpuFields(tree);
            let Some(index) = reading.push(device(number, tree)) else { break };
            indices.insert(number, index);
            let modes = ["partition.compute_partition", "partition.accelerator_partition", "compute_partition"];
            let ids = ["partition_id", "partition.partition_id"];
            partitions.push(ReportedPartition::new(tree.text(&ids).as_deref(), tree.text(&modes).as_deref()));
            warn_of_errors(&mut reading, number, tree);
        }
        reading.join(links(&self.gpus, &indices));
        complete_devices(&mut reading, &partitions);
        reading
    }
}

/// Merges `new` into `known`, objects key by key; an absent value replaces nothing.
fn overlay(known: &mut Value, new: Value) {
    match (known, new) {
        (Value::Object(known), Value::Object(new)) if !new.contains_key("value") => {
            for (key, value) in new {
                match known.get_mut(&key) {
                    Some(known) => overlay(known, value),
                    None => drop(known.insert(key, value)),
                }
            }
        }
        (known, new) => {
            let has_value = values::text_of(&new).is_none_or(|text| values::has_value(&text));
            if has_value {
                *known = new;
            }
        }
    }
}

fn parse_number<T: FromStr + TryFrom<u64>>(value: &Value) -> Option<T> {
    amounts::parse_count(&values::text_of(value)?)
}

/// Fields of one GPU, by paths like `asic.market_name`.
#[derive(Clone, Copy)]
pub(crate) struct GpuFields<'a>(pub &'a Value);

impl<'a> GpuFields<'a> {
    fn at(self, path: &str) -> Option<&'a Value> {
        path.split('.').try_fold(self.0, |tree, key| tree.get(key))
    }

    /// Returns the texts at these paths, in their order.
    fn texts(self, paths: &[&str]) -> Vec<String> {
        paths.iter().filter_map(|path| values::text_of(self.at(path)?)).collect()
    }

    /// Returns the first text with a value.
    pub(crate) fn text(self, paths: &[&str]) -> Option<String> {
        self.texts(paths).into_iter().find(|text| values::has_value(text))
    }

    /// Returns the first value at these paths, or the reason for its absence.
    pub(crate) fn reported<T>(self, paths: &[&str], parse: impl Fn(&str) -> Option<T>) -> Reported<T> {
        let texts = self.texts(paths);
        texts.iter().fold(Reported::ABSENT, |known, text| known.or(Reported::from_cell(text, &parse)))
    }
}

/// Builds a device from its fields. The paths are those of all amd-smi versions, the newest and most exact first.
fn device(number: u32, tree: GpuFields) -> DetectedDevice {
    let mut found = DetectedDevice::new(Vendor::Amd);
    found.index = Some(number);
    let render = tree.text(&["render", "drm_render"]);
    found.minor = render.and_then(|render| render.rsplit("renderD").next()?.parse().ok());
    let names = tree.texts(&["asic.market_name", "board.product_name", "market_name"]);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (id, revision) = (tree.text(&["asic.device_id"]), tree.text(&["asic.rev_id"]));
    let model = id.as_deref().map(|id| values::PciModel { id, revision: revision.as_deref() });
    found.name = values::best_name(&names, model, &[]);
    let ids = tree.texts(&["asic.asic_serial", "asic_serial", "hip_uuid", "unique_id"]);
    let long = || tree.text(&["uuid"]).and_then(|uuid| values::unique_id(&uuid).or_else(|| values::long_uuid(&uuid)));
    found.uuid = ids.iter().find_map(|id| values::unique_id(id)).or_else(long);
    found.pci = tree.text(&["bus.bdf", "bdf"]).and_then(|bdf| parse_pci_address(&bdf));
    let driver = tree.text(&["driver.version", "driver.driver_version", "driver_version"]);
    found.driver = driver.and_then(|version| values::driver_version(&version));
    found.numa = tree.text(&["numa.node"]).and_then(|node| values::numa_node(&node));
    memory(&mut found, tree);
    found.utilization =
        tree.reported(&["usage.gfx_activity", "usage.gfx_usage", "gfx", "gfx_util", "gfx%"], amounts::parse_percent);
    let temperature = [
        "temperature.edge",
        "temperature.edge_temperature",
        "temperature.hotspot",
        "temperature.hotspot_temperature",
        "hotspot_temperature",
        "gpu_temp",
        "gpu_t",
    ];
    found.temperature_c = tree.reported(&temperature, amounts::parse_celsius);
    let power = [
        "power.socket_power",
        "power.current_socket_power",
        "power.average_socket_power",
        "power.current_power",
        "power.average_power",
        "power_usage",
        "power",
    ];
    found.power = tree.reported(&power, amounts::parse_watts);
    let limit = [
        "limit.socket_power",
        "limit.socket_power_limit",
        "limit.ppt0.socket_power_limit",
        "limit.power_cap",
        "limit.current_power",
        "power.power_limit",
        "limit.max_power",
        "limit.max_power_limit",
        "limit.ppt0.max_power_limit",
    ];
    let caps = limit.iter().map(|path| tree.reported(&[path], amounts::parse_watts).without_zero("0 W"));
    found.power_limit = caps.fold(Reported::ABSENT, Reported::or);
    found.processes = processes(tree.0);
    found
}

fn memory(found: &mut DetectedDevice, tree: GpuFields) {
    let megabytes = |paths: &[&str]| tree.reported(paths, |text| amounts::parse_bytes(text, "MB"));
    let total =
        ["mem_usage.total_vram", "vram.size", "vram.vram_size", "vram.vram_size_mb", "vram_total", "fb_usage.fb_total"];
    found.memory.total = megabytes(&total).without_zero("0 bytes");
    found.memory.used = megabytes(&["mem_usage.used_vram", "vram_used", "fb_usage.fb_used"]);
    found.memory.host_total = megabytes(&["mem_usage.total_gtt"]);
    found.memory.host_used = megabytes(&["mem_usage.used_gtt"]);
}

/// Warns of uncorrectable memory errors. The count alone does not make a device unhealthy: the driver retires pages.
fn warn_of_errors(reading: &mut SourceReading, number: u32, tree: GpuFields) {
    let paths = ["ecc.total_uncorrectable_count", "ecc.total_uncorrectable", "ecc.uncorrectable_count", "double_ecc"];
    if let Reported::Value(count @ 1..) = tree.reported(&paths, amounts::parse_count::<u64>) {
        reading.warn(format!("GPU {number}: {count} uncorrectable memory errors since the driver was loaded"));
    }
}

// Links between GPUs, in the formats of all amd-smi versions.

/// Returns all links in the trees. `indices` maps a GPU's number to the index of its device.
pub(crate) fn links(gpus: &BTreeMap<u32, Value>, indices: &BTreeMap<u32, usize>) -> Vec<DetectedLink> {
    let by_bdf: BTreeMap<String, u32> = gpus.iter().filter_map(|(&gpu, tree)| Some((bdf(tree)?, gpu))).collect();
    let mut links = Vec::new();
    for (gpu, tree) in gpus {
        let mut join = |other: Option<u32>, kind: Option<String>, hops: Option<u64>, weight: Option<u64>| {
            let link = ReportedLink { kind: kind.as_deref(), hops, weight }.to_link_kind();
            if let (Some(&a), Some(&b), Some(link)) = (indices.get(gpu), other.and_then(|gpu| indices.get(&gpu)), link)
            {
                links.push(DetectedLink::new(a, b, link));
            }
        };
        for (name, kind) in tree.get("link_type").and_then(Value::as_object).into_iter().flatten() {
            let count = |table: &str| tree.get(table)?.get(name).and_then(parse_number);
            let other = name.rsplit('_').next().and_then(|digits| digits.parse().ok());
            join(other, values::text_of(kind), count("hops"), count("weight"));
        }
        let peer = |link: &Value| {
            let by_number = link.get("gpu").and_then(parse_number);
            by_number.or_else(|| by_bdf.get(&bdf(link)?).copied())
        };
        for link in tree.get("links").and_then(Value::as_array).into_iter().flatten() {
            let count = |names: &[&str]| names.iter().find_map(|name| link.get(name).and_then(parse_number));
            join(peer(link), GpuFields(link).text(&["link_type"]), count(&["num_hops", "hops"]), count(&["weight"]));
        }
        let metrics = tree.get("link_metrics");
        for link in metrics.and_then(|metrics| metrics.get("links")).and_then(Value::as_array).into_iter().flatten() {
            let has_traffic = GpuFields(link).text(&["read", "write"]).is_some();
            let kind = GpuFields(link).text(&["link_type"]).or_else(|| GpuFields(metrics?).text(&["link_type"]));
            join(peer(link), kind.filter(|_| has_traffic), None, None);
        }
    }
    links
}

fn bdf(tree: &Value) -> Option<String> {
    GpuFields(tree).text(&["bdf", "bus.bdf"]).map(|bdf| bdf.to_ascii_lowercase())
}

// Processes of each GPU.

/// Returns the processes of a GPU. One that cannot be parsed makes the list incomplete, and so a failure.
pub(crate) fn processes(tree: &Value) -> Reported<Vec<DeviceProcess>> {
    let Some(listed) = tree.get("process_list").or_else(|| tree.get("process_info")) else { return Reported::ABSENT };
    let items = match listed {
        Value::Array(items) => items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut found = Vec::new();
    for item in items.iter().take(limits::PROCESSES) {
        match item.get("process_info").unwrap_or(item) {
            // A text instead of a process: there is none, or the reason for the missing list.
            Value::String(text) if text.contains("No running processes") || !values::has_value(text) => {}
            Value::String(text) => return Reported::Failed(truncate_text(text)),
            info => match process(info) {
                Some(process) => found.push(process),
                None => return Reported::Failed("a process without a pid".into()),
            },
        }
    }
    Reported::Value(found)
}

fn process(info: &Value) -> Option<DeviceProcess> {
    let tree = GpuFields(info);
    let name = tree.text(&["name", "process_name"]);
    let memory = ["memory_usage.vram_mem", "vram_mem", "mem_usage", "mem"];
    Some(DeviceProcess {
        pid: info.get("pid").and_then(parse_number)?,
        name: name.map(|name| name.chars().take(limits::TEXT_CHARS).collect::<String>().into()),
        memory: tree.reported(&memory, |text| amounts::parse_bytes(text, "B")),
        ..DeviceProcess::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::{DevicePartition, Milliwatts};
    use crate::reported::Reported;
    use gpupool_core::{Bytes, DeviceHealth, LinkKind, Percent};

    const STATIC: &str = r#"$ amd-smi static --json
        {"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0x7E8F7E20764E2714"},
            "bus": {"bdf": "0000:05:00.0"}, "limit": {"max_power": {"value": 750, "unit": "W"}, "socket_power": "N/A"},
            "driver": {"version": "Linuxversion6.14.0-24-generic(buildd@host)"}, "numa": {"node": 1},
            "vram": {"size": {"value": 196592, "unit": "MB"}}, "partition": {"compute_partition": "SPX"}}],
         "cpu_data": [{"cpu": 0}]}"#;

    const METRIC: &str = r#"[{"gpu": 0, "usage": {"gfx_activity": {"value": 7, "unit": "%"}},
            "power": {"socket_power": {"value": 137, "unit": "W"}}, "ecc": {"total_uncorrectable_count": 2},
            "temperature": {"edge": "N/A", "hotspot": {"value": 41, "unit": "C"}},
            "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}}}]"#;

    #[test]
    fn several_outputs_about_a_gpu_make_one_device() {
        let reading = parse(&format!("{STATIC}\n{METRIC}")).unwrap();
        let [gpu] = reading.devices.as_slice() else { panic!("{reading:?}") };
        assert_eq!(gpu.name.as_deref(), Some("AMD Instinct MI300X"));
        assert_eq!(gpu.uuid.as_deref(), Some("GPU-7e8f7e20764e2714"));
        assert_eq!(gpu.driver.as_deref(), Some("6.14.0-24-generic"));
        assert_eq!(gpu.numa, Some(1));
        assert_eq!(gpu.memory.total, Reported::Value(Bytes(196_592 << 20)));
        assert_eq!(gpu.memory.used, Reported::Value(Bytes(283 << 20)));
        assert_eq!(gpu.power, Reported::Value(Milliwatts(137_000)));
        assert_eq!(gpu.power_limit, Reported::Value(Milliwatts(750_000)));
        assert_eq!(gpu.temperature_c, Reported::Value(41));
        assert_eq!(gpu.utilization, Reported::Value(Percent(7000)));
        assert_eq!(gpu.partition, None);
        assert_eq!(gpu.health, Some(DeviceHealth::Healthy));
        assert!(reading.warnings[0].contains("2 uncorrectable memory errors"), "{:?}", reading.warnings);
    }

    #[test]
    fn static_output_alone_has_no_health() {
        assert_eq!(parse(STATIC).unwrap().devices[0].health, None);
    }

    #[test]
    fn processes_are_those_of_each_gpu() {
        let text = r#"[{"gpu": 0, "process_list": [{"process_info": {"name": "python3", "pid": 77,
                "memory_usage": {"vram_mem": {"value": 4096, "unit": "B"}}, "mem_usage": {"value": 9, "unit": "B"}}}]},
            {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
            {"gpu": 2, "process_list": [{"process_info": {"name": "x", "pid": "N/A"}}]}, {"gpu": 3}]"#;
        let devices = parse(text).unwrap().devices;
        let first = &devices[0].processes.value().unwrap()[0];
        assert_eq!((first.pid, first.name.as_deref()), (77, Some("python3")));
        assert_eq!(first.memory, Reported::Value(Bytes(4096)));
        assert_eq!(devices[1].processes, Reported::Value(Vec::new()));
        assert!(matches!(devices[2].processes, Reported::Failed(_)));
        assert!(devices[3].processes.is_absent());
    }

    #[test]
    fn both_shapes_of_topology_give_links() {
        let maps = r#"[{"gpu": 0, "hops": {"gpu_0": 0, "gpu_1": 2, "gpu_2": 1},
              "link_type": {"gpu_0": "SELF", "gpu_1": "PCIE", "gpu_2": "XGMI"}}, {"gpu": 1}, {"gpu": 2}]"#;
        let lists = r#"[{"gpu": 0, "bdf": "0000:08:00.0", "links": [
              {"gpu": 1, "bdf": "0000:44:00.0", "link_type": "PCIE", "num_hops": 2},
              {"bdf": "0000:45:00.0", "link_type": "XGMI", "num_hops": 1}]},
            {"gpu": 1, "bdf": "0000:44:00.0"}, {"gpu": 2, "bdf": "0000:45:00.0"}]"#;
        for text in [maps, lists] {
            let reading = parse(text).unwrap();
            let kinds: Vec<_> = reading.links.iter().map(|link| (link.a, link.b, link.kind)).collect();
            assert_eq!(kinds, [(0, 1, LinkKind::SameNuma), (0, 2, LinkKind::Xgmi(1))], "{text}");
        }
    }

    #[test]
    fn partitions_share_an_address_and_an_id() {
        let part = |gpu: u8, id: u8| {
            format!(
                r#"{{"gpu": {gpu}, "bdf": "0000:05:00.0", "partition_id": {id}, "asic": {{"asic_serial": "0x1"}},
                    "partition": {{"accelerator_partition": "CPX"}}}}"#
            )
        };
        let reading = parse(&format!("[{}, {}]", part(0, 0), part(1, 1))).unwrap();
        let expected = DevicePartition::Amd { id: 1, mode: Some("CPX".into()), parts: Some(2) };
        assert_eq!(reading.devices[1].partition, Some(expected));
        let spelled: Vec<String> = reading.identities().iter().map(ToString::to_string).collect();
        assert_eq!(spelled, ["0000:05:00.0/0", "0000:05:00.0/1"]);
    }

    #[test]
    fn errors_of_the_tool_are_errors() {
        let text = r#"{"error": "AMDSMI_STATUS_DRIVER_NOT_LOADED", "code": -1}"#;
        assert!(looks_like(text));
        let error = parse(text).unwrap_err();
        assert_eq!(error.code(), "driver_not_loaded");
        assert_eq!(parse("[{\"gpu\": 0, \"asic\": {").unwrap_err().code(), "malformed");
        assert!(parse("[]").unwrap().devices.is_empty());
        let cut = parse(r#"[{"gpu": 0, "bdf": "0000:05:00.0"}, {"gpu": 1, "bdf"#).unwrap();
        assert_eq!((cut.devices.len(), cut.warnings.len()), (1, 1));
    }
}
