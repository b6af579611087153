//! AMD's tools as sources, and the JSON they print.
//!
//! Each tool has a file that interprets its fields. `output` finds the JSON in a tool's output and recognizes error
//! texts; `values` holds the formats common to both tools.

pub(crate) mod amd_smi;
mod output;
pub(crate) mod rocm_smi;
mod values;

pub(crate) use output::find_json;
pub(crate) use rocm_smi::name_and_numbers;

use crate::amd_tools::amd_smi::AmdSmiGpus;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::tool::{ToolOutput, VendorTool};

// AMD's tools as sources. Their output counts, not their exit code: rocm-smi fails with 0, and amd-smi exits with 255
// on a machine without a GPU.

/// AMD's newer tool. Each reading runs the tool for metrics and processes; constant facts are read again only when the
/// devices change.
#[derive(Debug)]
pub(crate) struct AmdSmiSource {
    tool: VendorTool,
    /// Constant facts of the devices and their links.
    facts: Option<AmdSmiOutput>,
}

/// Fields of each GPU, and other output as warnings.
type AmdSmiOutput = (AmdSmiGpus, Vec<String>);

impl AmdSmiSource {
    /// Creates a source that runs this tool.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, facts: None }
    }

    fn run_command(&mut self, command: &str) -> Result<AmdSmiOutput, SourceError> {
        let output = self.tool.run(&[command, "--json"])?;
        match amd_smi::parse_trees(&output.stdout) {
            Ok((trees, warnings)) if !trees.is_empty() => Ok((trees, warnings)),
            _ => amd_smi::parse_trees(&all_output(&output)),
        }
    }

    /// Returns the constant facts, read again if the GPU numbers differ from those of `now`.
    fn facts(&mut self, now: Option<&AmdSmiGpus>) -> Result<&AmdSmiOutput, SourceError> {
        let same = |(facts, _): &AmdSmiOutput| now.is_none_or(|now| facts.numbers().eq(now.numbers()));
        let facts = match self.facts.take().filter(same) {
            Some(facts) => facts,
            None => {
                let (mut trees, mut warnings) = self.run_command("static")?;
                match self.run_command("topology") {
                    Ok((topology, _)) => trees.add_all(&topology),
                    Err(error) => warnings.push(format!("amd-smi topology: {error}")),
                }
                (trees, warnings)
            }
        };
        Ok(self.facts.insert(facts))
    }
}

impl DeviceSource for AmdSmiSource {
    fn kind(&self) -> SourceKind {
        SourceKind::AmdSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let metric = match self.run_command("metric") {
            Ok(metric) => Ok(metric),
            // Devices without readings are better than no devices if the tool works.
            Err(error @ (SourceError::Driver(_) | SourceError::Malformed { .. })) => Err(error),
            Err(error) => {
                self.facts = None;
                return Err(error);
            }
        };
        let (mut trees, mut warnings) = match self.facts(metric.as_ref().ok().map(|(trees, _)| trees)) {
            Ok(facts) => facts.clone(),
            Err(error) if metric.is_ok() => (AmdSmiGpus::default(), vec![format!("amd-smi static: {error}")]),
            Err(error) => return Err(error),
        };
        let mut add = |command: &str, output: Result<AmdSmiOutput, SourceError>| match output {
            Ok((output, lines)) => {
                trees.add_all(&output);
                warnings.extend(lines);
            }
            Err(error) => warnings.push(format!("amd-smi {command}: {error}")),
        };
        add("metric", metric);
        let processes = self.run_command("process");
        add("process", processes);
        let mut reading = trees.to_reading();
        for warning in warnings {
            if !reading.warnings.contains(&warning) {
                reading.warn(warning);
            }
        }
        Ok(reading)
    }
}

/// Flag sets for a reading, richest first. An older version refuses all flags if one is unknown. Every version
/// supports `-a`, which is the slowest.
const FLAG_SETS: [&[&str]; 3] = [&ALL_FLAGS, ALL_FLAGS.split_at(1).1, &["-a", "--showmeminfo", "all", "--json"]];

