//! What AMD's tools print as JSON, and the tools as sources.
//!
//! Each tool has a file that says what its fields mean. `output` finds the JSON in what a tool printed and knows the
//! words it uses in place of devices; `values` holds what both tools write alike.

pub(crate) mod amd_smi;
mod output;
pub(crate) mod rocm_smi;
mod values;

pub(crate) use output::find_json;
pub(crate) use rocm_smi::name_and_numbers;

use crate::amd_tools::amd_smi::Trees;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::tool::{ToolOutput, VendorTool};

// AMD's tools as sources. What they print is believed, not how they exit: rocm-smi fails with 0, and amd-smi exits
// with 255 where there is just no GPU.

/// AMD's newer tool. Each reading runs it for metrics and processes; what does not change is asked again only when the
/// devices did.
#[derive(Debug)]
pub(crate) struct AmdSmi {
    tool: VendorTool,
    /// What the devices are and how they are joined.
    fixed: Option<Said>,
}

/// What the tool said of each GPU, and what it said besides.
type Said = (Trees, Vec<String>);

impl AmdSmi {
    /// Reads through this tool.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, fixed: None }
    }

    fn ask(&mut self, command: &str) -> Result<Said, SourceError> {
        let output = self.tool.run(&[command, "--json"])?;
        match amd_smi::trees(&output.stdout) {
            Ok((trees, warnings)) if !trees.is_empty() => Ok((trees, warnings)),
            _ => amd_smi::trees(&both(&output)),
        }
    }

    /// What the devices are, asked anew where their numbers are not those of `now`.
    fn fixed(&mut self, now: Option<&Trees>) -> Result<&Said, SourceError> {
        let same = |(fixed, _): &Said| now.is_none_or(|now| fixed.numbers().eq(now.numbers()));
        let fixed = match self.fixed.take().filter(same) {
            Some(fixed) => fixed,
            None => {
                let (mut trees, mut warnings) = self.ask("static")?;
                match self.ask("topology") {
                    Ok((topology, _)) => trees.add_all(&topology),
                    Err(error) => warnings.push(format!("amd-smi topology: {error}")),
                }
                (trees, warnings)
            }
        };
        Ok(self.fixed.insert(fixed))
    }
}

impl DeviceSource for AmdSmi {
    fn kind(&self) -> SourceKind {
        SourceKind::AmdSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let metric = match self.ask("metric") {
            Ok(metric) => Ok(metric),
            // Devices without readings are better than none, where the tool works at all.
            Err(error @ (SourceError::Driver(_) | SourceError::Malformed { .. })) => Err(error),
            Err(error) => {
                self.fixed = None;
                return Err(error);
            }
        };
        let (mut trees, mut warnings) = match self.fixed(metric.as_ref().ok().map(|(trees, _)| trees)) {
            Ok(fixed) => fixed.clone(),
            Err(error) if metric.is_ok() => (Trees::default(), vec![format!("amd-smi static: {error}")]),
            Err(error) => return Err(error),
        };
        let mut add = |command: &str, answer: Result<Said, SourceError>| match answer {
            Ok((answer, said)) => {
                trees.add_all(&answer);
                warnings.extend(said);
            }
            Err(error) => warnings.push(format!("amd-smi {command}: {error}")),
        };
        add("metric", metric);
        let processes = self.ask("process");
        add("process", processes);
        let mut snapshot = trees.snapshot();
        for warning in warnings {
            if !snapshot.warnings.contains(&warning) {
                snapshot.warn(warning);
            }
        }
        Ok(snapshot)
    }
}

/// What is asked of rocm-smi at each reading, most first. An older one refuses all flags because of one it does not
/// know; `-a` it has always known, and it costs the most.
const READINGS: [&[&str]; 3] = [&ALL, ALL.split_at(1).1, &["-a", "--showmeminfo", "all", "--json"]];

