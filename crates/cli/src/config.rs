//! `gpupool config`: shows and checks the configuration of this machine.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_config::{
    ConfigConsumer, ConfigInputs, ConfigSeverity, FlagValues, MachineFacts, check_config, findings_as_json,
    findings_as_text, load_config,
};

use crate::output::print_output;

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every setting in effect and its origin.
    Show(ConfigFileArgs),
    /// Report errors and likely mistakes in the configuration.
    ///
    /// Exits with 1 if the configuration has errors.
    Check(ConfigFileArgs),
}

/// Options of the configuration commands.
#[derive(Args)]
pub(crate) struct ConfigFileArgs {
    /// Configuration file to read instead of GPUPOOL_CONFIG or the default file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl ConfigFileArgs {
    fn inputs(&self) -> anyhow::Result<ConfigInputs> {
        Ok(ConfigInputs::from_system(FlagValues::default(), self.config.as_deref(), ConfigConsumer::All)?)
    }
}

pub(crate) fn run(command: &ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Show(arguments) => {
            let loaded = load_config(&arguments.inputs()?)?;
            print_output(arguments.json, &loaded.as_json(), || loaded.as_text())
        }
        ConfigCommand::Check(arguments) => {
            let inputs = arguments.inputs()?;
            let findings = check_config(&inputs, |loaded| MachineFacts::gather(loaded, &inputs));
            let done = print_output(arguments.json, &findings_as_json(&findings), || findings_as_text(&findings))?;
            let is_broken = findings.iter().any(|finding| finding.severity == ConfigSeverity::Error);
            Ok(if is_broken { ExitCode::FAILURE } else { done })
        }
    }
}
