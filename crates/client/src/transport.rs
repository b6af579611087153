//! Transport of one request and its response: HTTP over TCP, TLS or a Unix socket, or an implementation of the caller.
//! A transport does not retry; its errors show whether the request can have arrived.

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

use crate::limits::{MAX_CA_FILE_BYTES, MAX_RESPONSE_BYTES};
use crate::{ClientError, Endpoint};

/// An HTTP request.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    /// HTTP method.
    pub method: Method,
    /// Path below the address of the server, such as `/v1/pool`.
    pub route: String,
    /// Parameters after the `?`.
    pub query: Vec<(&'static str, String)>,
    /// Headers beyond those of every request.
    pub headers: HeaderMap,
    /// JSON body.
    pub body: Option<Bytes>,
    /// Time limit for the whole response.
    pub timeout: Duration,
}

/// A complete response with any status.
#[derive(Debug, Clone)]
pub struct HttpResponse {
    /// HTTP status.
    pub status: StatusCode,
    /// Response headers.
    pub headers: HeaderMap,
    /// Response body.
    pub body: Bytes,
}

/// Reason for a missing response.
#[derive(Debug)]
pub enum TransportError {
    /// The request cannot have arrived.
    NotSent(Box<dyn StdError + Send + Sync>),
    /// The request may have arrived; the response did not.
    Broken(Box<dyn StdError + Send + Sync>),
    /// The request may have arrived; the response took too long.
    TimedOut,
    /// The response is larger than any response of an agent.
    TooLarge(StatusCode),
}

/// Future of one exchange.
pub type ExchangeFuture<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, TransportError>> + Send + 'a>>;

/// Transport of requests to one server.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Sends a request once. After the future is dropped, the request may or may not have arrived.
    fn exchange(&self, request: HttpRequest) -> ExchangeFuture<'_>;
}

/// HTTP over pooled connections.
#[derive(Debug, Clone)]
pub(crate) struct ReqwestTransport {
    pub endpoint: Endpoint,
    pub client: reqwest::Client,
}

impl ReqwestTransport {
    /// Builds the request without sending it.
    pub(crate) fn build(&self, request: HttpRequest) -> RequestBuilder {
        let address = self.endpoint.address(&request.route);
        let builder = self.client.request(request.method, address).headers(request.headers);
        let builder = if request.query.is_empty() { builder } else { builder.query(&request.query) };
        match request.body {
            Some(body) => builder.header(CONTENT_TYPE, "application/json").body(body),
            None => builder,
        }
    }

    async fn send_request(&self, request: HttpRequest) -> Result<HttpResponse, TransportError> {
        let timeout = request.timeout;
        let response = self.build(request).timeout(timeout).send().await.map_err(transport_error)?;
        read_response(response.into(), transport_error).await
    }
}

impl Transport for ReqwestTransport {
    fn exchange(&self, request: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(self.send_request(request))
    }
}

/// Reads a response up to the size limit; `transport_error` converts an error within its body.
pub(crate) async fn read_response<B>(
    response: Response<B>,
    transport_error: fn(B::Error) -> TransportError,
) -> Result<HttpResponse, TransportError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (head, mut incoming) = response.into_parts();
    let mut body = BytesMut::new();
    while let Some(frame) = incoming.frame().await {
        let Ok(chunk) = frame.map_err(transport_error)?.into_data() else { continue };
        if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Err(TransportError::TooLarge(head.status));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(HttpResponse { status: head.status, headers: head.headers, body: body.freeze() })
}

fn transport_error(error: reqwest::Error) -> TransportError {
    let error = error.without_url();
    match (error.is_connect(), error.is_timeout()) {
        (true, _) => TransportError::NotSent(error.into()),
        (false, true) => TransportError::TimedOut,
        (false, false) => TransportError::Broken(error.into()),
    }
}

// TLS. The cryptography provider is chosen here and for this client alone, so that a program that links another one as
// well never has to choose between them.

/// Trusts the certificates of a file, or else those of the system; none if TLS is not used.
pub(crate) fn tls_config(endpoint: &Endpoint, ca_file: Option<&Path>) -> Result<ClientConfig, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unusable = |error: rustls::Error| {
        ClientError::setting("TLS", error, "set up with certificates the system trusts, or with a CA file")
    };
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(unusable)?;
    let builder = match ca_file {
        Some(path) => builder.with_root_certificates(root_certificates(path)?),
        None if endpoint.is_encrypted() => builder.with_platform_verifier().map_err(unusable)?,
        None => builder.with_root_certificates(RootCertStore::empty()),
    };
    Ok(builder.with_no_client_auth())
}

fn root_certificates(path: &Path) -> Result<RootCertStore, ClientError> {
    let refused = |why: String| {
        let value = format!("{} ({why})", path.display());
        ClientError::setting("CA file", value, "a readable file with at least one PEM certificate")
    };
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    file.take(MAX_CA_FILE_BYTES).read_to_end(&mut text).map_err(|error| refused(error.to_string()))?;
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
    fn an_invalid_ca_file_is_named() {
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
