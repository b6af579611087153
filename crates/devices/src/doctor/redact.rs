//! Redaction of bundled files: only listed fields of tool output remain, and the host's name is replaced.
//!
//! A bundle leaves the machine, and future versions of a tool may print new fields. So redaction does not search for
//! secrets; it drops every field that is not known to be harmless. UUIDs distinguish devices in a report, so they stay
//! by default; otherwise each is replaced by the same fake UUID in every file.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::amd_tools;
use crate::detected_device::is_uuid;
use crate::nvidia_smi::errors;
use crate::nvidia_smi::xml::{self, XmlElement};

/// Content that redaction removes or replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RedactionOptions {
    /// Serial numbers, names of processes and hosts, and every unlisted field.
    pub identities: bool,
    /// UUIDs and unique ids of devices.
    pub uuids: bool,
}

impl Default for RedactionOptions {
    /// Keeps UUIDs: a report needs to distinguish devices, and a UUID does not identify the machine's owner.
    fn default() -> Self {
        Self { identities: true, uuids: false }
    }
}

/// Fields and sections of nvidia-smi's XML whose texts stay; `*` at the end of a name matches any suffix.
const NVIDIA_SMI_FIELDS: &str = "timestamp driver_version cuda_version attached_gpus product_name product_brand \
    product_architecture uuid gpu_uuid minor_number index gpu_instance_id compute_instance_id profile gpu_part_number \
    vbios_version multigpu_board persistence_mode accounting_mode addressing_mode compute_mode display_mode \
    display_active display_attached performance_state fan_speed gpu_recovery_action gpu_virtualization_mode pci mig_mode \
    ecc_mode driver_model gsp_firmware_version fb_memory_usage shared_fb_memory_usage bar1_memory_usage cc_protected_memory_usage \
    memory_usage utilization temperature* supported_gpu_target_temp power_readings gpu_power_readings \
    module_power_readings gpu_memory_power_readings clocks* max_clocks max_customer_boost_clocks applications_clocks \
    default_applications_clocks ecc_errors retired_pages remapped_rows gpu_reset_status fabric pid type used_memory";

/// Fields and sections of amd-smi's JSON whose values stay.
const AMD_SMI_FIELDS: &str = "gpu xcp bdf bus market_name vendor_id vendor_name subvendor_id device_id rev_id subsystem_id \
    num_compute_units target_graphics_version oam_id asic_serial uuid hip_uuid unique_id hip_id kfd_id node_id \
    partition_id render drm_render card drm_card product_name driver limit vram numa partition cache_info ras \
    soc_pstate xgmi_plpd usage power clock temperature* pcie ecc ecc_blocks fan voltage* overdrive perf_level \
    mem_usage throttle xgmi_err energy link_type links hops weight link_metrics error code";

/// Fields and sections of rocm-smi's JSON whose values stay, with `_` for a space.
const ROCM_SMI_FIELDS: &str = "device_name device_id device_rev subsystem_id guid gpu_id node_id gfx_version vbios_version \
    unique_id card_series card_model card_vendor card_sku pci_bus partition_id compute_partition memory_partition \
    temperature* gpu_use* gpu_memory* vram* vis_vram* gtt* average* current* max_graphics* performance_level fan* \
    voltage* energy* sclk* mclk* fclk* socclk* dcefclk* pcie* (topology)* driver_version";

/// Redacts all files. Files that are not text hold binary numbers of the kernel and stay unchanged.
pub(super) fn redact<'a>(
    files: impl Iterator<Item = (&'a String, &'a mut Vec<u8>)>,
    host: Option<&str>,
    options: RedactionOptions,
) {
    // A shorter or common name could be another word.
    let host = host.filter(|host| options.identities && host.len() >= 4 && *host != "localhost");
    let mut replacements = DeviceIdReplacements::default();
    for (name, bytes) in files {
        let Ok(text) = std::str::from_utf8(bytes) else { continue };
        let mut text = if options.identities { keep_listed(name, text) } else { text.to_owned() };
        if let Some(host) = host {
            text = replace_words(
                &text,
                |c| c.is_alphanumeric() || matches!(c, '-' | '_'),
                |word| (word == host).then(|| "host".to_owned()),
            );
        }
        if options.uuids {
            text = replacements.replace_in(&text);
        }
        *bytes = text.into_bytes();
    }
}

