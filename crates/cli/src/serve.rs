//! `gpupool serve`: the agent of this node.

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

use crate::log::Log;
use crate::output::WrongUsage;

/// The flags of the settings that an agent uses, and the configuration file.
pub(crate) struct Serve {
    flags: FlagValues,
    config: Option<PathBuf>,
}

impl Serve {
    fn load(&self) -> Result<LoadedConfig, ConfigProblems> {
        load_config(&ConfigInputs::from_system(self.flags.clone(), self.config.as_deref(), ConfigConsumer::Agent)?)
    }
}

/// Flags that help shows first, in this order; the others follow in the order of the table.
const SHOWN_FIRST: &str =
    "simulate host port state-dir config open allow-plain-http tls-cert tls-key backend refresh-interval node-name";

/// Settings of an agent that have a flag, with the name of the flag without its dashes.
fn settings_with_flags() -> impl Iterator<Item = (&'static Setting, &'static str)> {
    let of_agent = all_settings().iter().filter(|setting| ConfigConsumer::Agent.uses(setting.key));
    of_agent.filter_map(|setting| Some((setting, setting.flag?.trim_start_matches('-'))))
}

impl Args for Serve {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config").long("config").value_name("FILE").help("The configuration file");
        let file = file.value_parser(value_parser!(PathBuf));
        let settings = settings_with_flags().map(|(setting, name)| {
            let arg = Arg::new(name).long(name);
            match setting.value_name {
                Some(value) => arg.value_name(value).help(format!("{} [{}]", setting.help(), setting.allowed)),
                None => arg.action(ArgAction::SetTrue).help(setting.help()),
            }
        });
        let mut args: Vec<Arg> = settings.chain([file]).collect();
        args.sort_by_key(|arg| SHOWN_FIRST.split(' ').position(|first| arg.get_id() == first).unwrap_or(usize::MAX));
        command.args(args)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Serve {
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

pub(crate) fn run(arguments: Serve) -> anyhow::Result<ExitCode> {
    let loaded = arguments.load().map_err(WrongUsage::of)?;
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
