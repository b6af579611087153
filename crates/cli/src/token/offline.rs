//! Tokens in a state directory that no agent uses now.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use anyhow::bail;
use gpupool_agent::clock::iso;
use gpupool_agent::identity::ANONYMOUS;
use gpupool_api::tokens::{NewToken, Token, TokenCreated};
use gpupool_core::limits::NAME_BYTES;
use gpupool_store::{Role, Store, TokenId, TokenLine};
use rustix::process::geteuid;

use crate::output::WrongUsage;

/// The tokens of a state directory, which no agent can use meanwhile.
pub(super) struct Offline {
    store: Store,
}

impl Offline {
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        // Files made here by somebody else would lock the agent out of its own directory.
        let (us, whose) = (geteuid().as_raw(), fs::metadata(dir).map_or(geteuid().as_raw(), |about| about.uid()));
        if whose != us {
            bail!(
                "{} belongs to user {whose}, not to user {us}; run this as that user, or start the agent and ask it",
                dir.display()
            );
        }
        Ok(Self { store: Store::open(dir)?.store })
    }

    pub fn create(&mut self, wanted: &NewToken) -> anyhow::Result<TokenCreated> {
        let owner = wanted.owner.trim().to_owned();
        if owner.is_empty() || owner.len() > NAME_BYTES || owner.starts_with(ANONYMOUS) {
            let allowed = format!("a name of 1..={NAME_BYTES} bytes that does not start with {ANONYMOUS:?}");
            return Err(WrongUsage::of(format!("owner: {:?} is not allowed; allowed: {allowed}", wanted.owner)).into());
        }
        let role = if wanted.admin { Role::Admin } else { Role::User };
        let (id, secret) = self.store.create_token(&owner, role, SystemTime::now())?;
        Ok(TokenCreated { id: id.0, owner, admin: wanted.admin, secret: secret.reveal().to_owned() })
    }

    pub fn list(&self) -> anyhow::Result<Vec<Token>> {
        let line = |line: TokenLine| Token {
            id: line.token.id.0,
            owner: line.token.owner,
            admin: line.token.role == Role::Admin,
            created_at: iso(line.created_at),
            revoked_at: line.revoked_at.map(iso),
        };
        Ok(self.store.tokens()?.into_iter().map(line).collect())
    }

    pub fn revoke(&mut self, id: u64) -> anyhow::Result<()> {
        if !self.store.revoke_token(TokenId(id), SystemTime::now())? {
            bail!("there is no token {id} that could be revoked; see: gpupool token list");
        }
        Ok(())
    }
}
