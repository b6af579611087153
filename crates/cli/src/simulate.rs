//! `gpupool simulate`: injects faults into the simulated GPUs of an agent, and clears them.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_api::simulate::{DeviceFaultBody, FaultBody};
use gpupool_devices::simulated::SimulatedFault;
use serde_json::Value;

use crate::endpoint_args::{EndpointArgs, call_agent};
use crate::output::print_output;
use crate::terminal::{TableColumn, TextStyle, TextTable};

#[derive(Subcommand)]
pub(crate) enum SimulateCommand {
    /// Inject a fault that lasts until it is cleared.
    Fault(FaultArgs),
    /// Clear the fault of a GPU, or of all GPUs.
    Clear(FaultTargetArgs),
    /// List the current faults.
    List(FaultListArgs),
}

/// Options of `gpupool simulate fault`.
#[derive(Args)]
pub(crate) struct FaultArgs {
    /// Fault, such as lost, hot:97 or squatter:4242:2048:35.
    #[arg(value_parser = parse_fault, long_help = fault_help())]
    fault: SimulatedFault,
    #[command(flatten)]
    target: FaultTargetArgs,
}

/// GPU and endpoint of a fault command.
#[derive(Args)]
pub(crate) struct FaultTargetArgs {
    /// Id of the GPU [default: all GPUs].
    #[arg(long, value_name = "ID")]
    gpu: Option<u32>,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Options of `gpupool simulate list`.
#[derive(Args)]
pub(crate) struct FaultListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

pub(crate) fn run(command: &SimulateCommand) -> anyhow::Result<ExitCode> {
    match command {
        SimulateCommand::Fault(arguments) => set_fault(&arguments.target, Value::String(arguments.fault.to_string())),
        SimulateCommand::Clear(arguments) => set_fault(arguments, Value::Null),
        SimulateCommand::List(arguments) => {
            let faults = call_agent(arguments.endpoint_args.client()?.faults())?;
            print_output(arguments.json, &faults, || faults_table(&faults.faults))
        }
    }
}

fn set_fault(target: &FaultTargetArgs, fault: Value) -> anyhow::Result<ExitCode> {
    call_agent(target.endpoint_args.client()?.set_fault(&FaultBody { gpu_id: target.gpu, fault }))
        .map(|_| ExitCode::SUCCESS)
}

fn faults_table(faults: &[DeviceFaultBody]) -> String {
    let mut table = TextTable::new([TableColumn::number("GPU"), TableColumn::text("FAULT")]);
    for DeviceFaultBody { gpu_id, fault } in faults {
        // A newer agent may send a fault without a short form.
        let shown = serde_json::from_value::<SimulatedFault>(fault.clone())
            .map_or_else(|_| fault.to_string(), |it| it.to_string());
        table.add_row([gpu_id.to_string(), shown], TextStyle::Plain);
    }
    table.render_or("no faults\n")
}

fn parse_fault(text: &str) -> Result<SimulatedFault, String> {
    text.parse().map_err(|error: gpupool_devices::simulated::FaultError| error.to_string())
}

fn fault_help() -> String {
    let known = "?".parse::<SimulatedFault>().map_or_else(|error| error.allowed, |_| "");
    format!("Fault to inject.\n\nAllowed: {known}")
}
