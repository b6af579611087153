//! `gpupool devices`: the devices of this machine, of a capture, or of a simulation.

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

use crate::output::answer;
use crate::terminal::{Column, Paint, Screen, Table, known};

/// How long a source may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long one run of a tool may take: shorter, so that the tool is what is said to hang.
const TOOL_DEADLINE: Duration = Duration::from_secs(8);

/// Which devices, and how to answer.
#[derive(Args)]
pub(crate) struct Devices {
    /// A captured tool output (`-` for standard input), sysfs root, KFD tree, folder or archive of such, instead of this
    /// machine.
    #[arg(long, value_name = "PATH", conflicts_with = "simulate")]
    from: Option<PathBuf>,
    /// The format of the capture, where it should not be guessed.
    #[arg(long = "as", value_name = "FORMAT", requires = "from", long_help = format_help())]
    format: Option<As>,
    /// Devices that do not exist: 4xH100, 2xMI300X,1xRTX4090, or a TOML file.
    #[arg(long, value_name = "SPEC")]
    simulate: Option<String>,
    /// Answer in JSON.
    #[arg(long, conflicts_with = "table")]
    json: bool,
    /// Answer in a table, which is what happens without being asked for.
    #[arg(long)]
    table: bool,
}

/// A format that was named: one of them, or the one that is guessed.
#[derive(Clone, Copy)]
struct As(Option<CaptureFormat>);

impl FromStr for As {
    type Err = UnknownCaptureFormat;

    fn from_str(text: &str) -> Result<Self, UnknownCaptureFormat> {
        match text {
            // Which form of a tool's output it is can be told from the output.
            "auto" | "nvidia-smi" | "amd-smi" | "rocm-smi" => Ok(Self(None)),
            _ => text.parse().map(|format| Self(Some(format))),
        }
    }
}

fn format_help() -> String {
    format!("The format of the capture, where it should not be guessed. One of: auto, {}", CaptureFormat::names())
}

/// What was found, or why nothing was.
struct Answer {
    snapshot: SourceReading,
    error: Option<ErrorReport>,
}

pub(crate) fn run(arguments: &Devices) -> anyhow::Result<ExitCode> {
    let found = match (&arguments.from, &arguments.simulate) {
        (Some(path), _) => captured(path, arguments.format.and_then(|As(format)| format)),
        (None, Some(spec)) => simulated(spec)?,
        (None, None) => read()?,
    };
    let failed = found.error.is_some();
    let report = DevicesReport::new(&found.snapshot, found.error);
    let done = answer(arguments.json, &report, || page(&report))?;
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

fn captured(path: &Path, format: Option<CaptureFormat>) -> Answer {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    match capture::read_capture(path, format) {
        Ok(snapshot) => Answer { snapshot, error: None },
        Err(error) => Answer {
            snapshot: SourceReading::default(),
            error: Some(ErrorReport { code: error.code(), message: error.to_string() }),
        },
    }
}

/// Where this machine keeps things, as far as the environment says otherwise.
pub(crate) fn places() -> SourcePaths {
    SourcePaths::from_env(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

/// What each source of this machine answers, each on a thread of its own.
pub(crate) fn read_sources(places: &SourcePaths) -> anyhow::Result<Vec<SourceResult>> {
    let choice: SourceChoice = std::env::var("GPUPOOL_BACKEND").unwrap_or_default().parse()?;
    let start = |source| SourceProbe::start(source, DEADLINE).context("cannot start a thread to read devices");
    let mut probes =
        choice.open_sources(places, TOOL_DEADLINE).into_iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    probes.iter_mut().for_each(SourceProbe::request_reading);
    let answer = |probe: &mut SourceProbe| {
        let answer = probe.wait_reading();
        SourceResult { kind: answer.kind, result: answer.result }
    };
    Ok(probes.iter_mut().map(answer).collect())
}

/// The devices of this machine, with the processes on them named.
fn read() -> anyhow::Result<Answer> {
    let places = places();
    let mut answer = together(read_sources(&places)?);
    HostProcessResolver::new(&places).resolve_processes(&mut answer.snapshot);
    Ok(answer)
}

/// Devices that do not exist.
fn simulated(spec: &str) -> anyhow::Result<Answer> {
    let (mut source, _control) = SimulatedSource::new(&SimulationSpec::load(spec)?, monotonic_clock());
    Ok(Answer { snapshot: source.read()?, error: None })
}

/// All sources as one machine. One that is not here is no trouble; one that fails is a warning beside devices of
/// others, and the error where there is no device at all.
fn together(results: Vec<SourceResult>) -> Answer {
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
        let message = format!("{kind}: {failed}; `gpupool doctor` says what to do");
        if snapshot.devices.is_empty() && error.is_none() {
            error = Some(ErrorReport { code, message });
        } else {
            snapshot.warn(message);
        }
    }
    Answer { snapshot, error }
}

/// One line for each device, then how they are joined.
fn page(report: &DevicesReport) -> String {
    if report.devices.is_empty() {
        return if report.error.is_none() { "no GPU found\n".into() } else { String::new() };
    }
    let mut table = Table::new([
        Column::number("GPU"),
        Column::words("NAME"),
        Column::words("PCI"),
        Column::number("MEMORY MiB"),
        Column::number("BUSY"),
        Column::number("TEMP"),
        Column::number("POWER"),
        Column::number("PROC"),
        Column::words("HEALTH"),
    ]);
    for device in &report.devices {
        table.row(row(device), Paint::Plain);
    }
    table.render(Screen { width: None, colours: false }) + &links(&report.links)
}

fn row(device: &DeviceReport) -> [String; 9] {
    let has = |field: &str| device.unsupported.contains(&field) || device.failed.contains_key(field);
    let power = match (device.power_w, device.power_limit_w) {
        (None, None) => known(None::<f64>),
        (draw, limit) => {
            let watts = |watts: Option<f64>| known(watts.map(|watts| format!("{watts:.0}")));
            format!("{}/{} W", watts(draw), watts(limit))
        }
    };
    [
        device.gpu_id.to_string(),
        name(device),
        known(device.pci.clone()),
        memory(device),
        known(device.utilization_percent.map(|busy| format!("{busy:.0}%"))),
        known(device.temperature_c.map(|degrees| format!("{degrees}°C"))),
        power,
        known((!has("processes")).then_some(device.processes.len())),
        health(device),
    ]
}

fn name(device: &DeviceReport) -> String {
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

fn memory(device: &DeviceReport) -> String {
    if device.unified_memory {
        return "shared".to_owned();
    }
    format!("{}/{}", known(device.memory_used_mib), known(device.memory_total_mib))
}

fn health(device: &DeviceReport) -> String {
    if device.asleep {
        return "asleep".to_owned();
    }
    let state = known(device.health);
    match &device.health_reason {
        Some(reason) => format!("{state}: {reason}"),
        None => state,
    }
}

/// One line for each kind of link: `nvlink ×12: 0-1 0-2 1-2`.
fn links(links: &[LinkReport]) -> String {
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
