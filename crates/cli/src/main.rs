//! `gpupool` on the command line: arguments in, answers out. What is decided is decided in the other crates.

mod devices;
mod doctor;
mod kube;
mod output;
mod run;
mod serve;
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
    /// The devices of this machine, of a capture, or of a simulation.
    ///
    /// Exits with 0 if there are devices or there is none to find, and with 1 if something kept them from being read.
    Devices(devices::Devices),
    /// What is wrong with the GPUs of this machine, and what to do about it.
    ///
    /// Exits with 1 if anything keeps GPUs from being used.
    Doctor(doctor::Doctor),
    /// Kubernetes manifests.
    #[command(subcommand)]
    Kube(kube::Kube),
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
}

fn main() -> ExitCode {
    // Jobs are kept by this very program, started again under another name.
    gpupool_confine::keeper::main_if_asked();
    let done = match Cli::parse().command {
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Kube(command) => kube::run(&command),
        Command::Run(arguments) => run::run(&arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Sim(command) => sim::run(&command),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
