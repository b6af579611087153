//! API tokens: a random secret that is shown once, and the hash in the store.
//!
//! The secret has 256 random bits, so a plain hash protects it. The duration of a lookup reveals nothing to an
//! attacker, because hashes are compared instead of secrets.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::io;
use std::time::SystemTime;

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

/// Identifier of a token, to list and revoke it.
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
    /// May read what a user of the machine may read, and change nothing.
    ReadOnly,
    /// May request and release leases of the own account.
    User,
    /// May also revoke every lease and cordon devices.
    Admin,
}

/// Secret of a token, to be shown once.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret(String);

impl TokenSecret {
    /// Returns the secret in plain text: `gpt_` and 64 hexadecimal digits.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(gpt_…)")
    }
}

/// Owner and rights of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOwner {
    pub id: TokenId,
    /// Account of the token.
    pub owner: String,
    pub role: TokenRole,
}

/// A token without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMetadata {
    pub token: TokenOwner,
    /// Creation time.
    pub created_at: SystemTime,
    /// Revocation time, if revoked.
    pub revoked_at: Option<SystemTime>,
}

/// Owners of all valid tokens, by the hashes of their secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenOwners {
    owners: HashMap<SecretHash, TokenOwner>,
}

impl TokenOwners {
    /// Returns the owner of a secret, unless the secret is unknown or revoked. The duration reveals nothing about other
    /// secrets: the compared hashes cannot be chosen by a caller.
    pub fn find(&self, secret: &str) -> Option<&TokenOwner> {
        self.owners.get(&hash_secret(secret))
    }
}

impl FromIterator<(SecretHash, TokenOwner)> for TokenOwners {
    fn from_iter<T: IntoIterator<Item = (SecretHash, TokenOwner)>>(owners: T) -> Self {
        Self { owners: owners.into_iter().collect() }
    }
}

/// Hash of a secret; the store never has the secret.
pub(crate) type SecretHash = [u8; 32];

/// Generates a random secret.
pub(crate) fn generate_secret() -> io::Result<TokenSecret> {
    let mut bytes = [0_u8; 32];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty())?;
    // The kernel returns up to 256 bytes at once.
    assert_eq!(filled, bytes.len(), "the kernel returned too few random bytes");
    let mut secret = String::from("gpt_");
    for byte in bytes {
        let _ = write!(secret, "{byte:02x}");
    }
    Ok(TokenSecret(secret))
}

/// Returns the hash of a secret.
pub(crate) fn hash_secret(secret: &str) -> SecretHash {
    Sha256::digest(secret.as_bytes()).into()
}
