//! `gpupool` on the command line: arguments in, answers out. What is decided is decided in the other crates.

mod config;
mod connect;
mod devices;
mod doctor;
#[cfg(feature = "kube")]
mod kube;
mod lease;
mod log;
mod map;
mod output;
mod run;
mod serve;
mod signals;
mod sim;
mod simulate;
mod status;
mod terminal;
mod token;
mod units;
mod usage;
mod wish;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::{Shell, generate};

use crate::output::{WrongUsage, note, write_text};

/// Shares GPUs fairly and safely between people, programs and machines.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What makes a shell complete these commands.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// The configuration in effect, and what is wrong with it.
    #[command(subcommand)]
    Config(config::Config),
    /// The devices of this machine, of a capture, or of a simulation.
    ///
    /// Exits with 0 if there are devices or there is none to find, and with 1 if something kept them from being read.
    Devices(devices::Devices),
    /// What is wrong with the GPUs of this machine, and what to do about it.
    ///
    /// Exits with 1 if anything keeps GPUs from being used.
    Doctor(doctor::Doctor),
    /// Kubernetes manifests.
    #[cfg(feature = "kube")]
    #[command(subcommand)]
    Kube(kube::Kube),
    /// Take, keep, give back and list leases by hand.
    #[command(subcommand)]
    Lease(lease::Leases),
    /// Run a command for each of many arguments, on GPUs, as GNU parallel would.
    ///
    /// Exits with 0 if all is done, 1 if something failed, 2: wrong usage; 128 and the number of the signal that ended it.
    Map(Box<map::Map>),
    /// Wait for GPUs, run a command on them, and give them back however it ends.
    ///
    /// Exits as the command does: its code, or 128 and the number of the signal that ended it. 124: --timeout was over; 126,
    /// 127: the command cannot be run, or is not there; 1: no GPU, or the lease was lost; 2: wrong usage.
    Run(Box<run::Run>),
    /// Be the agent of this node: read its GPUs, grant leases, answer over HTTP and a Unix socket.
    Serve(serve::Serve),
    /// Simulations through the real pool.
    #[command(subcommand)]
    Sim(sim::Sim),
    /// Let things go wrong with the simulated devices of an agent.
    #[command(subcommand)]
    Simulate(simulate::Simulate),
    /// Every GPU, who holds it, who uses one without a lease, and who waits.
    Status(status::Status),
    /// Tokens, by which people lease over the network.
    #[command(subcommand)]
    Token(token::Tokens),
    /// Who held how much.
    Usage(usage::Usage),
}

fn main() -> ExitCode {
    // Jobs are kept, and commands of `map` run, by this very program, started again under another name.
    gpupool_dispatch::run_helper_if_requested();
    let done = match Cli::parse().command {
        Command::Completions { shell } => completions(shell),
        Command::Config(command) => config::run(&command),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        #[cfg(feature = "kube")]
        Command::Kube(command) => kube::run(&command),
        Command::Lease(command) => lease::run(&command),
        Command::Map(arguments) => map::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Sim(command) => sim::run(&command),
        Command::Simulate(command) => simulate::run(&command),
        Command::Status(arguments) => status::run(&arguments),
        Command::Token(command) => token::run(&command),
        Command::Usage(arguments) => usage::run(&arguments),
    };
    done.unwrap_or_else(|error| {
        note(&format!("error: {error:#}"));
        if error.is::<WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
    })
}

fn completions(shell: Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(shell, &mut Cli::command(), "gpupool", &mut script);
    write_text(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
