//! `gpupool completions`: what makes a shell complete our commands.

use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

use crate::output::write_text;

/// For which shell.
#[derive(Args)]
pub(crate) struct Completions {
    /// The shell.
    shell: Shell,
}

pub(crate) fn run(arguments: &Completions, mut command: Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(arguments.shell, &mut command, "gpupool", &mut script);
    write_text(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
