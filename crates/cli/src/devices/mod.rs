//! `gpupool devices`: the devices of this machine, of a capture, or of a simulation.

mod machine;
mod table;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use clap::Args;
use gpupool_devices::Snapshot;
use gpupool_devices::capture::{self, Format, UnknownFormat};
use gpupool_devices::report::{ErrorReport, Report};

pub(crate) use machine::{places, read_sources};

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
struct As(Option<Format>);

impl FromStr for As {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        match text {
            // Which form of a tool's output it is can be told from the output.
            "auto" | "nvidia-smi" | "amd-smi" | "rocm-smi" => Ok(Self(None)),
            _ => text.parse().map(|format| Self(Some(format))),
        }
    }
}

fn format_help() -> String {
    format!("The format of the capture, where it should not be guessed. One of: auto, {}", Format::names())
}

/// What was found, or why nothing was.
pub(crate) struct Answer {
    pub snapshot: Snapshot,
    pub error: Option<ErrorReport>,
}

pub(crate) fn run(arguments: &Devices) -> anyhow::Result<ExitCode> {
    let answer = match (&arguments.from, &arguments.simulate) {
        (Some(path), _) => captured(path, arguments.format.and_then(|As(format)| format)),
        (None, Some(spec)) => machine::simulated(spec)?,
        (None, None) => machine::read()?,
    };
    let failed = answer.error.is_some();
    let report = Report::new(&answer.snapshot, answer.error);
    let mut out = io::stdout().lock();
    let written = if arguments.json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        table::write(&mut out, &report)
    };
    crate::output::written(written.and_then(|()| out.flush()))?;
    if !arguments.json {
        for warning in &report.warnings {
            eprintln!("warning: {warning}");
        }
        if let Some(error) = &report.error {
            eprintln!("error: {}: {}", error.code, error.message);
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn captured(path: &Path, format: Option<Format>) -> Answer {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    match capture::read(path, format) {
        Ok(snapshot) => Answer { snapshot, error: None },
        Err(error) => Answer {
            snapshot: Snapshot::default(),
            error: Some(ErrorReport { code: error.code(), message: error.to_string() }),
        },
    }
}
