//! `gpupool token`: who may lease over the network. Through the agent where one runs, else in its state directory, so that
//! tokens can be made before the first start.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::bail;
use clap::{Args, Subcommand};
use gpupool_agent::{ANONYMOUS, iso};
use gpupool_api::tokens::{AccessToken, NewToken, TokenCreated};
use gpupool_client::AgentClient;
use gpupool_core::limits::MAX_NAME_BYTES;
use gpupool_store::{LeaseStore, SqliteStore, TokenId, TokenMetadata, TokenRole};
use rustix::process::geteuid;

use crate::connect::{Connect, ask};
use crate::output::{WrongUsage, answer, note};
use crate::terminal::{Column, Paint, Table, clean};

/// Tokens, for administrators.
#[derive(Subcommand)]
pub(crate) enum Tokens {
    /// Make a token, and print its secret, which is never shown again.
    Create(Create),
    /// Every token, without its secret.
    List(At),
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
pub(crate) struct At {
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
    Nobody(Box<SqliteStore>),
}

impl At {
    fn keeper(&self) -> anyhow::Result<Keeper> {
        let (client, state_dir) = self.connect.client_or_state(self.state_dir.as_deref())?;
        match client {
            Some(client) => Ok(Keeper::Agent(Box::new(client))),
            None => Ok(Keeper::Nobody(Box::new(open(&state_dir)?))),
        }
    }
}

pub(crate) fn run(command: &Tokens) -> anyhow::Result<ExitCode> {
    match command {
        Tokens::Create(arguments) => create(arguments),
        Tokens::List(at) => list(at),
        Tokens::Revoke(arguments) => revoke(arguments),
    }
}

fn create(arguments: &Create) -> anyhow::Result<ExitCode> {
    let wanted = NewToken { owner: arguments.owner.clone(), admin: arguments.admin };
    let made = match arguments.at.keeper()? {
        Keeper::Agent(client) => ask(client.create_token(&wanted))?,
        Keeper::Nobody(mut store) => create_offline(&mut store, &wanted)?,
    };
    // Alone on standard output, so that it can be captured.
    let done = answer(arguments.at.json, &made, || format!("{}\n", made.secret))?;
    if arguments.at.json {
        return Ok(done);
    }
    let TokenCreated { id, owner, admin, .. } = &made;
    let what = if *admin { "an administrator's token" } else { "a token" };
    note(&format!(
        "This is token {id}, {what} for {}. It is shown only now; clients find it in GPUPOOL_TOKEN.",
        clean(owner)
    ));
    Ok(done)
}

fn list(at: &At) -> anyhow::Result<ExitCode> {
    let tokens = match at.keeper()? {
        Keeper::Agent(client) => ask(client.tokens())?.tokens,
        Keeper::Nobody(store) => store.tokens()?.into_iter().map(told).collect(),
    };
    answer(at.json, &tokens, || table(&tokens).or("no tokens\n"))
}

fn table(tokens: &[AccessToken]) -> Table<5> {
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

fn revoke(arguments: &Revoke) -> anyhow::Result<ExitCode> {
    let id = arguments.id;
    match arguments.at.keeper()? {
        Keeper::Agent(client) => ask(client.revoke_token(id))?,
        Keeper::Nobody(mut store) => anyhow::ensure!(
            store.revoke_token(TokenId(id), SystemTime::now())?,
            "there is no token {id} that could be revoked; see: gpupool token list"
        ),
    }
    let revoked = serde_json::json!({"id": id, "revoked": true});
    answer(arguments.at.json, &revoked, || format!("token {id} revoked\n"))
}

/// The tokens of a state directory that no agent uses now, and none can use meanwhile.
fn open(dir: &Path) -> anyhow::Result<SqliteStore> {
    // Files made here by somebody else would lock the agent out of its own directory.
    let (us, whose) = (geteuid().as_raw(), fs::metadata(dir).map_or(geteuid().as_raw(), |about| about.uid()));
    if whose != us {
        bail!(
            "{} belongs to user {whose}, not to user {us}; run this as that user, or start the agent and ask it",
            dir.display()
        );
    }
    Ok(SqliteStore::open(dir)?)
}

fn create_offline(store: &mut SqliteStore, wanted: &NewToken) -> anyhow::Result<TokenCreated> {
    let owner = wanted.owner.trim().to_owned();
    if owner.is_empty() || owner.len() > MAX_NAME_BYTES || owner.starts_with(ANONYMOUS) {
        let allowed = format!("a name of 1..={MAX_NAME_BYTES} bytes that does not start with {ANONYMOUS:?}");
        return Err(WrongUsage::of(format!("owner: {:?} is not allowed; allowed: {allowed}", wanted.owner)).into());
    }
    let role = if wanted.admin { TokenRole::Admin } else { TokenRole::User };
    let (id, secret) = store.create_token(&owner, role, SystemTime::now())?;
    Ok(TokenCreated { id: id.0, owner, admin: wanted.admin, secret: secret.reveal().to_owned() })
}

/// A token as an agent would tell of it.
fn told(line: TokenMetadata) -> AccessToken {
    AccessToken {
        id: line.token.id.0,
        owner: line.token.owner,
        admin: line.token.role == TokenRole::Admin,
        created_at: iso(line.created_at),
        revoked_at: line.revoked_at.map(iso),
    }
}
