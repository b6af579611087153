//! `gpupool serve`: the agent of this node.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gpupool_agent::AgentSpec;
use gpupool_config::{Flags, Inputs, Loaded, LogFormat, LogLevel, Problems, Reader, load};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt};

use crate::log::Log;

/// Where to listen and what to read; everything else is in the configuration file.
#[derive(Args)]
pub(crate) struct Serve {
    /// Simulated devices instead of real ones: 4xH100, 2xA100,1xMI300X, or a TOML file.
    #[arg(long, value_name = "DEVICES")]
    simulate: Option<String>,
    /// Address to listen on beside the Unix socket.
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes any free one.
    #[arg(long)]
    port: Option<String>,
    /// Directory of the database, the lock and the Unix socket.
    #[arg(long, value_name = "DIR")]
    state_dir: Option<String>,
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Let anyone who can reach the agent take and release GPUs, without a token. For a trusted network only.
    #[arg(long)]
    open: bool,
    /// Accept tokens over the network without TLS.
    #[arg(long)]
    allow_plain_http: bool,
    /// Certificate chain in PEM form; with it the network is answered over TLS.
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,
    /// Private key of the certificate in PEM form.
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,
    /// Where readings come from: auto, nvidia, amd, nvml, nvidia-smi, amd-sysfs, amd-smi, rocm-smi.
    #[arg(long)]
    backend: Option<String>,
    /// Seconds between two readings.
    #[arg(long, value_name = "SECONDS")]
    refresh_interval: Option<String>,
    /// Name of this node.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// How much is logged: trace, debug, info, warn, error, off.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// How log lines are written: text or json.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Whether each request is logged: true or false.
    #[arg(long, value_name = "YES")]
    access_log: Option<String>,
}

impl Serve {
    fn flags(&self) -> Flags {
        Flags::default()
            .set("--simulate", self.simulate.as_ref())
            .set("--host", self.host.as_ref())
            .set("--port", self.port.as_ref())
            .set("--state-dir", self.state_dir.as_ref())
            .switch("--open", self.open)
            .switch("--allow-plain-http", self.allow_plain_http)
            .set("--tls-cert", self.tls_cert.as_ref())
            .set("--tls-key", self.tls_key.as_ref())
            .set("--backend", self.backend.as_ref())
            .set("--refresh-interval", self.refresh_interval.as_ref())
            .set("--node-name", self.node_name.as_ref())
            .set("--log-level", self.log_level.as_ref())
            .set("--log-format", self.log_format.as_ref())
            .set("--access-log", self.access_log.as_ref())
    }

    fn load(&self) -> Result<Loaded, Problems> {
        load(&Inputs::here(self.flags(), self.config.as_deref(), Reader::Agent)?)
    }
}

pub(crate) fn run(arguments: Serve) -> anyhow::Result<ExitCode> {
    let loaded = match arguments.load() {
        Ok(loaded) => loaded,
        Err(problems) => {
            eprintln!("error: {problems}");
            return Ok(ExitCode::from(2));
        }
    };
    let server = &loaded.config.server;
    let (log, _writes_until_dropped) = Log::start(std::io::stderr())?;
    let level = log_to(log.clone(), server.log_level, server.log_format)?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    gpupool_agent::serve(AgentSpec {
        loaded,
        reread: Box::new(move || arguments.load()),
        set_log_level: Box::new(move |new| drop(level.modify(|level| *level = filter(new)))),
        finish_log: Box::new(move || log.finish()),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// From now on what is told goes there; the level can be changed.
fn log_to(log: Log, level: LogLevel, format: LogFormat) -> anyhow::Result<Handle<LevelFilter, Registry>> {
    let (filter, handle) = reload::Layer::new(filter(level));
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Text => {
            let text = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(log);
            registry.with(text).try_init()?;
        }
        LogFormat::Json => registry.with(fmt::layer().json().flatten_event(true).with_writer(log)).try_init()?,
    }
    Ok(handle)
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Trace => LevelFilter::TRACE,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Off => LevelFilter::OFF,
    }
}