/// Keeps the listed parts of a file.
fn keep_listed(name: &str, text: &str) -> String {
    let tool =
        ["nvidia-smi-q.xml", "nvidia-smi-L.txt", "amd-smi-", "rocm-smi-"].iter().find(|tool| name.starts_with(*tool));
    match tool {
        _ if name.ends_with(".error.txt") => text.to_owned(),
        Some(&"nvidia-smi-q.xml") => keep_listed_xml(text),
        Some(&"nvidia-smi-L.txt") => keep_device_lines(text),
        Some(&"amd-smi-") => keep_listed_json(text, AMD_SMI_FIELDS),
        Some(_) => keep_listed_json(text, ROCM_SMI_FIELDS),
        // The version of a kernel or module is followed by the user and host that built it: `(ada@build)`.
        None if ["proc/version", "proc/driver/nvidia/version"].contains(&name) => {
            text.lines().flat_map(|line| [text_before(line, '('), "\n"]).collect()
        }
        None => text.to_owned(),
    }
}

fn text_before(line: &str, end: char) -> &str {
    line.split(end).next().unwrap_or_default().trim_end()
}

/// Keeps device lines and messages of `nvidia-smi -L`. Old versions print a serial number instead of a UUID.
fn keep_device_lines(text: &str) -> String {
    let is_device = |line: &str| ["GPU ", "MIG "].iter().any(|start| line.trim_start().starts_with(start));
    let known = |line: &'_ str| match line.contains("(UUID:") || errors::looks_like(line) {
        true => Some(line.to_owned()),
        false => is_device(line).then(|| text_before(line, '(').to_owned()),
    };
    text.lines().filter_map(known).flat_map(|line| [line, "\n".to_owned()]).collect()
}

/// Whether a field is on a list.
fn is_listed(list: &str, field: &str) -> bool {
    let field = field.trim().to_lowercase().replace(' ', "_");
    list.split_whitespace().any(|known| match known.strip_suffix('*') {
        Some(start) => field.starts_with(start),
        None => field == known,
    })
}

/// Keeps the texts of listed elements and of everything in listed sections, and messages before the document. A text
/// without a document is a message and stays.
fn keep_listed_xml(text: &str) -> String {
    fn write(element: &XmlElement, known: bool, to: &mut String) {
        let known = known || is_listed(NVIDIA_SMI_FIELDS, &element.name);
        let id = element.attribute("id").map(|id| format!(" id=\"{}\"", escaped(id))).unwrap_or_default();
        to.push_str(&format!("<{}{id}>", element.name));
        // A section without children explains its absence in its text.
        to.push_str(&if known { escaped(&element.text) } else { String::new() });
        element.children.iter().for_each(|child| write(child, known, to));
        to.push_str(&format!("</{}>\n", element.name));
    }
    fn escaped(text: &str) -> String {
        text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
    }
    let Some(start) = text.find("<?xml").or_else(|| text.find("<nvidia_smi_log")) else { return text.to_owned() };
    let messages = text[..start].lines().filter(|line| errors::looks_like(line));
    let mut kept: String = messages.flat_map(|line| [line, "\n"]).collect();
    write(&xml::parse_document(&text[start..]).root, false, &mut kept);
    kept
}

/// Keeps the values of listed keys and of everything in listed sections. A text without a document is a message and
/// stays.
fn keep_listed_json(text: &str, list: &str) -> String {
    fn keep(value: Value, known: bool, list: &str) -> Option<Value> {
        match value {
            Value::Object(fields) => {
                let field = |(key, value): (String, Value)| {
                    let numbers = process_numbers(&key, &value);
                    let kept = numbers.or_else(|| keep(value, known || is_listed(list, &key), list))?;
                    Some((key, kept))
                };
                Some(Value::Object(fields.into_iter().filter_map(field).collect()))
            }
            Value::Array(items) => Some(items.into_iter().filter_map(|item| keep(item, known, list)).collect()),
            scalar => known.then_some(scalar),
        }
    }
    let documents = amd_tools::find_json(text).documents;
    if documents.is_empty() {
        return text.to_owned();
    }
    let kept = documents.into_iter().filter_map(|document| keep(document, false, list));
    kept.flat_map(|document| [document.to_string(), "\n".to_owned()]).collect()
}

/// Returns rocm-smi's entry of a process without the process name: `"PID77": "python3, 1, 4096, 0, 0"`.
fn process_numbers(key: &str, value: &Value) -> Option<Value> {
    let is_process = key.strip_prefix("PID").is_some_and(|pid| pid.parse::<u32>().is_ok());
    let (_, numbers) = value.as_str().filter(|_| is_process).map(amd_tools::name_and_numbers)?;
    Some(["process"].into_iter().chain(numbers).collect::<Vec<_>>().join(", ").into())
}

/// Replacements of the device ids found so far.
#[derive(Default)]
struct DeviceIdReplacements {
    uuids: BTreeMap<String, usize>,
    numbers: BTreeMap<u64, u64>,
}

