//! `gpupool devices`: lists the GPUs of this machine, of a capture or of a simulation.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use gpupool_devices::capture::{self, CaptureFormat, UnknownCaptureFormat};
use gpupool_devices::doctor::SourceResult;
use gpupool_devices::simulated::{SimulatedSource, SimulationSpec, monotonic_clock};
use gpupool_devices::{
    DevicePartition, DeviceReport, DeviceSource, DevicesReport, ErrorReport, HostProcessResolver, LinkReport,
    SourceChoice, SourceError, SourcePaths, SourceProbe, SourceReading,
};

use crate::output::print_output;
use crate::terminal::{TableColumn, TerminalFormat, TextStyle, TextTable, or_unknown};

/// Maximum time for a source to return a reading.
const SOURCE_DEADLINE: Duration = Duration::from_secs(10);
/// Maximum run time of a vendor tool; below the source's deadline, so that the error names the tool.
const TOOL_DEADLINE: Duration = Duration::from_secs(8);

/// Options of `gpupool devices`.
#[derive(Args)]
pub(crate) struct DevicesArgs {
    /// Read a capture instead of this machine: tool output (`-` for standard input), a sysfs or KFD tree, a folder or
    /// an archive.
    #[arg(long, value_name = "PATH", conflicts_with = "simulate")]
    from: Option<PathBuf>,
    /// Format of the capture [default: auto].
    #[arg(long = "as", value_name = "FORMAT", requires = "from", long_help = format_help())]
    format: Option<CaptureFormatArg>,
    /// List simulated GPUs, such as 4xH100 or 2xMI300X,1xRTX4090, or those of a TOML file.
    #[arg(long, value_name = "SPEC")]
    simulate: Option<String>,
    /// Print JSON.
    #[arg(long, conflicts_with = "table")]
    json: bool,
    /// Print a table (default).
    #[arg(long)]
    table: bool,
}

/// Value of `--as`; `None` detects the format.
#[derive(Clone, Copy)]
struct CaptureFormatArg(Option<CaptureFormat>);

impl FromStr for CaptureFormatArg {
    type Err = UnknownCaptureFormat;

    fn from_str(text: &str) -> Result<Self, UnknownCaptureFormat> {
        match text {
            // The format is detected from the output.
            "auto" | "nvidia-smi" | "amd-smi" | "rocm-smi" => Ok(Self(None)),
            _ => text.parse().map(|format| Self(Some(format))),
        }
    }
}

fn format_help() -> String {
    format!("Format of the capture [default: auto].\n\nAllowed: auto, {}", CaptureFormat::names())
}

/// Devices found, and the error if they could not be read.
struct DeviceListing {
    snapshot: SourceReading,
    error: Option<ErrorReport>,
}

