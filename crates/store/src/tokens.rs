//! Tokens for the API: a random secret its holder sees once, and its hash here.
//!
//! The secret has 256 random bits, so a plain hash hides it, and looking the hash up tells an attacker nothing by how
//! long it takes: what is compared is not what was sent.

use std::fmt::{self, Write};
use std::time::SystemTime;

use rusqlite::{OptionalExtension, params};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

use crate::clock::{millis, wall};
use crate::commit::execute;
use crate::error::{CommitError, ReadError};
use crate::open::Store;

/// Names a token, to list and revoke it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u64);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a token's holder may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Take and give back leases of its own.
    User,
    /// Revoke anybody's, too, and cordon devices.
    Admin,
}

/// The secret of a token, to be shown once.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The secret in plain text: `gpt_` and 64 hexadecimal digits.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(gpt_…)")
    }
}

/// Who showed a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOwner {
    /// Which token it is.
    pub id: TokenId,
    /// On whose account it acts.
    pub owner: String,
    /// What it may do.
    pub role: Role,
}

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenLine {
    pub token: TokenOwner,
    /// When it was made.
    pub created_at: SystemTime,
    /// When it was revoked.
    pub revoked_at: Option<SystemTime>,
}

impl Store {
    /// Makes a token. The secret is told here and never again.
    pub fn create_token(&mut self, owner: &str, role: Role, at: SystemTime) -> Result<(TokenId, Secret), CommitError> {
        let secret = draw().map_err(|error| self.not_kept(rusqlite::Error::ToSqlConversionFailure(Box::new(error))))?;
        let id = self.transact(|transaction| {
            transaction
                .prepare_cached("INSERT INTO tokens (hash, owner, admin, created_at) VALUES (?1, ?2, ?3, ?4)")?
                .insert(params![hash(&secret.0), owner, role == Role::Admin, millis(at).cast_signed()])
        })?;
        Ok((TokenId(id.cast_unsigned()), secret))
    }

    /// Whose secret this is; nobody's where it is unknown or revoked.
    pub fn find_token(&self, secret: &str) -> Result<Option<TokenOwner>, ReadError> {
        let find = || {
            self.connection
                .prepare_cached("SELECT id, owner, admin FROM tokens WHERE hash = ?1 AND revoked_at IS NULL")?
                .query_row([hash(secret)], owner_in)
                .optional()
        };
        find().map_err(|source| self.not_read(source))
    }

    /// Every token, revoked ones too, oldest first.
    pub fn tokens(&self) -> Result<Vec<TokenLine>, ReadError> {
        let list = || {
            let mut statement = self
                .connection
                .prepare_cached("SELECT id, owner, admin, created_at, revoked_at FROM tokens ORDER BY id")?;
            let lines = statement.query_map([], |row| {
                let time = |at: i64| wall(at.max(0).cast_unsigned());
                Ok(TokenLine {
                    token: owner_in(row)?,
                    created_at: time(row.get(3)?),
                    revoked_at: row.get::<_, Option<i64>>(4)?.map(time),
                })
            })?;
            lines.collect::<rusqlite::Result<_>>()
        };
        list().map_err(|source| self.not_read(source))
    }

    /// Revokes a token; says whether there was one to revoke.
    pub fn revoke_token(&mut self, id: TokenId, at: SystemTime) -> Result<bool, CommitError> {
        let sql = "UPDATE tokens SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL";
        let values = [id.0.cast_signed(), millis(at).cast_signed()];
        let changed = self.transact(|transaction| execute(transaction, sql, values))?;
        Ok(changed == 1)
    }
}

fn owner_in(row: &rusqlite::Row<'_>) -> rusqlite::Result<TokenOwner> {
    let role = if row.get(2)? { Role::Admin } else { Role::User };
    Ok(TokenOwner { id: TokenId(row.get::<_, i64>(0)?.cast_unsigned()), owner: row.get(1)?, role })
}

fn draw() -> Result<Secret, std::io::Error> {
    let mut bytes = [0_u8; 32];
    let drawn = getrandom(&mut bytes, GetRandomFlags::empty())?;
    // The kernel gives up to 256 bytes whole.
    assert_eq!(drawn, bytes.len(), "the kernel gave too few random bytes");
    let mut secret = String::from("gpt_");
    for byte in bytes {
        let _ = write!(secret, "{byte:02x}");
    }
    Ok(Secret(secret))
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}