impl DeviceIdReplacements {
    /// Replaces every UUID, and every AMD unique id in its own notation.
    fn replace_in(&mut self, text: &str) -> String {
        for id in text.lines().filter_map(|line| line.strip_prefix("unique_id ")?.trim().parse().ok()) {
            self.replacement_of(id);
        }
        let text = replace_words(
            text,
            |c| c.is_ascii_alphanumeric() || c == '-',
            |word| {
                let start = word.len().checked_sub(36)?;
                let uuid = word.get(start..).filter(|uuid| is_uuid(uuid))?;
                let next = self.uuids.len() + 1;
                let number = self.uuids.entry(uuid.to_ascii_lowercase()).or_insert(next);
                Some(format!("{}00000000-0000-4000-8000-{number:012}", &word[..start]))
            },
        );
        replace_words(
            &text,
            |c| c.is_ascii_alphanumeric(),
            |word| {
                if let Some(id) = word.parse().ok().filter(|id| self.numbers.contains_key(id)) {
                    return Some(self.replacement_of(id)?.to_string());
                }
                // Sizes in bytes and times in nanoseconds have fewer digits.
                let digits = word.strip_prefix("0x").or((word.len() == 16).then_some(word))?;
                let fake = self.replacement_of(u64::from_str_radix(digits, 16).ok()?)?;
                Some(format!("{}{fake:x}", &word[..word.len() - digits.len()]))
            },
        )
    }

    /// Returns the replacement of a number. Small numbers are common and are not ids.
    fn replacement_of(&mut self, id: u64) -> Option<u64> {
        let next = 0xfa00_0000_0000_0001 + self.numbers.len() as u64;
        (id > u64::from(u32::MAX)).then(|| *self.numbers.entry(id).or_insert(next))
    }
}

