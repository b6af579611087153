//! How one question gets to a server and its answer back: HTTP over TCP, TLS or a Unix socket, or whatever a caller puts in
//! its place. Nothing is tried again here; a fault says what is known of the question's fate.

use std::error::Error as StdError;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Body;
use reqwest::RequestBuilder;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;

use crate::limits::{ANSWER_BYTES, CA_BYTES};
use crate::{ClientError, Endpoint};

/// One question.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    /// What is to be done.
    pub method: Method,
    /// With what, as in `/v1/pool`.
    pub route: String,
    /// What follows the `?`.
    pub query: Vec<(&'static str, String)>,
    /// Beside those that every question has.
    pub headers: HeaderMap,
    /// JSON.
    pub body: Option<Bytes>,
    /// How long the whole answer may take.
    pub timeout: Duration,
}

/// A whole answer, of whatever status.
#[derive(Debug, Clone)]
pub struct HttpResponse {
    /// How it went.
    pub status: StatusCode,
    /// What goes with it.
    pub headers: HeaderMap,
    /// What it says.
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum TransportError {
    /// The question cannot have arrived.
    NotSent(Box<dyn StdError + Send + Sync>),
    /// The question may have arrived; the answer did not.
    Broken(Box<dyn StdError + Send + Sync>),
    /// The question may have arrived; the answer took too long.
    Late,
    /// The answer is larger than any an agent gives.
    TooLarge(StatusCode),
}

/// What an exchange comes to, in time.
pub type ExchangeFuture<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, TransportError>> + Send + 'a>>;

/// Carries questions to one server.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Asks once. Dropping the future leaves open whether the question arrived.
    fn exchange(&self, question: HttpRequest) -> ExchangeFuture<'_>;
}

/// HTTP, over connections that are kept open and used again.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub endpoint: Endpoint,
    pub client: reqwest::Client,
}

impl Http {
    /// The question, not sent yet.
    pub(crate) fn build(&self, question: HttpRequest) -> RequestBuilder {
        let address = self.endpoint.address(&question.route);
        let request = self.client.request(question.method, address).headers(question.headers);
        let request = if question.query.is_empty() { request } else { request.query(&question.query) };
        match question.body {
            Some(body) => request.header(CONTENT_TYPE, "application/json").body(body),
            None => request,
        }
    }

    async fn ask(&self, question: HttpRequest) -> Result<HttpResponse, TransportError> {
        let timeout = question.timeout;
        let response = self.build(question).timeout(timeout).send().await.map_err(fault)?;
        read(response.into(), fault).await
    }
}

impl Transport for Http {
    fn exchange(&self, question: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(self.ask(question))
    }
}

/// Reads an answer up to the bound; `fault` judges an error within its body.
pub(crate) async fn read<B>(
    response: Response<B>,
    fault: fn(B::Error) -> TransportError,
) -> Result<HttpResponse, TransportError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (head, mut incoming) = response.into_parts();
    let mut body = BytesMut::new();
    while let Some(frame) = incoming.frame().await {
        let Ok(chunk) = frame.map_err(fault)?.into_data() else { continue };
        if body.len() + chunk.len() > ANSWER_BYTES {
            return Err(TransportError::TooLarge(head.status));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(HttpResponse { status: head.status, headers: head.headers, body: body.freeze() })
}

fn fault(error: reqwest::Error) -> TransportError {
    let error = error.without_url();
    match (error.is_connect(), error.is_timeout()) {
        (true, _) => TransportError::NotSent(error.into()),
        (false, true) => TransportError::Late,
        (false, false) => TransportError::Broken(error.into()),
    }
}

// Whom to believe over TLS. The cryptography is chosen here and for this client alone, so that a program that links
// another one as well never has to choose between them.

/// Trusts the certificates of a file, or else those the system trusts; nobody where TLS is not used.
pub(crate) fn tls_config(endpoint: &Endpoint, ca_file: Option<&Path>) -> Result<ClientConfig, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unusable = |error: rustls::Error| {
        ClientError::setting("TLS", error, "set up with certificates the system trusts, or with a CA file")
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
    let refused = |why: String| {
        let value = format!("{} ({why})", path.display());
        ClientError::setting("CA file", value, "a readable file with at least one PEM certificate")
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
        let error = || tls_config(&endpoint, Some(&path)).unwrap_err().to_string();
        assert!(error().contains("ca.pem") && error().contains("PEM"), "{}", error());
        std::fs::write(&path, "nothing").unwrap();
        assert!(error().contains("no certificate in it"), "{}", error());
        std::fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(error().contains("ca.pem"), "{}", error());
    }
}
