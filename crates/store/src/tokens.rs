//! Tokens for the API: a random secret that its holder sees once, and the hash that a store keeps.
//!
//! The secret has 256 random bits, so a plain hash hides it, and looking the hash up tells an attacker nothing by how
//! long it takes: what is compared is not what was sent.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::io;
use std::time::SystemTime;

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

/// Names a token, to list and revoke it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u64);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rights of a token's holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRole {
    /// Take and give back leases of its own.
    User,
    /// Revoke anybody's, too, and cordon devices.
    Admin,
}

/// The secret of a token, to be shown once.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret(String);

impl TokenSecret {
    /// The secret in plain text: `gpt_` and 64 hexadecimal digits.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(gpt_…)")
    }
}

/// Owner of a token, and what the token allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOwner {
    /// Which token it is.
    pub id: TokenId,
    /// On whose account it acts.
    pub owner: String,
    /// What it may do.
    pub role: TokenRole,
}

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMetadata {
    pub token: TokenOwner,
    /// When it was made.
    pub created_at: SystemTime,
    /// When it was revoked.
    pub revoked_at: Option<SystemTime>,
}

/// Owners of all tokens that were not revoked, by the hashes of their secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenOwners {
    owners: HashMap<SecretHash, TokenOwner>,
}

impl TokenOwners {
    /// Returns the owner of a secret, unless the secret is unknown or was revoked. The time that this takes tells nothing of
    /// other secrets: hashes are compared, which a caller cannot choose.
    pub fn find(&self, secret: &str) -> Option<&TokenOwner> {
        self.owners.get(&hash(secret))
    }
}

impl FromIterator<(SecretHash, TokenOwner)> for TokenOwners {
    fn from_iter<T: IntoIterator<Item = (SecretHash, TokenOwner)>>(owners: T) -> Self {
        Self { owners: owners.into_iter().collect() }
    }
}

/// Hash of a secret, which is all that a store keeps of it.
pub(crate) type SecretHash = [u8; 32];

/// Draws a secret that was never drawn before.
pub(crate) fn draw() -> io::Result<TokenSecret> {
    let mut bytes = [0_u8; 32];
    let drawn = getrandom(&mut bytes, GetRandomFlags::empty())?;
    // The kernel gives up to 256 bytes whole.
    assert_eq!(drawn, bytes.len(), "the kernel gave too few random bytes");
    let mut secret = String::from("gpt_");
    for byte in bytes {
        let _ = write!(secret, "{byte:02x}");
    }
    Ok(TokenSecret(secret))
}

/// Returns the hash of a secret.
pub(crate) fn hash(secret: &str) -> SecretHash {
    Sha256::digest(secret.as_bytes()).into()
}
