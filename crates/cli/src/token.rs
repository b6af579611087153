//! `gpupool token`: manages access tokens through the agent or, if none runs, directly in its state directory. Tokens
//! can therefore be created before the first start.

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
use gpupool_core::check_plain_text;
use gpupool_core::limits::MAX_NAME_BYTES;
use gpupool_store::{LeaseStore, SqliteStore, TokenId, TokenMetadata, TokenRole};
use rustix::process::geteuid;

use crate::endpoint_args::{EndpointArgs, call_agent};
use crate::output::{UsageError, print_note, print_output};
use crate::terminal::{TableColumn, TextStyle, TextTable, sanitize};

#[derive(Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token and print its secret, which is not shown again.
    Create(TokenCreateArgs),
    /// List all tokens, without their secrets.
    List(TokenStoreArgs),
    /// Revoke a token.
    ///
    /// Leases that were acquired with the token stay.
    Revoke(TokenRevokeArgs),
}

/// Options of `gpupool token create`.
#[derive(Args)]
pub(crate) struct TokenCreateArgs {
    /// Owner of the leases acquired with the token.
    #[arg(long, value_name = "NAME")]
    owner: String,
    /// Grant administrator rights: revoke any lease, cordon GPUs, manage tokens.
    #[arg(long)]
    admin: bool,
    /// Only read: everything that a user of the agent's machine may read. For monitoring.
    #[arg(long, conflicts_with = "admin")]
    read_only: bool,
    #[command(flatten)]
    store_args: TokenStoreArgs,
}

/// Options of `gpupool token revoke`.
#[derive(Args)]
pub(crate) struct TokenRevokeArgs {
    /// Id of the token.
    id: u64,
    #[command(flatten)]
    store_args: TokenStoreArgs,
}

/// Location of the tokens, and the output format.
#[derive(Args)]
pub(crate) struct TokenStoreArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// State directory of the agent [default: the configured one].
    #[arg(long, value_name = "DIR", conflicts_with_all = ["endpoint", "ca_file"])]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

/// Access to the tokens.
enum TokenAccess {
    Agent(Box<AgentClient>),
    Offline(Box<SqliteStore>),
}

impl TokenStoreArgs {
    fn open(&self) -> anyhow::Result<TokenAccess> {
        let (client, state_dir) = self.endpoint_args.client_or_state(self.state_dir.as_deref())?;
        match client {
            Some(client) => Ok(TokenAccess::Agent(Box::new(client))),
            None => Ok(TokenAccess::Offline(Box::new(open_store(&state_dir)?))),
        }
    }
}

pub(crate) fn run(command: &TokenCommand) -> anyhow::Result<ExitCode> {
    match command {
        TokenCommand::Create(arguments) => create_token(arguments),
        TokenCommand::List(store_args) => list_tokens(store_args),
        TokenCommand::Revoke(arguments) => revoke_token(arguments),
    }
}

fn create_token(arguments: &TokenCreateArgs) -> anyhow::Result<ExitCode> {
    let &TokenCreateArgs { admin, read_only, .. } = arguments;
    let new_token = NewToken { owner: arguments.owner.clone(), admin, read_only };
    let created = match arguments.store_args.open()? {
        TokenAccess::Agent(client) => call_agent(client.create_token(&new_token))?,
        TokenAccess::Offline(mut store) => create_offline(&mut store, &new_token)?,
    };
    // Only the secret goes to standard output, so that scripts can capture it.
    let done = print_output(arguments.store_args.json, &created, || format!("{}\n", created.secret))?;
    if arguments.store_args.json {
        return Ok(done);
    }
    let TokenCreated { id, owner, .. } = &created;
    let what = match (created.admin, created.read_only) {
        (true, _) => "an administrator's token",
        (false, true) => "a read-only token",
        (false, false) => "a token",
    };
    print_note(&format!(
        "Created token {id}, {what} for {}. The secret is shown only once; clients read it from GPUPOOL_TOKEN.",
        sanitize(owner)
    ));
    Ok(done)
}

