//! What was seen of the machine, as data.

use std::path::PathBuf;

/// What was looked up for a configuration. The default knows nothing, and nothing is said about what is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Whether the port can be listened on.
    pub port: PortFact,
    /// The certificate of the server.
    pub tls_cert: FileFact,
    /// Its key.
    pub tls_key: FileFact,
    /// The certificates a client trusts.
    pub ca_file: FileFact,
    /// The configuration file itself.
    pub config_file: FileFact,
    /// The state directory.
    pub state_dir: DirectoryFact,
}

/// Whether a port can be listened on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PortFact {
    /// Not tried.
    #[default]
    Unknown,
    /// It can.
    Free,
    /// Somebody listens there.
    InUse {
        /// Who, where that could be seen: `python3 (pid 12)`.
        by: Option<String>,
    },
    /// It cannot, for another reason.
    Refused(String),
}

/// What a file is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FileFact {
    /// Not looked at.
    #[default]
    Unknown,
    /// It cannot be read.
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// It can be read.
    Here {
        /// Which file.
        path: PathBuf,
        /// Whether users who are neither its owner nor in its group can read it.
        others_can_read: bool,
    },
}

/// What a directory is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectoryFact {
    /// Why nothing can be written there.
    pub not_writable: Option<String>,
    /// The kind of network file system it is on.
    pub network: Option<&'static str>,
}
