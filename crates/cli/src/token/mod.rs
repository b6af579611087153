//! `gpupool token`: who may lease over the network. Through the agent where one runs, else in its state directory, so that
//! tokens can be made before the first start.

mod offline;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use gpupool_api::tokens::{NewToken, Token, TokenCreated};
use gpupool_client::AgentClient;

use crate::connect::{Connect, converse, explained};
use crate::output::{note, write_json, write_text};
use crate::table::{Column, Table};
use crate::terminal::{Paint, Screen};
use crate::text::clean;
use offline::Offline;

/// Tokens, for administrators.
#[derive(Subcommand)]
pub(crate) enum Tokens {
    /// Make a token, and print its secret, which is never shown again.
    Create(Create),
    /// Every token, without its secret.
    List(List),
    /// Make a token worthless. Leases it took stay.
    Revoke(Revoke),
}

/// For whom.
#[derive(Args)]
pub(crate) struct Create {
    /// On whose account it leases.
    #[arg(long, value_name = "NAME")]
    owner: String,
    /// It may do what administrators do: revoke anybody's leases, cordon GPUs, make tokens.
    #[arg(long)]
    admin: bool,
    #[command(flatten)]
    at: At,
}

/// How to answer.
#[derive(Args)]
pub(crate) struct List {
    #[command(flatten)]
    at: At,
}

/// Which.
#[derive(Args)]
pub(crate) struct Revoke {
    /// The number of the token.
    id: u64,
    #[command(flatten)]
    at: At,
}

/// Where tokens are kept, and how to answer.
#[derive(Args)]
struct At {
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    /// The state directory of the agent, where it is not the usual one.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["endpoint", "ca_file"])]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    connect: Connect,
}

/// Who keeps the tokens now.
enum Keeper {
    Agent(Box<AgentClient>),
    Nobody(Box<Offline>),
}

impl At {
    fn keeper(&self) -> anyhow::Result<Keeper> {
        let (client, state_dir) = self.connect.client_or_state(self.state_dir.as_deref())?;
        match client {
            Some(client) => Ok(Keeper::Agent(Box::new(client))),
            None => Ok(Keeper::Nobody(Box::new(Offline::open(&state_dir)?))),
        }
    }
}

pub(crate) fn run(command: &Tokens) -> anyhow::Result<ExitCode> {
    match command {
        Tokens::Create(arguments) => create(arguments)?,
        Tokens::List(arguments) => list(arguments)?,
        Tokens::Revoke(arguments) => revoke(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn create(arguments: &Create) -> anyhow::Result<()> {
    let wanted = NewToken { owner: arguments.owner.clone(), admin: arguments.admin };
    let made = match arguments.at.keeper()? {
        Keeper::Agent(client) => converse(async { client.create_token(&wanted).await.map_err(explained) })?,
        Keeper::Nobody(mut store) => store.create(&wanted)?,
    };
    if arguments.at.json {
        return write_json(&made);
    }
    // Alone on standard output, so that it can be captured.
    write_text(&format!("{}\n", made.secret))?;
    let TokenCreated { id, owner, admin, .. } = &made;
    let what = if *admin { "an administrator's token" } else { "a token" };
    note(&format!(
        "This is token {id}, {what} for {}. It is shown only now; clients find it in GPUPOOL_TOKEN.",
        clean(owner)
    ));
    Ok(())
}

fn list(arguments: &List) -> anyhow::Result<()> {
    let tokens = match arguments.at.keeper()? {
        Keeper::Agent(client) => converse(async { client.tokens().await.map_err(explained) })?.tokens,
        Keeper::Nobody(store) => store.list()?,
    };
    if arguments.at.json {
        return write_json(&tokens);
    }
    if tokens.is_empty() {
        return write_text("no tokens\n");
    }
    write_text(&table(&tokens).render(Screen::here()))
}

fn table(tokens: &[Token]) -> Table<5> {
    let mut table = Table::new([
        Column::number("TOKEN"),
        Column::words("OWNER").at_least(8),
        Column::words("MAY"),
        Column::words("MADE").at_least(10).weighs(1),
        Column::words("REVOKED").at_least(10),
    ]);
    for token in tokens {
        let may = if token.admin { "administrate" } else { "lease" };
        let revoked = token.revoked_at.clone().unwrap_or_default();
        let paint = if token.revoked_at.is_some() { Paint::Faint } else { Paint::Plain };
        table.row([token.id.to_string(), token.owner.clone(), may.into(), token.created_at.clone(), revoked], paint);
    }
    table
}

fn revoke(arguments: &Revoke) -> anyhow::Result<()> {
    let id = arguments.id;
    match arguments.at.keeper()? {
        Keeper::Agent(client) => converse(async { client.revoke_token(id).await.map_err(explained) })?,
        Keeper::Nobody(mut store) => store.revoke(id)?,
    }
    if arguments.at.json {
        return write_json(&serde_json::json!({"id": id, "revoked": true}));
    }
    write_text(&format!("token {id} revoked\n"))
}