/// All useful flags, the newest first.
const ALL_FLAGS: [&str; 15] = [
    "--showcomputepartition",
    "--showid",
    "--showuniqueid",
    "--showbus",
    "--showproductname",
    "--showdriverversion",
    "--showtemp",
    "--showuse",
    "--showpower",
    "--showmaxpower",
    "--showmeminfo",
    "vram",
    "gtt",
    "--showpids",
    "--json",
];

/// AMD's older tool. Each reading runs the tool once; links are read again only when the devices change.
#[derive(Debug)]
pub(crate) struct RocmSmiSource {
    tool: VendorTool,
    /// Index of the flag set that this version supports; `None` until one worked.
    flag_set: Option<usize>,
    topology: Option<CachedTopology>,
}

#[derive(Debug)]
struct CachedTopology {
    /// Number and address of each device in the topology.
    devices: Vec<(Option<u32>, Option<String>)>,
    /// Output of the tool.
    json: String,
}

impl RocmSmiSource {
    /// Creates a source that runs this tool.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, flag_set: None, topology: None }
    }

    /// Runs the tool with the richest flag set that this version supports.
    fn run_flags(&mut self) -> Result<ToolOutput, SourceError> {
        let first = self.flag_set.unwrap_or(0);
        for (number, flags) in FLAG_SETS.iter().enumerate().skip(first) {
            let output = self.tool.run(flags)?;
            let refused = |text: &str| text.contains("unrecognized arguments") || text.contains("usage: rocm");
            if !refused(&output.stderr) && !refused(&output.stdout) {
                self.flag_set = Some(number);
                return Ok(output);
            }
        }
        Err(SourceError::malformed("rocm-smi JSON", "this version supports none of the flag sets"))
    }

    /// Returns the tool's output about the links between these devices.
    fn topology_output(&mut self, devices: &SourceReading) -> Result<&str, SourceError> {
        let name = |address: gpupool_core::PciAddress| address.to_string();
        let addresses: Vec<_> = devices.devices.iter().map(|device| (device.index, device.pci.map(name))).collect();
        let known = self.topology.take().filter(|topology| topology.devices == addresses);
        let topology = match known {
            Some(topology) => topology,
            None => CachedTopology { devices: addresses, json: self.tool.run(&["--showtopo", "--json"])?.stdout },
        };
        Ok(&self.topology.insert(topology).json)
    }
}

impl DeviceSource for RocmSmiSource {
    fn kind(&self) -> SourceKind {
        SourceKind::RocmSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let output = self.run_flags()?;
        let mut reading = match rocm_smi::parse(&output.stdout) {
            Ok(reading) if !reading.devices.is_empty() => reading,
            _ => return rocm_smi::parse(&all_output(&output)),
        };
        match self.topology_output(&reading) {
            Ok(json) if rocm_smi::looks_like(json) || json.contains("\"system\"") => {
                return rocm_smi::parse(&format!("{}\n{json}", output.stdout));
            }
            Ok(_) => {}
            Err(error) => reading.warn(format!("rocm-smi --showtopo: {error}")),
        }
        Ok(reading)
    }
}

