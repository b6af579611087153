//! What is wrong with a configuration, and where it was written.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The file.
    File {
        /// Which file.
        path: Arc<Path>,
        /// Which line, from 1.
        line: usize,
    },
    /// A variable of the environment.
    Environment {
        /// Its name.
        name: &'static str,
    },
    /// A flag of the command line.
    Flag {
        /// Its name, dashes included.
        name: String,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment { name } => write!(f, "environment {name}"),
            Self::Flag { name } => write!(f, "flag {name}"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A value that is not allowed.
    #[error("{}: {value} is not allowed, it must be {allowed}{}", place(key, origin), meant(hint))]
    BadValue {
        /// The setting.
        key: String,
        /// Where it was written.
        origin: Origin,
        /// What was written; secrets are left out.
        value: String,
        /// What may be written.
        allowed: String,
        /// What was probably meant.
        hint: Option<String>,
    },
    /// A key of the file or the name of a flag that nobody knows.
    #[error("{}: nobody knows this key{}", place(key, origin), meant(hint))]
    UnknownKey {
        /// As it was written.
        key: String,
        /// Where.
        origin: Origin,
        /// What was probably meant.
        hint: Option<String>,
    },
    /// Two settings that cannot both be.
    #[error("{}: {said}", place(key, origin))]
    Contradiction {
        /// One of them.
        key: String,
        /// Where it was written.
        origin: Origin,
        /// What is wrong and what to do.
        said: String,
    },
    /// The file is not TOML.
    #[error("{origin}: {said}")]
    Syntax {
        /// Where.
        origin: Origin,
        /// What the parser expected.
        said: String,
    },
    /// The file cannot be read.
    #[error("{}: {said}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why not.
        said: String,
    },
}

impl Problem {
    /// The setting it is about, where it is about one.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::BadValue { key, .. } | Self::UnknownKey { key, .. } | Self::Contradiction { key, .. } => Some(key),
            Self::Syntax { .. } | Self::Unreadable { .. } => None,
        }
    }

    /// Where it was written.
    pub fn place(&self) -> String {
        match self {
            Self::BadValue { origin, .. }
            | Self::UnknownKey { origin, .. }
            | Self::Contradiction { origin, .. }
            | Self::Syntax { origin, .. } => origin.to_string(),
            Self::Unreadable { path, .. } => path.display().to_string(),
        }
    }
}

/// A variable or flag is its own name; in the file the key says which line is meant.
fn place(key: &str, origin: &Origin) -> String {
    match origin {
        Origin::Default => key.to_owned(),
        Origin::File { .. } => format!("{origin}: {key}"),
        Origin::Environment { name } => (*name).to_owned(),
        Origin::Flag { name } => name.clone(),
    }
}

fn meant(hint: &Option<String>) -> String {
    hint.as_ref().map(|hint| format!("; did you mean {hint}?")).unwrap_or_default()
}

/// Everything that is wrong, not only the first of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.lines())]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    fn lines(&self) -> String {
        self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }
}

/// A bad value that was left out of account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// What is wrong with it.
    pub problem: Problem,
    /// Why it does no harm.
    pub why_ignored: &'static str,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; it is ignored, {}", self.problem, self.why_ignored)
    }
}
