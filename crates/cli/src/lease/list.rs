//! `gpupool lease list`.

use std::process::ExitCode;

use clap::Args;
use gpupool_api::lease::{Holder, Lease, State};
use jiff::Timestamp;

use crate::connect::{Connect, converse, explained};
use crate::output::{write_json, write_text};
use crate::status::{all_leases, past, wish};
use crate::table::{Column, Table};
use crate::terminal::{Paint, Screen};
use crate::units;

/// Which leases, and how to answer.
#[derive(Args)]
pub(crate) struct List {
    /// Those that are over too, as far as the agent remembers them.
    #[arg(long)]
    all: bool,
    /// Only this owner's.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

pub(super) fn run(arguments: &List) -> anyhow::Result<ExitCode> {
    let client = arguments.connect.client()?;
    let state = arguments.all.then_some("all");
    let leases = converse(async { all_leases(&client, state, arguments.owner.as_deref()).await.map_err(explained) })?;
    if arguments.json {
        write_json(&leases)?;
    } else if leases.is_empty() {
        write_text("no leases\n")?;
    } else {
        write_text(&table(&leases).render(Screen::here()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(leases: &[Lease]) -> Table<8> {
    let now = Timestamp::now();
    let mut table = Table::new([
        Column::number("LEASE"),
        Column::words("STATE"),
        Column::words("OWNER").at_least(8),
        Column::words("WISH").at_least(14).weighs(4),
        Column::words("GPUS").at_least(4),
        Column::number("AGE").weighs(3),
        Column::words("KEPT BY").weighs(1),
        Column::words("WHY").at_least(16).weighs(2).wraps(),
    ]);
    for lease in leases {
        let gpus: Vec<String> = lease.devices.iter().map(|device| device.gpu_id.to_string()).collect();
        let cells = [
            lease.id.to_string(),
            lease.state.name().to_owned(),
            lease.owner.clone(),
            wish(&lease.wish),
            gpus.join(","),
            past(&lease.created_at, now).map(units::shown).unwrap_or_default(),
            kept_by(lease),
            lease.reason.clone().unwrap_or_default(),
        ];
        table.row(cells, if lease.state.is_ended() { Paint::Faint } else { Paint::Plain });
    }
    table
}

fn kept_by(lease: &Lease) -> String {
    if lease.state != State::Active {
        return String::new();
    }
    match &lease.holder {
        None => format!("ttl {}", units::shown(std::time::Duration::from_secs_f64(lease.ttl_secs.clamp(0.0, 1e9)))),
        Some(Holder::Process { pid }) => format!("process {pid}"),
        Some(Holder::Cgroup { .. }) => "its processes".to_owned(),
        Some(Holder::Connection) => "a connection".to_owned(),
    }
}
