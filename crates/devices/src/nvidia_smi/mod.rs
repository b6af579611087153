//! What `nvidia-smi` prints, in each of its forms, and the tool as a source.
//!
//! A form is read in two steps. The first (one file per form) turns the text into the tree that `nvidia-smi -q -x`
//! prints; the second (`gpu`) turns that tree into devices, so that what a value means is written once for all forms.
//! Forms that only list devices or the links between them make their devices themselves.

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

/// How many GPUs are asked one by one where one of them keeps the tool from telling of the others.
const ASKED_ONE_BY_ONE: u32 = 64;

/// NVIDIA's command line tool.
#[derive(Debug)]
pub(crate) struct NvidiaSmi {
    tool: VendorTool,
    /// Fields to ask for without XML; looked up once.
    fields: Option<Vec<String>>,
    /// What does not change while the devices stay the same.
    lasting: Option<Lasting>,
    /// The devices of the last answer, to say which one was lost.
    known: Vec<DetectedDevice>,
}

#[derive(Debug)]
struct Lasting {
    /// The devices this was asked for.
    of: Vec<DeviceIdentity>,
    /// How they are joined.
    matrix: SourceReading,
    /// Their list, where some are instances: only there are the UUIDs of these.
    list: SourceReading,
}

impl DeviceSource for NvidiaSmi {
    fn kind(&self) -> SourceKind {
        SourceKind::NvidiaSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut snapshot = self.devices()?;
        self.name_lost(&mut snapshot);
        let of = snapshot.identities();
        if self.lasting.as_ref().is_none_or(|lasting| lasting.of != of) {
            self.lasting = Some(self.ask_lasting(&snapshot, of));
        }
        if let Some(lasting) = &self.lasting {
            list::merge_list(&mut snapshot, lasting.list.clone());
            topo::join(&mut snapshot, &lasting.matrix);
        }
        self.known.clone_from(&snapshot.devices);
        Ok(snapshot)
    }
}

impl NvidiaSmi {
    /// A source that runs this tool.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, fields: None, lasting: None, known: Vec::new() }
    }

    fn run(&mut self, arguments: &[&str]) -> Result<String, SourceError> {
        self.tool.run(arguments).map(said)
    }

    /// The devices and what they report, from one run of the tool where that works.
    fn devices(&mut self) -> Result<SourceReading, SourceError> {
        let answer = xml::parse(&self.run(&["-q", "-x"])?);
        match answer {
            Err(SourceError::Malformed { .. }) => self.devices_without_xml(),
            Ok(snapshot) if is_silenced(&snapshot) => Ok(self.one_by_one(snapshot)),
            answer => answer,
        }
    }

    /// Asks for each GPU alone: one that does not answer can keep the tool from telling of any other.
    fn one_by_one(&mut self, silenced: SourceReading) -> SourceReading {
        let mut snapshot = SourceReading::default();
        for number in 0..ASKED_ONE_BY_ONE {
            let text = self.run(&["-q", "-x", "-i", &number.to_string()]);
            match text.and_then(|text| xml::parse(&text)) {
                Ok(alone) if alone.devices.is_empty() => break,
                Ok(alone) => {
                    // What it warns of is that it shows one of many, which is also why it does not number it.
                    let mut alone = SourceReading { devices: alone.devices, ..SourceReading::default() };
                    let gpus = alone.devices.iter_mut().filter(|device| device.partition.is_none());
                    gpus.for_each(|device| device.index = Some(number));
                    snapshot.merge(alone);
                }
                Err(error) => {
                    snapshot.warn(format!("GPU {number}: {error}"));
                    break;
                }
            }
        }
        snapshot.merge(silenced);
        snapshot
    }

    /// The devices by a table of fields, leaving out those the tool does not know.
    fn devices_without_xml(&mut self) -> Result<SourceReading, SourceError> {
        let mut fields = match self.fields.take() {
            Some(fields) => fields,
            None => self.known_fields()?,
        };
        let mut snapshot = loop {
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
                Ok(snapshot) => break snapshot,
            }
        };
        self.fields = Some(fields);
        self.add_processes(&mut snapshot)?;
        Ok(snapshot)
    }

    fn known_fields(&mut self) -> Result<Vec<String>, SourceError> {
        let text = self.run(&["--help-query-gpu"])?;
        let known = csv::help_fields(&text);
        let wanted = csv::asked_fields().filter(|field| known.is_empty() || known.contains(field));
        Ok(wanted.map(str::to_owned).collect())
    }

    fn add_processes(&mut self, snapshot: &mut SourceReading) -> Result<(), SourceError> {
        let query = "--query-compute-apps=gpu_uuid,gpu_bus_id,pid,process_name,used_memory";
        match csv::parse_apps(&self.run(&[query, "--format=csv"])?) {
            Ok(processes) => {
                snapshot.merge(processes);
                for device in snapshot.devices.iter_mut().filter(|device| device.processes.is_absent()) {
                    device.processes = Reported::Value(Vec::new());
                }
            }
            Err(error) => snapshot.warn(format!("processes: {error}")),
        }
        Ok(())
    }

    /// A GPU that was lost is named by its place only; what it was is known from before.
    fn name_lost(&self, snapshot: &mut SourceReading) {
        let nameless = |device: &&mut DetectedDevice| device.uuid.is_none() && device.partition.is_none();
        for device in snapshot.devices.iter_mut().filter(nameless) {
            let same =
                |known: &&DetectedDevice| known.partition.is_none() && known.pci.is_some() && known.pci == device.pci;
            if let Some(known) = self.known.iter().find(same) {
                device.fill_identity(known);
            }
        }
    }

    fn ask_lasting(&mut self, snapshot: &SourceReading, of: Vec<DeviceIdentity>) -> Lasting {
        let mut ask = |arguments: &[&str], parse: fn(&str) -> Result<SourceReading, SourceError>| {
            self.run(arguments).and_then(|text| parse(&text)).unwrap_or_else(|error| {
                let mut failed = SourceReading::default();
                failed.warn(format!("nvidia-smi {}: {error}", arguments.join(" ")));
                failed
            })
        };
        let has_instances = snapshot.devices.iter().any(|device| device.mig == Some(true));
        Lasting {
            of,
            matrix: if snapshot.devices.is_empty() {
                SourceReading::default()
            } else {
                ask(&["topo", "-m"], topo::parse)
            },
            list: if has_instances { ask(&["-L"], list::parse) } else { SourceReading::default() },
        }
    }
}

