//! Whom to believe over TLS. The cryptography is chosen here and for this client alone, so that a program that links
//! another one as well never has to choose between them.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;

use crate::limits::CA_BYTES;
use crate::{ClientError, Endpoint};

/// Trusts the certificates of a file, or else those the system trusts; nobody where TLS is not used.
pub(crate) fn config(endpoint: &Endpoint, ca_file: Option<&Path>) -> Result<ClientConfig, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unusable = |error: rustls::Error| ClientError::Setting {
        what: "TLS",
        value: error.to_string(),
        allowed: "set up with certificates the system trusts, or with a CA file".into(),
    };
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(unusable)?;
    let builder = match ca_file {
        Some(path) => builder.with_root_certificates(roots(path)?),
        None if endpoint.is_encrypted() => builder.with_platform_verifier().map_err(unusable)?,
        None => builder.with_root_certificates(RootCertStore::empty()),
    };
    Ok(builder.with_no_client_auth())
}

fn roots(path: &Path) -> Result<RootCertStore, ClientError> {
    let refused = |why: String| ClientError::Setting {
        what: "CA file",
        value: format!("{} ({why})", path.display()),
        allowed: "a readable file with at least one PEM certificate".into(),
    };
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    file.take(CA_BYTES).read_to_end(&mut text).map_err(|error| refused(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|error| refused(error.to_string()))?;
        roots.add(certificate).map_err(|error| refused(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(refused("no certificate in it".into()));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_file_that_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let endpoint: Endpoint = "https://gpu7".parse().unwrap();
        let path = folder.path().join("ca.pem");
        let error = || config(&endpoint, Some(&path)).unwrap_err().to_string();
        assert!(error().contains("ca.pem") && error().contains("PEM"), "{}", error());
        std::fs::write(&path, "nothing").unwrap();
        assert!(error().contains("no certificate in it"), "{}", error());
        std::fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(error().contains("ca.pem"), "{}", error());
    }
}
