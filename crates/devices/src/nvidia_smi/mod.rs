//! Output of `nvidia-smi` in each of its formats, and the tool as a source.
//!
//! A format is read in two steps. The first (one file per format) turns the text into the tree that `nvidia-smi -q -x`
//! prints; the second (`gpu`) turns that tree into devices, so that values are interpreted in one place. Formats that
//! only list devices or links create their devices themselves.

pub(crate) mod csv;
pub(crate) mod errors;
mod gpu;
pub(crate) mod list;
pub(crate) mod topo;
pub(crate) mod xml;

use gpupool_core::{DeviceHealth, DeviceIdentity};

use crate::detected_device::DetectedDevice;
use crate::reported::Reported;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::tool::{ToolOutput, VendorTool};

/// Maximum number of GPUs queried one by one after one GPU made the tool fail for all.
const MAX_SINGLE_QUERIES: u32 = 64;

/// Source that runs NVIDIA's command line tool.
#[derive(Debug)]
pub(crate) struct NvidiaSmi {
    tool: VendorTool,
    /// Fields to query without XML; determined once.
    fields: Option<Vec<String>>,
    /// Facts that stay while the devices stay.
    cached: Option<CachedLayout>,
    /// Devices of the last reading, to identify a lost one.
    known: Vec<DetectedDevice>,
}

#[derive(Debug)]
struct CachedLayout {
    /// Devices that the facts belong to.
    identities: Vec<DeviceIdentity>,
    /// Links between the devices.
    matrix: SourceReading,
    /// List of devices, if there are MIG instances: only the list has their UUIDs.
    list: SourceReading,
}

impl DeviceSource for NvidiaSmi {
    fn kind(&self) -> SourceKind {
        SourceKind::NvidiaSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut reading = self.query_devices()?;
        self.restore_lost_identities(&mut reading);
        let identities = reading.identities();
        if self.cached.as_ref().is_none_or(|cached| cached.identities != identities) {
            self.cached = Some(self.query_layout(&reading, identities));
        }
        if let Some(cached) = &self.cached {
            list::merge_list(&mut reading, cached.list.clone());
            topo::merge_topology(&mut reading, &cached.matrix);
        }
        self.known.clone_from(&reading.devices);
        Ok(reading)
    }
}

impl NvidiaSmi {
    /// Creates a source that runs `tool`.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, fields: None, cached: None, known: Vec::new() }
    }

    fn run(&mut self, arguments: &[&str]) -> Result<String, SourceError> {
        self.tool.run(arguments).map(output_text)
    }

    /// Queries all devices with one run of the tool if possible.
    fn query_devices(&mut self) -> Result<SourceReading, SourceError> {
        let result = xml::parse(&self.run(&["-q", "-x"])?);
        match result {
            Err(SourceError::Malformed { .. }) => self.query_table(),
            Ok(reading) if lists_only_failed_gpus(&reading) => Ok(self.query_gpus_one_by_one(reading)),
            result => result,
        }
    }

    /// Queries each GPU alone, because one failed GPU can make the tool fail for all.
    fn query_gpus_one_by_one(&mut self, failed_gpus: SourceReading) -> SourceReading {
        let mut reading = SourceReading::default();
        for number in 0..MAX_SINGLE_QUERIES {
            let text = self.run(&["-q", "-x", "-i", &number.to_string()]);
            match text.and_then(|text| xml::parse(&text)) {
                Ok(alone) if alone.devices.is_empty() => break,
                Ok(alone) => {
                    // The tool warns that it shows one of many GPUs, and therefore the GPU is not numbered.
                    let mut alone = SourceReading { devices: alone.devices, ..SourceReading::default() };
                    let gpus = alone.devices.iter_mut().filter(|device| device.partition.is_none());
                    gpus.for_each(|device| device.index = Some(number));
                    reading.merge(alone);
                }
                Err(error) => {
                    reading.warn(format!("GPU {number}: {error}"));
                    break;
                }
            }
        }
        reading.merge(failed_gpus);
        reading
    }

    /// Queries the devices as a table, without the fields that the tool does not support.
    fn query_table(&mut self) -> Result<SourceReading, SourceError> {
        let mut fields = match self.fields.take() {
            Some(fields) => fields,
            None => self.query_known_fields()?,
        };
        let mut reading = loop {
            let query = format!("--query-gpu={}", fields.join(","));
            match csv::parse(&self.run(&[&query, "--format=csv"])?) {
                Err(error) => {
                    let unknown = errors::unknown_field(&error);
                    let place = unknown.and_then(|unknown| fields.iter().position(|field| field == unknown));
                    match place {
                        Some(place) if fields.len() > 1 => drop(fields.remove(place)),
                        _ => return Err(error),
                    }
                }
                Ok(reading) => break reading,
            }
        };
        self.fields = Some(fields);
        self.add_processes(&mut reading)?;
        Ok(reading)
    }

    fn query_known_fields(&mut self) -> Result<Vec<String>, SourceError> {
        let text = self.run(&["--help-query-gpu"])?;
        let known = csv::parse_help_fields(&text);
        let wanted = csv::queried_fields().filter(|field| known.is_empty() || known.contains(field));
        Ok(wanted.map(str::to_owned).collect())
    }

    fn add_processes(&mut self, reading: &mut SourceReading) -> Result<(), SourceError> {
        let query = "--query-compute-apps=gpu_uuid,gpu_bus_id,pid,process_name,used_memory";
        match csv::parse_apps(&self.run(&[query, "--format=csv"])?) {
            Ok(processes) => {
                reading.merge(processes);
                for device in reading.devices.iter_mut().filter(|device| device.processes.is_absent()) {
                    device.processes = Reported::Value(Vec::new());
                }
            }
            Err(error) => reading.warn(format!("processes: {error}")),
        }
        Ok(())
    }

    /// Completes a lost GPU, which is reported by its PCI address only, with its earlier identity.
    fn restore_lost_identities(&self, reading: &mut SourceReading) {
        let unidentified = |device: &&mut DetectedDevice| device.uuid.is_none() && device.partition.is_none();
        for device in reading.devices.iter_mut().filter(unidentified) {
            let same =
                |known: &&DetectedDevice| known.partition.is_none() && known.pci.is_some() && known.pci == device.pci;
            if let Some(known) = self.known.iter().find(same) {
                device.fill_identity(known);
            }
        }
    }

    fn query_layout(&mut self, reading: &SourceReading, identities: Vec<DeviceIdentity>) -> CachedLayout {
        let mut query = |arguments: &[&str], parse: fn(&str) -> Result<SourceReading, SourceError>| {
            self.run(arguments).and_then(|text| parse(&text)).unwrap_or_else(|error| {
                let mut failed = SourceReading::default();
                failed.warn(format!("nvidia-smi {}: {error}", arguments.join(" ")));
                failed
            })
        };
        let has_mig_gpus = reading.devices.iter().any(|device| device.mig == Some(true));
        CachedLayout {
            identities,
            matrix: if reading.devices.is_empty() {
                SourceReading::default()
            } else {
                query(&["topo", "-m"], topo::parse)
            },
            list: if has_mig_gpus { query(&["-L"], list::parse) } else { SourceReading::default() },
        }
    }
}

