//! What can go wrong before the first request.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the agent cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// Neither TCP nor Unix was asked for.
    #[error("nothing to listen on: give at least one TCP address or a Unix socket")]
    Nothing,
    /// A limit under which nobody could be served.
    #[error("limit {field} is {value}, must be at least {least}")]
    Limit {
        /// Name of the limit.
        field: &'static str,
        /// What was asked for.
        value: usize,
        /// What is allowed.
        least: usize,
    },
    /// The host name stands for no address.
    #[error("host {host:?} cannot be resolved: {source}; give an address of this machine, or localhost")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Somebody listens there already.
    #[error("{address} is in use: another program listens there; choose another port, or 0 for any")]
    InUse {
        /// The address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A program listens on the Unix socket; it is left alone.
    #[error("{path}: another program listens on this socket")]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something that is not a socket is there; it is left alone.
    #[error("{path}: exists and is not a socket; move it away or choose another place")]
    NotASocket {
        /// What is there.
        path: PathBuf,
    },
    /// The Unix socket cannot be made.
    #[error("cannot {doing} the socket {path}: {source}")]
    Unix {
        /// Which step failed.
        doing: &'static str,
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Why a certificate and its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not hold what is needed.
    #[error("{path}: {problem}; expected {expected} in PEM form")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What should be there.
        expected: &'static str,
    },
    /// Each file is readable, together they are of no use.
    #[error("{certificate} and {key} cannot be used together: {source}")]
    Unusable {
        /// File of the certificate chain.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What the TLS library said.
        source: rustls::Error,
    },
}
