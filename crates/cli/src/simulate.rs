//! `gpupool simulate`: lets things go wrong with the simulated devices of an agent, and mends them.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_api::simulate::{DeviceFaultBody, FaultBody};
use gpupool_devices::simulated::SimulatedFault;
use serde_json::Value;

use crate::connect::{Connect, ask};
use crate::output::answer;
use crate::terminal::{Column, Paint, Table};

/// Faults of simulated devices.
#[derive(Subcommand)]
pub(crate) enum Simulate {
    /// Let something go wrong, until it is cleared.
    Fault(SetFault),
    /// Mend a device, or all of them.
    Clear(Clear),
    /// What is wrong now.
    List(List),
}

/// What goes wrong, and with which device.
#[derive(Args)]
pub(crate) struct SetFault {
    /// The fault, such as lost, hot:97 or squatter:4242:2048:35.
    #[arg(value_parser = fault, long_help = forms())]
    fault: SimulatedFault,
    #[command(flatten)]
    of: Clear,
}

/// Which device.
#[derive(Args)]
pub(crate) struct Clear {
    /// The number of the device; all of them unless given.
    #[arg(long, value_name = "ID")]
    gpu: Option<u32>,
    #[command(flatten)]
    connect: Connect,
}

/// How to answer.
#[derive(Args)]
pub(crate) struct List {
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

pub(crate) fn run(command: &Simulate) -> anyhow::Result<ExitCode> {
    match command {
        Simulate::Fault(arguments) => set(&arguments.of, Value::String(arguments.fault.to_string())),
        Simulate::Clear(arguments) => set(arguments, Value::Null),
        Simulate::List(arguments) => {
            let faults = ask(arguments.connect.client()?.faults())?;
            answer(arguments.json, &faults, || table(&faults.faults))
        }
    }
}

fn set(of: &Clear, fault: Value) -> anyhow::Result<ExitCode> {
    ask(of.connect.client()?.set_fault(&FaultBody { gpu_id: of.gpu, fault })).map(|_| ExitCode::SUCCESS)
}

fn table(faults: &[DeviceFaultBody]) -> String {
    let mut table = Table::new([Column::number("GPU"), Column::words("FAULT")]);
    for DeviceFaultBody { gpu_id, fault } in faults {
        // A newer agent may know a fault that has no short form here.
        let shown = serde_json::from_value::<SimulatedFault>(fault.clone())
            .map_or_else(|_| fault.to_string(), |it| it.to_string());
        table.row([gpu_id.to_string(), shown], Paint::Plain);
    }
    table.or("nothing is wrong\n")
}

fn fault(text: &str) -> Result<SimulatedFault, String> {
    text.parse().map_err(|error: gpupool_devices::simulated::FaultError| error.to_string())
}

fn forms() -> String {
    let known = "?".parse::<SimulatedFault>().map_or_else(|error| error.allowed, |_| "");
    format!("The fault. One of: {known}")
}