/// Whether a reading has only GPUs that do not answer.
fn lists_only_failed_gpus(reading: &SourceReading) -> bool {
    let is_bad =
        |device: &DetectedDevice| matches!(device.health, Some(DeviceHealth::Lost | DeviceHealth::Unhealthy(_)));
    !reading.devices.is_empty() && reading.devices.iter().all(|device| device.name.is_none() && is_bad(device))
}

/// Returns the output of the tool, with its messages from standard error.
fn output_text(output: ToolOutput) -> String {
    if output.stdout.trim().is_empty() {
        return output.stderr;
    }
    let messages = output.stderr.lines().filter(|line| errors::looks_like(line));
    messages.fold(output.stdout, |text, line| text + "\n" + line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool;
    use gpupool_core::Bytes;
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    const TWO: &str = include_str!("../../tests/fixtures/nvidia_smi/two_gpus.xml");
    const MATRIX: &str = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t0-7\t1\n";

    /// Installs a tool that replies to each of these commands with a text and to others with an error, and logs them.
    fn scripted_tool(folder: &Path, answers: &[(&str, &str)]) -> NvidiaSmi {
        let mut script =
            String::from("#!/bin/sh\ncd \"$(dirname \"$0\")\" || exit 1\necho \"$*\" >> log\ncase \"$*\" in\n");
        for (number, (command, answer)) in answers.iter().enumerate() {
            fs::write(folder.join(number.to_string()), answer).unwrap();
            script += &format!("'{command}') cat {number} ;;\n");
        }
        script += "*) echo \"ERROR: Option $1 is not recognized.\"; exit 2 ;;\nesac\n";
        NvidiaSmi::new(VendorTool::new(tool::install_script(folder, &script), Duration::from_secs(60)))
    }

    fn run_count(folder: &Path, command: &str) -> usize {
        fs::read_to_string(folder.join("log")).unwrap().lines().filter(|line| *line == command).count()
    }

    #[test]
    fn one_run_reads_all_devices_and_links_are_queried_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = scripted_tool(folder.path(), &[("-q -x", TWO), ("topo -m", MATRIX)]);
        let first = source.read().unwrap();
        assert_eq!(first.devices.len(), 2);
        assert_eq!((first.links.len(), first.devices[1].numa), (1, Some(1)));
        assert_eq!(first.warnings, Vec::<String>::new());
        assert_eq!(source.read().unwrap(), first);
        assert_eq!((run_count(folder.path(), "-q -x"), run_count(folder.path(), "topo -m")), (2, 1));
    }

    #[test]
    fn without_a_matrix_there_is_a_warning_and_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let reading = scripted_tool(folder.path(), &[("-q -x", TWO)]).read().unwrap();
        assert_eq!((reading.devices.len(), reading.links.len(), reading.warnings.len()), (2, 0, 1));
        assert!(reading.warnings[0].contains("topo -m"));
    }

    #[test]
    fn a_version_mismatch_is_reported_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let text = "Failed to initialize NVML: Driver/library version mismatch";
        let error = scripted_tool(folder.path(), &[("-q -x", text)]).read().unwrap_err();
        assert_eq!(error.code(), "driver_library_mismatch");
        assert_eq!(run_count(folder.path(), "--help-query-gpu"), 0);
    }

    #[test]
    fn a_lost_gpu_keeps_its_identity_and_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let lost = "Unable to determine the device handle for GPU 0001:E1:00.0: GPU is lost.  Reboot the system to \
                    recover this GPU";
        let (head, gpus) = TWO.split_at(TWO.find("<gpu ").unwrap());
        let second = gpus.rfind("<gpu ").unwrap();
        let first = format!("{head}{}</nvidia_smi_log>", &gpus[..second]);
        let mut source =
            scripted_tool(folder.path(), &[("-q -x", &TWO.replace("00010000:E1", "00000001:E1")), ("topo -m", MATRIX)]);
        source.read().unwrap();
        let nothing = "No devices were found";
        let dark = [("-q -x", lost), ("-q -x -i 0", &first), ("-q -x -i 1", lost), ("-q -x -i 2", nothing)];
        source.tool = scripted_tool(folder.path(), &dark).tool;
        let reading = source.read().unwrap();
        let [well, lost] = &reading.devices[..] else { panic!("{reading:?}") };
        assert_eq!((well.index, well.health.clone()), (Some(0), Some(DeviceHealth::Healthy)));
        assert_eq!((lost.index, lost.health.clone()), (Some(1), Some(DeviceHealth::Lost)));
        assert_eq!(lost.uuid.as_deref(), Some("GPU-bbbbbbbb-0000-1111-2222-333333333333"));
        assert_eq!(reading.links.len(), 1, "the devices are the same, so the matrix still holds");
    }

    #[test]
    fn without_xml_a_table_of_the_known_fields_is_queried() {
        let folder = tempfile::tempdir().unwrap();
        let help = "List of valid properties to query for the switch \"--query-gpu\":\n\n\"index\"\nx\n\n\"uuid\" or \
                    \"gpu_uuid\"\nx\n\n\"memory.used\"\nx\n\n\"power.draw\"\nx\n";
        let table = "index, uuid, memory.used [MiB]\n0, GPU-a, 5 MiB\n1, GPU-b, 6 MiB\n";
        let processes = "gpu_uuid, gpu_bus_id, pid, process_name, used_gpu_memory [MiB]\nGPU-b, 01:00.0, 7, x, 6 MiB\n";
        let answers = [
            ("--help-query-gpu", help),
            (
                "--query-gpu=index,uuid,memory.used,power.draw --format=csv",
                "Field \"power.draw\" is not a valid field to query.\n",
            ),
            ("--query-gpu=index,uuid,memory.used --format=csv", table),
            ("--query-compute-apps=gpu_uuid,gpu_bus_id,pid,process_name,used_memory --format=csv", processes),
            ("topo -m", MATRIX),
        ];
        let mut source = scripted_tool(folder.path(), &answers);
        let reading = source.read().unwrap();
        assert_eq!(reading.devices[0].memory.used, Reported::Value(Bytes(5 << 20)));
        assert_eq!(reading.devices[0].processes, Reported::Value(Vec::new()));
        assert_eq!(reading.devices[1].processes.value().unwrap()[0].pid, 7);
        assert_eq!(reading.links.len(), 1);
        assert_eq!(source.read().unwrap(), reading);
        assert_eq!((run_count(folder.path(), "--help-query-gpu"), run_count(folder.path(), answers[1].0)), (1, 1));
    }

    #[test]
    fn instances_get_their_uuids_from_the_list() {
        let folder = tempfile::tempdir().unwrap();
        let log = "<nvidia_smi_log><gpu id=\"01:00.0\"><product_name>A100</product_name><uuid>GPU-a</uuid><mig_mode>\
                   <current_mig>Enabled</current_mig></mig_mode><mig_devices><mig_device><index>0</index>\
                   <gpu_instance_id>7</gpu_instance_id></mig_device></mig_devices></gpu></nvidia_smi_log>";
        let list =
            "GPU 0: A100 (UUID: GPU-a)\n  MIG 1g.5gb Device 0: (UUID: MIG-b)\n  MIG 1g.5gb Device 1: (UUID: MIG-c)\n";
        let mut source = scripted_tool(folder.path(), &[("-q -x", log), ("-L", list), ("topo -m", MATRIX)]);
        let reading = source.read().unwrap();
        let uuids: Vec<_> = reading.devices.iter().map(|device| device.uuid.as_deref()).collect();
        assert_eq!(uuids, [Some("GPU-a"), Some("MIG-b"), Some("MIG-c")]);
        assert!(reading.devices.iter().all(|device| device.pci == reading.devices[0].pci && device.numa == Some(0)));
    }
}
