//! The `gpupool` command line: parses arguments, calls the other crates and prints the results.

mod admin;
mod config;
mod devices;
mod doctor;
mod endpoint_args;
#[cfg(feature = "kube")]
mod kube;
mod lease;
mod log_writer;
mod map;
mod output;
mod program;
mod request_args;
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

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::{Shell, generate};

use crate::output::{UsageError, print_note, print_text};

/// Share GPUs fairly between people, programs and machines.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct GpupoolArgs {
    #[command(subcommand)]
    command: GpupoolCommand,
}

#[derive(Subcommand)]
enum GpupoolCommand {
    /// Generate shell completions.
    Completions {
        /// Shell to generate the script for.
        shell: Shell,
    },
    /// Show and check the configuration.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Stop new work on a GPU; its leases continue.
    ///
    /// For administrators. `gpupool uncordon` allows new work again.
    Cordon(admin::DeviceArgs),
    /// List and forget the GPUs of an agent.
    #[command(subcommand)]
    Device(admin::DeviceCommand),
    /// List the GPUs of this machine, of a capture or of a simulation.
    ///
    /// Exits with 1 if an error kept the GPUs from being read. Finding no GPU is not an error.
    Devices(devices::DevicesArgs),
    /// Diagnose problems with the GPUs of this machine.
    ///
    /// Each finding comes with a remedy. Exits with 1 if a finding keeps GPUs from being used.
    Doctor(doctor::DoctorArgs),
    /// Check GPU requests in Kubernetes manifests.
    #[cfg(feature = "kube")]
    #[command(subcommand)]
    Kube(kube::KubeCommand),
    /// Acquire, renew, release and list leases.
    ///
    /// `gpupool run` and `gpupool map` manage the lease of a command. These commands manage leases by hand or in
    /// scripts.
    #[command(after_help = lease::EXAMPLES)]
    #[command(subcommand)]
    Lease(lease::LeaseCommand),
    /// Run a command for each of many arguments on leased GPUs.
    ///
    /// Works like GNU parallel: `{}` in COMMAND stands for the argument, which is appended if COMMAND has no
    /// replacement string. Arguments follow `:::`, come from files after `::::`, or from standard input, one per line.
    #[command(after_help = map::EXAMPLES)]
    Map(Box<map::MapArgs>),
    /// Take a lease from its owner.
    ///
    /// For administrators. The owner sees the reason; after the grace the job gets SIGTERM, and SIGKILL seconds later.
    Revoke(admin::RevokeArgs),
    /// Run a command on leased GPUs.
    ///
    /// Waits in the queue until the GPUs are granted, runs the command on them, and releases the lease when the command
    /// ends. The lease is released even if gpupool crashes or is killed.
    #[command(after_help = run::EXAMPLES)]
    Run(Box<run::RunArgs>),
    /// Run the agent for this node.
    ///
    /// The agent reads the GPUs of the node, grants leases, and answers over HTTP and a Unix socket. SIGTERM stops it;
    /// SIGHUP makes it reload its configuration. Each option overrides the setting of the same name in the
    /// configuration file.
    #[command(after_help = serve::EXAMPLES)]
    Serve(serve::ServeArgs),
    /// Simulate placement strategies.
    #[command(subcommand)]
    Sim(sim::SimCommand),
    /// Inject faults into simulated GPUs.
    #[command(subcommand)]
    Simulate(simulate::SimulateCommand),
    /// Show GPUs, leases, the queue and squatters.
    ///
    /// A squatter is a process that uses a GPU without a lease.
    Status(status::StatusArgs),
    /// Create, list and revoke access tokens.
    ///
    /// Clients send a token to lease GPUs over the network. Only administrators can manage tokens.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Allow new work on a cordoned GPU again.
    ///
    /// For administrators.
    Uncordon(admin::DeviceArgs),
    /// Report GPU usage by owner or by GPU.
    Usage(usage::UsageArgs),
}

fn main() -> ExitCode {
    // The program starts itself again to supervise jobs and to run the commands of `map`.
    gpupool_dispatch::run_helper_if_requested();
    let exit_code = match GpupoolArgs::parse().command {
        GpupoolCommand::Completions { shell } => completions(shell),
        GpupoolCommand::Config(command) => config::run(&command),
        GpupoolCommand::Cordon(arguments) => admin::cordon(&arguments),
        GpupoolCommand::Device(command) => admin::run(&command),
        GpupoolCommand::Devices(arguments) => devices::run(&arguments),
        GpupoolCommand::Doctor(arguments) => doctor::run(&arguments),
        #[cfg(feature = "kube")]
        GpupoolCommand::Kube(command) => kube::run(&command),
        GpupoolCommand::Lease(command) => lease::run(&command),
        GpupoolCommand::Map(arguments) => map::run(&arguments),
        GpupoolCommand::Revoke(arguments) => admin::revoke(&arguments),
        GpupoolCommand::Run(arguments) => run::run(&arguments),
        GpupoolCommand::Serve(arguments) => serve::run(arguments),
        GpupoolCommand::Sim(command) => sim::run(&command),
        GpupoolCommand::Simulate(command) => simulate::run(&command),
        GpupoolCommand::Status(arguments) => status::run(&arguments),
        GpupoolCommand::Token(command) => token::run(&command),
        GpupoolCommand::Uncordon(arguments) => admin::uncordon(&arguments),
        GpupoolCommand::Usage(arguments) => usage::run(&arguments),
    };
    exit_code.unwrap_or_else(|error| {
        print_note(&format!("error: {error:#}"));
        if error.is::<UsageError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
    })
}

fn completions(shell: Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(shell, &mut GpupoolArgs::command(), "gpupool", &mut script);
    print_text(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
