//! Certificate and key of the https listeners, read from files and reloaded on demand.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::PEM_BYTES;

/// Certificate and key of https connections. Clones share the files and see each other's reload.
#[derive(Clone)]
pub struct Tls(Arc<Files>);

struct Files {
    certificate: PathBuf,
    key: PathBuf,
    // A lock rather than a channel: every accepted connection reads it, and the rare reload only swaps a pointer.
    current: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads a certificate chain, which begins with the server's own certificate, and its key.
    pub fn load(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Result<Self, TlsError> {
        let (certificate, key) = (certificate.into(), key.into());
        let current = RwLock::new(Arc::new(read(&certificate, &key)?));
        Ok(Self(Arc::new(Files { certificate, key, current })))
    }

    /// Reads both files again for new connections. After an error the old certificate stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let fresh = Arc::new(read(&self.0.certificate, &self.0.key)?);
        *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.0.certificate).field("key", &self.0.key).finish()
    }
}

/// Reason why a certificate and its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}; see server.tls_cert and server.tls_key")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file does not hold the expected PEM.
    #[error("{path}: {problem}; expected {expected} in PEM form")]
    Content {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
        /// The content that belongs there.
        expected: &'static str,
    },
    /// The certificate and the key do not belong together.
    #[error("certificate {certificate} and key {key} cannot be used together: {source}")]
    Unusable {
        /// File of the certificate chain.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// Error of the TLS library.
        source: rustls::Error,
    },
}

fn read(certificate: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let chain = read_chain(certificate)?;
    let secret = read_key(key)?;
    let unusable = |source| TlsError::Unusable { certificate: certificate.to_owned(), key: key.to_owned(), source };
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let expected = "one or more certificates (BEGIN CERTIFICATE)";
    let problem = |problem: String| TlsError::Content { path: path.to_owned(), problem, expected };
    let text = read_file(path)?;
    let chain: Vec<_> =
        CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|error| problem(error.to_string()))?;
    if chain.is_empty() {
        return Err(problem("holds no certificate".to_owned()));
    }
    Ok(chain)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // The message of the parser may quote the secret file, so it is not passed on.
    PrivateKeyDer::from_pem_slice(&read_file(path)?).map_err(|_| TlsError::Content {
        path: path.to_owned(),
        problem: "holds no private key that can be read".to_owned(),
        expected: "one unencrypted key (BEGIN PRIVATE KEY)",
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    let fail = |source| TlsError::Read { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(fail)?.is_file() {
        return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    let mut content = Vec::new();
    File::open(path).map_err(fail)?.take(PEM_BYTES + 1).read_to_end(&mut content).map_err(fail)?;
    if content.len() as u64 > PEM_BYTES {
        return Err(fail(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {PEM_BYTES} bytes"))));
    }
    Ok(content)
}
