//! `gpupool config`: what is in effect and where it came from, and what is probably not meant.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_config::{
    ConfigConsumer, ConfigInputs, ConfigSeverity, FlagValues, MachineFacts, check_config, findings_as_json,
    findings_as_text, load_config,
};

use crate::output::answer;

/// The configuration of this machine, as flags aside it is read from the environment and the file.
#[derive(Subcommand)]
pub(crate) enum Config {
    /// Every value in effect, and where it came from.
    Show(Which),
    /// What is wrong or probably not meant, and what to do. Exits with 1 if anything is wrong.
    Check(Which),
}

/// Which configuration, and how to answer.
#[derive(Args)]
pub(crate) struct Which {
    /// The configuration file, in place of GPUPOOL_CONFIG or the usual places.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

impl Which {
    fn inputs(&self) -> anyhow::Result<ConfigInputs> {
        Ok(ConfigInputs::from_system(FlagValues::default(), self.config.as_deref(), ConfigConsumer::All)?)
    }
}

pub(crate) fn run(command: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Config::Show(which) => {
            let loaded = load_config(&which.inputs()?)?;
            answer(which.json, &loaded.as_json(), || loaded.as_text())
        }
        Config::Check(which) => {
            let inputs = which.inputs()?;
            let findings = check_config(&inputs, |loaded| MachineFacts::gather(loaded, &inputs));
            let done = answer(which.json, &findings_as_json(&findings), || findings_as_text(&findings))?;
            let is_broken = findings.iter().any(|finding| finding.severity == ConfigSeverity::Error);
            Ok(if is_broken { ExitCode::FAILURE } else { done })
        }
    }
}