/// Everything worth asking, the newest flag first.
const ALL: [&str; 15] = [
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

/// AMD's older tool. Each reading runs it once; how the devices are joined is asked again only when they changed.
#[derive(Debug)]
pub(crate) struct RocmSmi {
    tool: VendorTool,
    /// Which of the readings this version understands; `None` until one worked.
    reading: Option<usize>,
    joined: Option<Joined>,
}

#[derive(Debug)]
struct Joined {
    /// Number and place of each device it was asked for.
    of: Vec<(Option<u32>, Option<String>)>,
    /// What it printed.
    json: String,
}

impl RocmSmi {
    /// Reads through this tool.
    pub(crate) fn new(tool: VendorTool) -> Self {
        Self { tool, reading: None, joined: None }
    }

    /// The output of the richest reading this version understands.
    fn ask(&mut self) -> Result<ToolOutput, SourceError> {
        let first = self.reading.unwrap_or(0);
        for (number, flags) in READINGS.iter().enumerate().skip(first) {
            let output = self.tool.run(flags)?;
            let refused = |text: &str| text.contains("unrecognized arguments") || text.contains("usage: rocm");
            if !refused(&output.stderr) && !refused(&output.stdout) {
                self.reading = Some(number);
                return Ok(output);
            }
        }
        Err(SourceError::malformed("rocm-smi JSON", "this version understands none of the flags"))
    }

    /// What it prints about the ways between these devices.
    fn joined(&mut self, devices: &SourceReading) -> Result<&str, SourceError> {
        let name = |address: gpupool_core::PciAddress| address.to_string();
        let of: Vec<_> = devices.devices.iter().map(|device| (device.index, device.pci.map(name))).collect();
        let known = self.joined.take().filter(|joined| joined.of == of);
        let joined = match known {
            Some(joined) => joined,
            None => Joined { of, json: self.tool.run(&["--showtopo", "--json"])?.stdout },
        };
        Ok(&self.joined.insert(joined).json)
    }
}

impl DeviceSource for RocmSmi {
    fn kind(&self) -> SourceKind {
        SourceKind::RocmSmi
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let output = self.ask()?;
        let mut snapshot = match rocm_smi::parse(&output.stdout) {
            Ok(snapshot) if !snapshot.devices.is_empty() => snapshot,
            _ => return rocm_smi::parse(&both(&output)),
        };
        match self.joined(&snapshot) {
            Ok(json) if rocm_smi::looks_like(json) || json.contains("\"system\"") => {
                return rocm_smi::parse(&format!("{}\n{json}", output.stdout));
            }
            Ok(_) => {}
            Err(error) => snapshot.warn(format!("rocm-smi --showtopo: {error}")),
        }
        Ok(snapshot)
    }
}

/// All a tool said, wherever it printed it.
fn both(output: &ToolOutput) -> String {
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

    /// A tool that is a shell script with this body; `$1` is its first argument.
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
    fn amd_smi_asks_for_what_does_not_change_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = AmdSmi::new(tool(folder.path(), AMD_SMI));
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
    fn amd_smi_without_a_gpu_is_not_an_empty_machine_by_its_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        let body = "echo 'ERROR: Drivers not loaded (amdgpu not found in modules)' >&2; exit 255";
        assert_eq!(AmdSmi::new(tool(folder.path(), body)).read().unwrap_err().code(), "driver_not_loaded");
        let empty = AmdSmi::new(tool(folder.path(), "echo '[]'; exit 255")).read().unwrap();
        assert!(empty.devices.is_empty());
    }

    #[test]
    fn devices_stay_where_one_command_fails() {
        for broken in ["metric", "static", "process", "topology"] {
            let folder = tempfile::tempdir().unwrap();
            let fails = format!("[ \"$1\" = {broken} ] && {{ echo 'error: internal'; exit 1; }}\n");
            let snapshot = AmdSmi::new(tool(folder.path(), &(fails + AMD_SMI))).read().unwrap();
            assert_eq!(snapshot.devices.len(), 2, "{broken}");
            let said =
                |warning: &String| warning.starts_with(&format!("amd-smi {broken}")) && warning.contains("internal");
            assert!(snapshot.warnings.iter().any(said), "{:?}", snapshot.warnings);
        }
    }

    #[test]
    fn rocm_smi_is_asked_in_words_its_version_knows() {
        let folder = tempfile::tempdir().unwrap();
        let body = r#"case "$*" in
            *showcomputepartition*) echo 'rocm-smi: error: unrecognized arguments: --showcomputepartition' >&2; exit 2;;
            *showtopo*) echo '{"system": {"(Topology) Link type between DRM devices 0 and 1": "XGMI"}}';;
            *) echo '{"card0": {"GPU use (%)": "1"}, "card1": {"GPU use (%)": "2"}}';;
            esac"#;
        let mut source = RocmSmi::new(tool(folder.path(), body));
        let first = source.read().unwrap();
        assert_eq!((first.devices.len(), first.links.len()), (2, 1));
        assert_eq!(source.read().unwrap(), first);
        assert_eq!(runs(folder.path()).len(), 4);
    }

    #[test]
    fn rocm_smi_without_a_driver_is_an_error_though_it_exits_with_zero() {
        let folder = tempfile::tempdir().unwrap();
        let body = "echo 'ERROR:root:Driver not initialized (amdgpu not found in modules)' >&2; exit 0";
        assert_eq!(RocmSmi::new(tool(folder.path(), body)).read().unwrap_err().code(), "driver_not_loaded");
        let none = RocmSmi::new(tool(folder.path(), "echo 'WARNING: No JSON data to report' >&2")).read().unwrap();
        assert!(none.devices.is_empty());
    }
}