pub(crate) fn run(arguments: &DevicesArgs) -> anyhow::Result<ExitCode> {
    let found = match (&arguments.from, &arguments.simulate) {
        (Some(path), _) => list_capture(path, arguments.format.and_then(|CaptureFormatArg(format)| format)),
        (None, Some(spec)) => list_simulated(spec)?,
        (None, None) => read_machine()?,
    };
    let failed = found.error.is_some();
    let report = DevicesReport::new(&found.snapshot, found.error);
    let done = print_output(arguments.json, &report, || devices_page(&report))?;
    if !arguments.json {
        for warning in &report.warnings {
            eprintln!("warning: {warning}");
        }
        if let Some(error) = &report.error {
            eprintln!("error: {}: {}", error.code, error.message);
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { done })
}

fn list_capture(path: &Path, format: Option<CaptureFormat>) -> DeviceListing {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    match capture::read_capture(path, format) {
        Ok(snapshot) => DeviceListing { snapshot, error: None },
        Err(error) => DeviceListing {
            snapshot: SourceReading::default(),
            error: Some(ErrorReport { code: error.code(), message: error.to_string() }),
        },
    }
}

/// Returns the paths and tools to read devices from; environment variables can override them.
pub(crate) fn source_paths() -> SourcePaths {
    SourcePaths::from_env(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

/// Reads every source of this machine, each on its own thread.
pub(crate) fn read_sources(places: &SourcePaths) -> anyhow::Result<Vec<SourceResult>> {
    let choice: SourceChoice = std::env::var("GPUPOOL_BACKEND").unwrap_or_default().parse()?;
    let start = |source| SourceProbe::start(source, SOURCE_DEADLINE).context("cannot start a thread to read devices");
    let mut probes =
        choice.open_sources(places, TOOL_DEADLINE).into_iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    probes.iter_mut().for_each(SourceProbe::request_reading);
    let read = |probe: &mut SourceProbe| {
        let reading = probe.wait_reading();
        SourceResult { kind: reading.kind, result: reading.result }
    };
    Ok(probes.iter_mut().map(read).collect())
}

/// Reads the devices of this machine and resolves the processes on them.
fn read_machine() -> anyhow::Result<DeviceListing> {
    let places = source_paths();
    let mut listing = merge_sources(read_sources(&places)?);
    HostProcessResolver::new(&places).resolve_processes(&mut listing.snapshot);
    Ok(listing)
}

fn list_simulated(spec: &str) -> anyhow::Result<DeviceListing> {
    let (mut source, _control) = SimulatedSource::new(&SimulationSpec::load(spec)?, monotonic_clock());
    Ok(DeviceListing { snapshot: source.read()?, error: None })
}

/// Merges the sources into one listing. Sources that are not present are skipped. A failed source adds a warning if
/// other sources found devices, otherwise it is the error of the listing.
fn merge_sources(results: Vec<SourceResult>) -> DeviceListing {
    let mut snapshot = SourceReading::default();
    let mut errors = Vec::new();
    for SourceResult { kind, result } in results {
        match result {
            Ok(found) => snapshot.merge(found),
            Err(SourceError::NotPresent { .. }) => {}
            Err(error) => errors.push((kind, error)),
        }
    }
    let mut error = None;
    for (kind, failed) in errors {
        let code = failed.code();
        let message = format!("{kind}: {failed}; run `gpupool doctor` for a remedy");
        if snapshot.devices.is_empty() && error.is_none() {
            error = Some(ErrorReport { code, message });
        } else {
            snapshot.warn(message);
        }
    }
    DeviceListing { snapshot, error }
}

/// Formats one line per device, then the links between devices.
fn devices_page(report: &DevicesReport) -> String {
    if report.devices.is_empty() {
        return if report.error.is_none() { "no GPU found\n".into() } else { String::new() };
    }
    let mut table = TextTable::new([
        TableColumn::number("GPU"),
        TableColumn::text("NAME"),
        TableColumn::text("PCI"),
        TableColumn::number("MEMORY MiB"),
        TableColumn::number("BUSY"),
        TableColumn::number("TEMP"),
        TableColumn::number("POWER"),
        TableColumn::number("PROC"),
        TableColumn::text("HEALTH"),
    ]);
    for device in &report.devices {
        table.add_row(device_row(device), TextStyle::Plain);
    }
    table.render(TerminalFormat { width: None, colours: false }) + &link_lines(&report.links)
}

fn device_row(device: &DeviceReport) -> [String; 9] {
    let has = |field: &str| device.unsupported.contains(&field) || device.failed.contains_key(field);
    let power = match (device.power_w, device.power_limit_w) {
        (None, None) => or_unknown(None::<f64>),
        (draw, limit) => {
            let watts = |watts: Option<f64>| or_unknown(watts.map(|watts| format!("{watts:.0}")));
            format!("{}/{} W", watts(draw), watts(limit))
        }
    };
    [
        device.gpu_id.to_string(),
        device_name(device),
        or_unknown(device.pci.clone()),
        memory_cell(device),
        or_unknown(device.utilization_percent.map(|busy| format!("{busy:.0}%"))),
        or_unknown(device.temperature_c.map(|degrees| format!("{degrees}°C"))),
        power,
        or_unknown((!has("processes")).then_some(device.processes.len())),
        health_cell(device),
    ]
}

fn device_name(device: &DeviceReport) -> String {
    let name = device.name.as_deref().unwrap_or("unknown GPU");
    match &device.partition {
        None => name.to_owned(),
        Some(DevicePartition::Mig { profile, .. }) => {
            let profile = profile.as_deref().unwrap_or("?");
            if name.contains(profile) { name.to_owned() } else { format!("{name} MIG {profile}") }
        }
        Some(DevicePartition::Amd { id, mode, .. }) => {
            format!("{name} {} {id}", mode.as_deref().unwrap_or("partition"))
        }
    }
}

fn memory_cell(device: &DeviceReport) -> String {
    if device.unified_memory {
        return "shared".to_owned();
    }
    format!("{}/{}", or_unknown(device.memory_used_mib), or_unknown(device.memory_total_mib))
}

fn health_cell(device: &DeviceReport) -> String {
    if device.asleep {
        return "asleep".to_owned();
    }
    let state = or_unknown(device.health);
    match &device.health_reason {
        Some(reason) => format!("{state}: {reason}"),
        None => state,
    }
}

/// Formats one line per kind of link, such as `nvlink ×12: 0-1 0-2 1-2`.
fn link_lines(links: &[LinkReport]) -> String {
    let mut by_kind: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for link in links {
        let kind = match (link.lanes, link.hops) {
            (Some(lanes), _) => format!("{} ×{lanes}", link.kind),
            (_, Some(hops)) => format!("{}, {hops} hop{}", link.kind, if hops == 1 { "" } else { "s" }),
            _ => link.kind.to_owned(),
        };
        by_kind.entry(kind).or_default().push(format!("{}-{}", link.a, link.b));
    }
    let mut text = if by_kind.is_empty() { String::new() } else { "\n".into() };
    for (kind, pairs) in by_kind {
        const SHOWN: usize = 28;
        let more = pairs.len().saturating_sub(SHOWN);
        let shown = pairs[..pairs.len() - more].join(" ");
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        let _ = writeln!(text, "{kind}: {shown}{rest}");
    }
    text
}
