//! `gpupool` on the command line: arguments in, answers out. What is decided is decided in the other crates.

mod kube;
mod output;
mod sim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Shares GPUs fairly and safely between people, programs and machines.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Kubernetes manifests.
    #[command(subcommand)]
    Kube(kube::Kube),
    /// Simulations through the real pool.
    #[command(subcommand)]
    Sim(sim::Sim),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Kube(command) => kube::run(&command),
        Command::Sim(command) => sim::run(&command),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