/// Whether an answer tells only of GPUs that do not answer.
fn is_silenced(snapshot: &SourceReading) -> bool {
    let is_bad =
        |device: &DetectedDevice| matches!(device.health, Some(DeviceHealth::Lost | DeviceHealth::Unhealthy(_)));
    !snapshot.devices.is_empty() && snapshot.devices.iter().all(|device| device.name.is_none() && is_bad(device))
}

/// What the tool said: its output, and messages it wrote elsewhere.
fn said(output: ToolOutput) -> String {
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

    /// A tool that answers each of these commands with a text, any other with an error, and keeps a log of them.
    fn tool(folder: &Path, answers: &[(&str, &str)]) -> NvidiaSmi {
        let mut script =
            String::from("#!/bin/sh\ncd \"$(dirname \"$0\")\" || exit 1\necho \"$*\" >> log\ncase \"$*\" in\n");
        for (number, (command, answer)) in answers.iter().enumerate() {
            fs::write(folder.join(number.to_string()), answer).unwrap();
            script += &format!("'{command}') cat {number} ;;\n");
        }
        script += "*) echo \"ERROR: Option $1 is not recognized.\"; exit 2 ;;\nesac\n";
        NvidiaSmi::new(VendorTool::new(tool::install_script(folder, &script), Duration::from_secs(60)))
    }

    fn asked(folder: &Path, command: &str) -> usize {
        fs::read_to_string(folder.join("log")).unwrap().lines().filter(|line| *line == command).count()
    }

    #[test]
    fn one_run_tells_everything_and_the_links_are_asked_for_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = tool(folder.path(), &[("-q -x", TWO), ("topo -m", MATRIX)]);
        let first = source.read().unwrap();
        assert_eq!(first.devices.len(), 2);
        assert_eq!((first.links.len(), first.devices[1].numa), (1, Some(1)));
        assert_eq!(first.warnings, Vec::<String>::new());
        assert_eq!(source.read().unwrap(), first);
        assert_eq!((asked(folder.path(), "-q -x"), asked(folder.path(), "topo -m")), (2, 1));
    }

    #[test]
    fn without_a_matrix_there_is_a_warning_and_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let snapshot = tool(folder.path(), &[("-q -x", TWO)]).read().unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.links.len(), snapshot.warnings.len()), (2, 0, 1));
        assert!(snapshot.warnings[0].contains("topo -m"));
    }

    #[test]
    fn a_mismatch_of_versions_is_said_to_be_one() {
        let folder = tempfile::tempdir().unwrap();
        let text = "Failed to initialize NVML: Driver/library version mismatch";
        let error = tool(folder.path(), &[("-q -x", text)]).read().unwrap_err();
        assert_eq!(error.code(), "driver_library_mismatch");
        assert_eq!(asked(folder.path(), "--help-query-gpu"), 0);
    }

    #[test]
    fn a_gpu_that_is_lost_keeps_its_name_and_loses_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let lost = "Unable to determine the device handle for GPU 0001:E1:00.0: GPU is lost.  Reboot the system to \
                    recover this GPU";
        let (head, gpus) = TWO.split_at(TWO.find("<gpu ").unwrap());
        let second = gpus.rfind("<gpu ").unwrap();
        let first = format!("{head}{}</nvidia_smi_log>", &gpus[..second]);
        let mut source =
            tool(folder.path(), &[("-q -x", &TWO.replace("00010000:E1", "00000001:E1")), ("topo -m", MATRIX)]);
        source.read().unwrap();
        let nothing = "No devices were found";
        let dark = [("-q -x", lost), ("-q -x -i 0", &first), ("-q -x -i 1", lost), ("-q -x -i 2", nothing)];
        source.tool = tool(folder.path(), &dark).tool;
        let snapshot = source.read().unwrap();
        let [well, lost] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!((well.index, well.health.clone()), (Some(0), Some(DeviceHealth::Healthy)));
        assert_eq!((lost.index, lost.health.clone()), (Some(1), Some(DeviceHealth::Lost)));
        assert_eq!(lost.uuid.as_deref(), Some("GPU-bbbbbbbb-0000-1111-2222-333333333333"));
        assert_eq!(snapshot.links.len(), 1, "the devices are the same, so the matrix still holds");
    }

    #[test]
    fn without_xml_a_table_of_the_known_fields_is_asked_for() {
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
        let mut source = tool(folder.path(), &answers);
        let snapshot = source.read().unwrap();
        assert_eq!(snapshot.devices[0].memory.used, Reported::Value(Bytes(5 << 20)));
        assert_eq!(snapshot.devices[0].processes, Reported::Value(Vec::new()));
        assert_eq!(snapshot.devices[1].processes.value().unwrap()[0].pid, 7);
        assert_eq!(snapshot.links.len(), 1);
        assert_eq!(source.read().unwrap(), snapshot);
        assert_eq!((asked(folder.path(), "--help-query-gpu"), asked(folder.path(), answers[1].0)), (1, 1));
    }

    #[test]
    fn instances_get_their_uuids_from_the_list() {
        let folder = tempfile::tempdir().unwrap();
        let log = "<nvidia_smi_log><gpu id=\"01:00.0\"><product_name>A100</product_name><uuid>GPU-a</uuid><mig_mode>\
                   <current_mig>Enabled</current_mig></mig_mode><mig_devices><mig_device><index>0</index>\
                   <gpu_instance_id>7</gpu_instance_id></mig_device></mig_devices></gpu></nvidia_smi_log>";
        let list =
            "GPU 0: A100 (UUID: GPU-a)\n  MIG 1g.5gb Device 0: (UUID: MIG-b)\n  MIG 1g.5gb Device 1: (UUID: MIG-c)\n";
        let mut source = tool(folder.path(), &[("-q -x", log), ("-L", list), ("topo -m", MATRIX)]);
        let snapshot = source.read().unwrap();
        let uuids: Vec<_> = snapshot.devices.iter().map(|device| device.uuid.as_deref()).collect();
        assert_eq!(uuids, [Some("GPU-a"), Some("MIG-b"), Some("MIG-c")]);
        assert!(snapshot.devices.iter().all(|device| device.pci == snapshot.devices[0].pci && device.numa == Some(0)));
    }
}
