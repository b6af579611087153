//! Commands for administrators: `gpupool cordon`, `uncordon`, `revoke` and `device`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use gpupool_api::lease::{LeaseBody, RevokeBody};
use gpupool_api::pool::DeviceBody;

use crate::endpoint_args::{EndpointArgs, call_agent};
use crate::output::print_output;
use crate::status::device_table;
use crate::terminal::sanitize;
use crate::units;

/// Options of `gpupool cordon`, `gpupool uncordon` and `gpupool device forget`.
#[derive(Args)]
pub(crate) struct DeviceArgs {
    /// Number of the GPU, as in `gpupool status`.
    #[arg(value_name = "GPU")]
    gpu_id: u32,
    /// Node of the GPU [default: the agent's own].
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Options of `gpupool revoke`.
#[derive(Args)]
pub(crate) struct RevokeArgs {
    /// Id of the lease, as in `gpupool lease list`.
    #[arg(value_name = "LEASE")]
    id: u64,
    /// Time for the job to finish, such as 30s, up to 7d [default: 0s].
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    grace: Option<Duration>,
    /// Reason for the owner and the audit trail.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

#[derive(Subcommand)]
pub(crate) enum DeviceCommand {
    /// List the GPUs of an agent, including those that are gone.
    List(DeviceListArgs),
    /// Forget a GPU that is gone and holds no lease.
    ///
    /// A GPU that returns later is a new GPU.
    Forget(DeviceArgs),
}

/// Options of `gpupool device list`.
#[derive(Args)]
pub(crate) struct DeviceListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

pub(crate) fn cordon(arguments: &DeviceArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    let device = call_agent(client.cordon(arguments.gpu_id, arguments.node.as_deref()))?;
    print_output(arguments.json, &device, || {
        format!("{} takes no new work; its leases continue\n", device_name(&device))
    })
}

pub(crate) fn uncordon(arguments: &DeviceArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    let device = call_agent(client.uncordon(arguments.gpu_id, arguments.node.as_deref()))?;
    print_output(arguments.json, &device, || match &device.closed {
        Some(why) => format!("{} is no longer cordoned, but closed: {why}\n", device_name(&device)),
        None => format!("{} takes new work\n", device_name(&device)),
    })
}

fn device_name(device: &DeviceBody) -> String {
    format!("GPU {} of {}", device.gpu_id, sanitize(&device.node))
}

pub(crate) fn revoke(arguments: &RevokeArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    let grace_secs = arguments.grace.unwrap_or_default().as_secs_f64();
    let revocation = RevokeBody { grace_secs, reason: arguments.reason.clone() };
    let lease = call_agent(client.revoke_with(arguments.id, &revocation))?;
    print_output(arguments.json, &lease, || lease_end_line(&lease))
}

/// Describes a lease that has ended or will.
pub(crate) fn lease_end_line(lease: &LeaseBody) -> String {
    match &lease.revoke_at {
        Some(at) if !lease.state.is_ended() => {
            format!("lease {} of {} ends at {at}\n", lease.id, sanitize(&lease.owner))
        }
        _ => format!("lease {} {}\n", lease.id, lease.state.name()),
    }
}

pub(crate) fn run(command: &DeviceCommand) -> anyhow::Result<ExitCode> {
    match command {
        DeviceCommand::List(arguments) => list_devices(arguments),
        DeviceCommand::Forget(arguments) => forget_device(arguments),
    }
}

fn list_devices(arguments: &DeviceListArgs) -> anyhow::Result<ExitCode> {
    let devices = call_agent(arguments.endpoint_args.client()?.devices())?.devices;
    print_output(arguments.json, &devices, || device_table(&devices).render_or("no GPUs\n"))
}

fn forget_device(arguments: &DeviceArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    call_agent(client.forget_device(arguments.gpu_id, arguments.node.as_deref()))?;
    let forgotten = serde_json::json!({"gpu_id": arguments.gpu_id, "forgotten": true});
    print_output(arguments.json, &forgotten, || format!("GPU {} forgotten\n", arguments.gpu_id))
}