fn list_tokens(store_args: &TokenStoreArgs) -> anyhow::Result<ExitCode> {
    let tokens = match store_args.open()? {
        TokenAccess::Agent(client) => call_agent(client.tokens())?.tokens,
        TokenAccess::Offline(store) => store.tokens()?.into_iter().map(access_token).collect(),
    };
    print_output(store_args.json, &tokens, || tokens_table(&tokens).render_or("no tokens\n"))
}

fn tokens_table(tokens: &[AccessToken]) -> TextTable<5> {
    let mut table = TextTable::new([
        TableColumn::number("TOKEN"),
        TableColumn::text("OWNER").min_width(8),
        TableColumn::text("ROLE"),
        TableColumn::text("CREATED").min_width(10).drop_priority(1),
        TableColumn::text("REVOKED").min_width(10),
    ]);
    for token in tokens {
        let role = match (token.admin, token.read_only) {
            (true, _) => "admin",
            (false, true) => "read-only",
            (false, false) => "user",
        };
        let revoked = token.revoked_at.clone().unwrap_or_default();
        let paint = if token.revoked_at.is_some() { TextStyle::Faint } else { TextStyle::Plain };
        table.add_row(
            [token.id.to_string(), token.owner.clone(), role.into(), token.created_at.clone(), revoked],
            paint,
        );
    }
    table
}

fn revoke_token(arguments: &TokenRevokeArgs) -> anyhow::Result<ExitCode> {
    let id = arguments.id;
    match arguments.store_args.open()? {
        TokenAccess::Agent(client) => call_agent(client.revoke_token(id))?,
        TokenAccess::Offline(mut store) => anyhow::ensure!(
            store.revoke_token(TokenId(id), SystemTime::now())?,
            "no token {id} to revoke; to list them: gpupool token list"
        ),
    }
    let revoked = serde_json::json!({"id": id, "revoked": true});
    print_output(arguments.store_args.json, &revoked, || format!("token {id} revoked\n"))
}

/// Opens the store of a state directory that no agent uses, and locks it.
fn open_store(dir: &Path) -> anyhow::Result<SqliteStore> {
    // Files created by another user would lock the agent out of its own directory.
    let (us, whose) = (geteuid().as_raw(), fs::metadata(dir).map_or(geteuid().as_raw(), |about| about.uid()));
    if whose != us {
        bail!(
            "{} belongs to user {whose}, not to user {us}; run this as that user, or start the agent first",
            dir.display()
        );
    }
    Ok(SqliteStore::open(dir)?)
}

fn create_offline(store: &mut SqliteStore, new_token: &NewToken) -> anyhow::Result<TokenCreated> {
    let owner = new_token.owner.trim().to_owned();
    check_plain_text("owner", &owner).map_err(|error| UsageError::new(error.to_string()))?;
    if owner.is_empty() || owner.len() > MAX_NAME_BYTES || owner.starts_with(ANONYMOUS) {
        let allowed = format!("a name of 1..={MAX_NAME_BYTES} bytes that does not start with {ANONYMOUS:?}");
        return Err(
            UsageError::new(format!("owner: {:?} is not allowed; it must be {allowed}", new_token.owner)).into()
        );
    }
    let role = match (new_token.admin, new_token.read_only) {
        (true, _) => TokenRole::Admin,
        (false, true) => TokenRole::ReadOnly,
        (false, false) => TokenRole::User,
    };
    let (id, secret) = store.create_token(&owner, role, SystemTime::now())?;
    let NewToken { admin, read_only, .. } = *new_token;
    Ok(TokenCreated { id: id.0, owner, admin, read_only, secret: secret.reveal().to_owned() })
}

/// Converts a stored token into the agent's JSON form.
fn access_token(metadata: TokenMetadata) -> AccessToken {
    AccessToken {
        id: metadata.token.id.0,
        owner: metadata.token.owner,
        admin: metadata.token.role == TokenRole::Admin,
        read_only: metadata.token.role == TokenRole::ReadOnly,
        created_at: iso(metadata.created_at),
        revoked_at: metadata.revoked_at.map(iso),
    }
}
