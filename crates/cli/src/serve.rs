//! `gpupool serve`: runs the agent for this node.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use gpupool_agent::AgentSpec;
use gpupool_config::{
    ConfigConsumer, ConfigInputs, ConfigProblems, FlagValues, LoadedConfig, LogFormat, LogLevel, Setting, all_settings,
    load_config,
};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt};

use crate::log_writer::LogWriter;
use crate::output::UsageError;

/// Examples in the help of `gpupool serve`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  gpupool serve                            # for the users of this machine
  gpupool serve --simulate 4xH100          # without a GPU, to try it
  gpupool serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
  gpupool serve --config /etc/gpupool/gpupool.toml --log-level debug";

/// Options of `gpupool serve`: the flags of the agent's settings, and the configuration file.
pub(crate) struct ServeArgs {
    flags: FlagValues,
    config: Option<PathBuf>,
}

impl ServeArgs {
    fn load(&self) -> Result<LoadedConfig, ConfigProblems> {
        load_config(&ConfigInputs::from_system(self.flags.clone(), self.config.as_deref(), ConfigConsumer::Agent)?)
    }
}

/// Flags at the top of the help; the others follow in the order of the settings.
const FIRST_FLAGS: &str =
    "simulate host port state-dir config open allow-plain-http tls-cert tls-key backend refresh-interval node-name";

/// Returns the agent's settings with their flags, without dashes.
fn settings_with_flags() -> impl Iterator<Item = (&'static Setting, &'static str)> {
    let of_agent = all_settings().iter().filter(|setting| ConfigConsumer::Agent.uses(setting.key));
    of_agent.filter_map(|setting| Some((setting, setting.flag?.trim_start_matches('-'))))
}

impl Args for ServeArgs {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .help("Configuration file [default: the user's or /etc/gpupool/gpupool.toml]");
        let file = file.value_parser(value_parser!(PathBuf));
        let settings = settings_with_flags().map(|(setting, name)| {
            let arg = Arg::new(name).long(name);
            match setting.value_name {
                Some(value) => arg.value_name(value).help(setting.help()).long_help(setting.long_help()),
                None => arg.action(ArgAction::SetTrue).help(setting.help()).long_help(setting.long_help()),
            }
        });
        let mut args: Vec<Arg> = settings.chain([file]).collect();
        args.sort_by_key(|arg| FIRST_FLAGS.split(' ').position(|first| arg.get_id() == first).unwrap_or(usize::MAX));
        command.args(args)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let flags =
            settings_with_flags().fold(FlagValues::default(), |flags, (setting, name)| match setting.value_name {
                Some(_) => flags.set(&format!("--{name}"), matches.get_one::<String>(name)),
                None => flags.set_switch(&format!("--{name}"), matches.get_flag(name)),
            });
        Ok(Self { flags, config: matches.get_one("config").cloned() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

pub(crate) fn run(arguments: ServeArgs) -> anyhow::Result<ExitCode> {
    let loaded = arguments.load().map_err(UsageError::new)?;
    let server = &loaded.config.server;
    let (log_writer, _log_thread) = LogWriter::start(std::io::stderr())?;
    let level = init_logging(log_writer.clone(), server.log_level, server.log_format)?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    gpupool_agent::serve(AgentSpec {
        loaded,
        reread: Box::new(move || arguments.load()),
        set_log_level: Box::new(move |new| drop(level.modify(|level| *level = level_filter(new)))),
        finish_log: Box::new(move || log_writer.flush_log()),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Installs the log subscriber and returns a handle to change its level.
fn init_logging(log: LogWriter, level: LogLevel, format: LogFormat) -> anyhow::Result<Handle<LevelFilter, Registry>> {
    let (filter, handle) = reload::Layer::new(level_filter(level));
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

fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Trace => LevelFilter::TRACE,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Off => LevelFilter::OFF,
    }
}
