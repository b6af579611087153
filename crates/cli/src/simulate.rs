//! `gpupool simulate`: lets things go wrong with the simulated devices of an agent, and mends them.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_api::simulate::{DeviceFault, FaultBody};
use gpupool_devices::simulated::Fault;
use serde_json::Value;

use crate::connect::{Connect, converse, explained};
use crate::output::{write_json, write_text};
use crate::table::{Column, Table};
use crate::terminal::{Paint, Screen};

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
    fault: Fault,
    /// The number of the device; all of them unless given.
    #[arg(long, value_name = "ID")]
    gpu: Option<u32>,
    #[command(flatten)]
    connect: Connect,
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
        Simulate::Fault(arguments) => {
            set(&arguments.connect, arguments.gpu, Value::String(arguments.fault.to_string()))?;
        }
        Simulate::Clear(arguments) => set(&arguments.connect, arguments.gpu, Value::Null)?,
        Simulate::List(arguments) => list(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn set(connect: &Connect, gpu_id: Option<u32>, fault: Value) -> anyhow::Result<()> {
    let client = connect.client()?;
    converse(async { client.set_fault(&FaultBody { gpu_id, fault }).await.map(drop).map_err(explained) })
}

fn list(arguments: &List) -> anyhow::Result<()> {
    let client = arguments.connect.client()?;
    let faults = converse(async { client.faults().await.map_err(explained) })?;
    if arguments.json {
        return write_json(&faults);
    }
    if faults.faults.is_empty() {
        return write_text("nothing is wrong\n");
    }
    let mut table = Table::new([Column::number("GPU"), Column::words("FAULT")]);
    for DeviceFault { gpu_id, fault } in &faults.faults {
        // A newer agent may know a fault that has no short form here.
        let shown =
            serde_json::from_value::<Fault>(fault.clone()).map_or_else(|_| fault.to_string(), |it| it.to_string());
        table.row([gpu_id.to_string(), shown], Paint::Plain);
    }
    write_text(&table.render(Screen::here()))
}

fn fault(text: &str) -> Result<Fault, String> {
    text.parse().map_err(|error: gpupool_devices::simulated::FaultError| error.to_string())
}

fn forms() -> String {
    let known = "?".parse::<Fault>().map_or_else(|error| error.allowed, |_| "");
    format!("The fault. One of: {known}")
}
