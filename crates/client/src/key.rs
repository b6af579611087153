//! What makes a retried request the same request, and what shows who asks.

use std::fmt;

use crate::limits::KEY_BYTES;
use crate::{ClientError, random};

/// Makes a retried request the same request, so that it never takes two GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// A key nobody else has.
    pub fn random() -> Self {
        Self(format!("{:016x}{:016x}", random::number(), random::number()))
    }

    /// A key of the caller's own, such as the id of a job that may be submitted twice.
    pub fn new(text: impl Into<String>) -> Result<Self, ClientError> {
        let text = text.into();
        let is_printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && text.trim() == text;
        if text.is_empty() || text.len() > KEY_BYTES || !is_printable {
            let allowed = format!("1..={KEY_BYTES} printable ASCII characters, no blank at either end");
            return Err(ClientError::Setting { what: "idempotency key", value: format!("{text:?}"), allowed });
        }
        Ok(Self(text))
    }

    /// The key as it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A token that shows who asks. Never shown itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes a secret; blanks and line ends around it are not part of it.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().trim().to_owned())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_sendable_or_refused_with_what_is_allowed() {
        assert_ne!(IdempotencyKey::random(), IdempotencyKey::random());
        assert!(IdempotencyKey::new("job 17").is_ok());
        for bad in ["", " x", "a\nb", "ü", &"x".repeat(KEY_BYTES + 1)] {
            let refused = IdempotencyKey::new(bad).unwrap_err().to_string();
            assert!(refused.contains("idempotency key") && refused.contains("1..=253"), "{refused}");
        }
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new(" abc\n");
        assert_eq!(secret.reveal(), "abc");
        assert!(!format!("{secret:?}").contains("abc"));
    }
}