/// Replaces words of a text; everything between words stays.
fn replace_words(
    text: &str,
    is_word: impl Fn(char) -> bool,
    mut replacement: impl FnMut(&str) -> Option<String>,
) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(&is_word) {
        let (between, from) = rest.split_at(start);
        let (word, after) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
        replaced.push_str(between);
        match replacement(word) {
            Some(other) => replaced.push_str(&other),
            None => replaced.push_str(word),
        }
        rest = after;
    }
    replaced + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(files: &[(&str, &str)], options: RedactionOptions) -> Vec<String> {
        // Unsorted, so that the outputs are in the order of the inputs.
        let mut entries: Vec<(String, Vec<u8>)> =
            files.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect();
        redact(entries.iter_mut().map(|(name, bytes)| (&*name, bytes)), Some("node-seven"), options);
        entries.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect()
    }

    const ALL: RedactionOptions = RedactionOptions { identities: true, uuids: true };

    #[test]
    fn only_listed_fields_of_tool_output_are_kept() {
        let files = [
            (
                "nvidia-smi-q.xml",
                "WARNING: x\nUnable to determine the device handle for GPU 0000:02:00.0: Unknown Error\n\
                 <?xml version=\"1.0\"?><nvidia_smi_log><gpu id=\"00000000:01:00.0\"><serial>1650522004111</serial>\
                 <new_thing>secret</new_thing><product_name>A &amp; B</product_name><temperature><gpu_temp>41 C</gpu_temp>\
                 </temperature><processes><process_info><pid>7</pid><process_name>/home/ada/job</process_name>\
                 </process_info></processes></gpu></nvidia_smi_log>",
            ),
            (
                "amd-smi-static.json",
                r#"WARNING: ada [{"gpu": 0, "asic": {"market_name": "MI300X", "asic_serial": "0x1"}, "board": {"product_serial":
                    "PCB-77"}, "vram": {"size": {"value": 5, "unit": "MB"}}, "process_list": [{"name": "job"}]}]"#,
            ),
            (
                "rocm-smi-a.json",
                r#"{"card0": {"Serial Number": "PCB-77", "GPU use (%)": "5", "sclk clock speed:": "1"},
                    "system": {"PID12": "/home/ada/my, job, 1, 0, 0, 0", "Driver version": "6.8"}}"#,
            ),
            ("nvidia-smi-L.txt", "GPU 0: A (UUID: GPU-1)\nGPU 1: K20 (S/N: 1650522)\nada was here\n"),
            ("proc/version", "Linux version 6.8 (ada@build) #1\n"),
            ("findings.json", "on node-seven.example, not node-seventeen"),
            ("nvidia-smi-topo.error.txt", "exit code 9\ncannot see node-seven\n"),
        ];
        let seen = redacted(&files, RedactionOptions::default());
        assert_eq!(
            seen[0].replace('\n', ""),
            "Unable to determine the device handle for GPU 0000:02:00.0: Unknown Error<nvidia_smi_log>\
             <gpu id=\"00000000:01:00.0\"><serial></serial><new_thing></new_thing><product_name>A &amp; B</product_name>\
             <temperature><gpu_temp>41 C</gpu_temp></temperature><processes><process_info><pid>7</pid><process_name>\
             </process_name></process_info></processes></gpu></nvidia_smi_log>"
        );
        let json: Vec<Value> = seen[1..3].iter().map(|text| serde_json::from_str(text).unwrap()).collect();
        assert_eq!(
            json[0],
            serde_json::json!([{"gpu": 0, "asic": {"market_name": "MI300X", "asic_serial": "0x1"}, "board": {},
                "vram": {"size": {"value": 5, "unit": "MB"}}, "process_list": [{}]}])
        );
        assert_eq!(
            json[1],
            serde_json::json!({"card0": {"GPU use (%)": "5", "sclk clock speed:": "1"},
                "system": {"PID12": "process, 1, 0, 0, 0", "Driver version": "6.8"}})
        );
        assert_eq!(seen[3], "GPU 0: A (UUID: GPU-1)\nGPU 1: K20\n");
        assert_eq!(
            seen[4..],
            ["Linux version 6.8\n", "on host.example, not node-seventeen", "exit code 9\ncannot see host\n"]
        );
        let kept = redacted(&files, RedactionOptions { identities: false, uuids: false });
        assert!(kept.iter().zip(files).all(|(kept, (_, text))| kept == text));
    }

    #[test]
    fn error_messages_of_tools_are_kept() {
        let message = "Failed to initialize NVML: Driver/library version mismatch\n";
        let files =
            [("nvidia-smi-q.xml", message), ("nvidia-smi-L.txt", message), ("amd-smi-list.json", "ERROR: no driver\n")];
        assert_eq!(redacted(&files, ALL), files.map(|(_, text)| text));
    }

    #[test]
    fn uuids_are_kept_by_default_or_replaced_alike_in_every_file() {
        let list = "GPU 0: X (UUID: GPU-6ee2b5b2-1d5a-4a7e-9b3f-0123456789ab)\n";
        assert_eq!(redacted(&[("nvidia-smi-L.txt", list)], RedactionOptions::default()), [list]);
        let report = "GPU-6EE2B5B2-1d5a-4a7e-9b3f-0123456789ab, MIG-aaaaaaaa-1d5a-4a7e-9b3f-0123456789ab";
        let seen = redacted(&[("nvidia-smi-L.txt", list), ("report.txt", report)], ALL);
        assert_eq!(seen[0], "GPU 0: X (UUID: GPU-00000000-0000-4000-8000-000000000001)\n");
        assert_eq!(seen[1], "GPU-00000000-0000-4000-8000-000000000001, MIG-00000000-0000-4000-8000-000000000002");
    }

    #[test]
    fn an_amd_id_has_one_replacement_in_every_notation() {
        let files = [
            ("amd-smi-static.json", r#"{"gpu": 0, "asic_serial": "0x3F7A8C0D11223344"}"#),
            ("rocm-smi-a.json", r#"{"card0": {"Unique ID": "0x3f7a8c0d11223344"}}"#),
            ("sys/class/drm/card0/device/unique_id", "3f7a8c0d11223344\n"),
            ("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 416\nunique_id 4574122359298077508\n"),
            ("sys/class/kfd/kfd/topology/nodes/2/properties", "size_in_bytes 206158430208\nunique_id 5000000000\n"),
        ];
        assert_eq!(0x3f7a_8c0d_1122_3344_u64, 4_574_122_359_298_077_508);
        let fake = 0xfa00_0000_0000_0001_u64;
        let seen = redacted(&files, ALL);
        assert!(
            seen[0].contains(&format!("\"0x{fake:x}\"")) && seen[1].contains(&format!("\"0x{fake:x}\"")),
            "{seen:?}"
        );
        assert_eq!(seen[2], format!("{fake:x}\n"));
        assert_eq!(seen[3], format!("simd_count 416\nunique_id {fake}\n"));
        assert_eq!(seen[4], format!("size_in_bytes 206158430208\nunique_id {}\n", fake + 1));
    }

    proptest::proptest! {
        #[test]
        fn redaction_never_panics(start in ".{0,40}", key in "(<serial>|<gpu id=\"|unique_id |\"PID1\": \"|GPU 0: |0x)", end in "[ :\">0-9a-f\\-é|]{0,60}") {
            let text = format!("{start}{key}{end}");
            for name in ["nvidia-smi-q.xml", "nvidia-smi-L.txt", "rocm-smi-a.json", "proc/version", "x/unique_id"] {
                redacted(&[(name, &text), (name, &format!("<nvidia_smi_log>{text}"))], ALL);
            }
        }
    }
}