/// Joins standard output and standard error.
fn all_output(output: &ToolOutput) -> String {
    format!("{}\n{}", output.stdout, output.stderr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::Milliwatts;
    use crate::reported::Reported;
    use crate::tool;
    use gpupool_core::LinkKind;
    use std::path::Path;
    use std::time::Duration;

    /// Installs a tool that is a shell script with this body; `$1` is its first argument.
    fn tool(folder: &Path, body: &str) -> VendorTool {
        let script = format!("#!/bin/sh\necho \"$1\" >> {}/runs\n{body}\n", folder.display());
        VendorTool::new(tool::install_script(folder, &script), Duration::from_secs(60))
    }

    fn runs(folder: &Path) -> Vec<String> {
        std::fs::read_to_string(folder.join("runs")).unwrap().lines().map(str::to_owned).collect()
    }

    const AMD_SMI: &str = r#"case "$1" in
        static) echo 'WARNING: groups'; echo '[{"gpu": 0, "bus": {"bdf": "0000:05:00.0"}}, {"gpu": 1, "bus": {"bdf": "0000:06:00.0"}}]';;
        metric) echo '[{"gpu": 0, "power": {"socket_power": {"value": 9, "unit": "W"}}}, {"gpu": 1, "power": "N/A"}]';;
        process) echo '[{"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]}]';;
        topology) echo '[{"gpu": 0, "links": [{"gpu": 1, "link_type": "XGMI", "num_hops": 1}]}]';;
        esac"#;

    #[test]
    fn amd_smi_reads_constant_facts_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = AmdSmiSource::new(tool(folder.path(), AMD_SMI));
        let first = source.read().unwrap();
        assert_eq!(first.devices.len(), 2);
        assert_eq!(first.devices[0].power, Reported::Value(Milliwatts(9000)));
        assert_eq!(first.devices[0].processes, Reported::Value(Vec::new()));
        assert_eq!(first.links[0].kind, LinkKind::Xgmi(1));
        assert_eq!(first.warnings, ["WARNING: groups"]);
        assert_eq!(source.read().unwrap(), first);
        assert_eq!(runs(folder.path()), ["metric", "static", "topology", "process", "metric", "process"]);
    }

    #[test]
    fn the_exit_code_of_amd_smi_does_not_matter() {
        let folder = tempfile::tempdir().unwrap();
        let body = "echo 'ERROR: Drivers not loaded (amdgpu not found in modules)' >&2; exit 255";
        assert_eq!(AmdSmiSource::new(tool(folder.path(), body)).read().unwrap_err().code(), "driver_not_loaded");
        let empty = AmdSmiSource::new(tool(folder.path(), "echo '[]'; exit 255")).read().unwrap();
        assert!(empty.devices.is_empty());
    }

    #[test]
    fn devices_stay_when_one_command_fails() {
        for broken in ["metric", "static", "process", "topology"] {
            let folder = tempfile::tempdir().unwrap();
            let fails = format!("[ \"$1\" = {broken} ] && {{ echo 'error: internal'; exit 1; }}\n");
            let reading = AmdSmiSource::new(tool(folder.path(), &(fails + AMD_SMI))).read().unwrap();
            assert_eq!(reading.devices.len(), 2, "{broken}");
            let is_about =
                |warning: &String| warning.starts_with(&format!("amd-smi {broken}")) && warning.contains("internal");
            assert!(reading.warnings.iter().any(is_about), "{:?}", reading.warnings);
        }
    }

    #[test]
    fn rocm_smi_gets_flags_that_its_version_supports() {
        let folder = tempfile::tempdir().unwrap();
        let body = r#"case "$*" in
            *showcomputepartition*) echo 'rocm-smi: error: unrecognized arguments: --showcomputepartition' >&2; exit 2;;
            *showtopo*) echo '{"system": {"(Topology) Link type between DRM devices 0 and 1": "XGMI"}}';;
            *) echo '{"card0": {"GPU use (%)": "1"}, "card1": {"GPU use (%)": "2"}}';;
            esac"#;
        let mut source = RocmSmiSource::new(tool(folder.path(), body));
        let first = source.read().unwrap();
        assert_eq!((first.devices.len(), first.links.len()), (2, 1));
        assert_eq!(source.read().unwrap(), first);
        assert_eq!(runs(folder.path()).len(), 4);
    }

    #[test]
    fn rocm_smi_without_a_driver_is_an_error_though_it_exits_with_zero() {
        let folder = tempfile::tempdir().unwrap();
        let body = "echo 'ERROR:root:Driver not initialized (amdgpu not found in modules)' >&2; exit 0";
        assert_eq!(RocmSmiSource::new(tool(folder.path(), body)).read().unwrap_err().code(), "driver_not_loaded");
        let none =
            RocmSmiSource::new(tool(folder.path(), "echo 'WARNING: No JSON data to report' >&2")).read().unwrap();
        assert!(none.devices.is_empty());
    }
}
