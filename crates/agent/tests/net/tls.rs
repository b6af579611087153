//! https with real certificates, and their reload.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use gpupool_agent::internals::net::{ListenSpec, NetLimits, Tls, TlsError};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new() -> (Self, CertificateDer<'static>) {
        let files = Self { dir: tempfile::tempdir().unwrap() };
        let certificate = files.renew();
        (files, certificate)
    }

    /// Writes a new certificate and its key.
    fn renew(&self) -> CertificateDer<'static> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(self.certificate(), made.cert.pem()).unwrap();
        std::fs::write(self.key(), made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    }

    fn certificate(&self) -> PathBuf {
        self.dir.path().join("certificate.pem")
    }

    fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }

    fn load(&self) -> Result<Tls, TlsError> {
        Tls::load(self.certificate(), self.key())
    }
}

async fn serve_https(tls: &Tls, limits: NetLimits) -> ServedListeners {
    serve(ListenSpec { tcp: vec![localhost()], tls: Some(tls.clone()), limits, ..ListenSpec::default() }).await
}

/// Connects, trusting only this certificate.
async fn connect(
    served: &ServedListeners,
    trusted: &CertificateDer<'static>,
) -> std::io::Result<TlsStream<tokio::net::TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    soon("the handshake", TlsConnector::from(Arc::new(config)).connect(name, served.connect().await)).await
}

async fn hello(served: &ServedListeners, trusted: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut stream = connect(served, trusted).await?;
    stream.write_all(get_request("/hello").as_bytes()).await?;
    Ok(read_until(&mut stream, "hello").await)
}

#[tokio::test]
async fn https_is_spoken_with_http_1_and_told_to_the_handler() {
    let (files, certificate) = Files::new();
    let served = serve_https(&files.load().unwrap(), NetLimits::default()).await;
    let mut stream = connect(&served, &certificate).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let me = rustix::process::getuid().as_raw();
    stream.write_all(get_request("/who").as_bytes()).await.unwrap();
    read_until(&mut stream, &format!("uid Some({me})")).await;
    assert_eq!(served.stop().await.cut_off, 0);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_over_https_too() {
    let (files, certificate) = Files::new();
    let mut served = serve_https(&files.load().unwrap(), NetLimits::default()).await;
    let mut stream = connect(&served, &certificate).await.unwrap();
    stream.write_all(get_request("/wait").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    drop(stream);
    assert_eq!(served.event().await, HandlerEvent::WaitEnded);
}

#[tokio::test]
async fn plain_http_to_an_https_port_is_told_so() {
    let (files, _) = Files::new();
    let served = serve_https(&files.load().unwrap(), NetLimits::default()).await;
    let response = exchange(served.connect().await, get_request("/hello").as_bytes()).await;
    assert!(status(&response).starts_with("400") && response.contains("this port speaks https"), "{response}");
    // Neither http nor TLS: closed, and the listener continues.
    let response = exchange(served.connect().await, b"\x16\x03\x01\x00\x05hello").await;
    assert!(!response.contains("HTTP"), "{response}");
    drop(connect(&served, &files.renew()).await.unwrap_err());
}

#[tokio::test]
async fn a_client_that_does_not_shake_hands_is_closed() {
    let (files, _) = Files::new();
    let limits = NetLimits { header_time: Duration::from_millis(100), ..NetLimits::default() };
    let served = serve_https(&files.load().unwrap(), limits).await;
    assert_eq!(exchange(served.connect().await, b"").await, "");
}

#[tokio::test]
async fn reload_uses_new_files_and_keeps_the_old_ones_when_they_are_bad() {
    let (files, first) = Files::new();
    let tls = files.load().unwrap();
    let served = serve_https(&tls, NetLimits::default()).await;
    let mut before = connect(&served, &first).await.unwrap();

    let second = files.renew();
    hello(&served, &first).await.expect("not reloaded yet");
    tls.reload().unwrap();
    hello(&served, &second).await.expect("the new certificate is in force");
    hello(&served, &first).await.expect_err("the old one is not");
    before.write_all(get_request("/hello").as_bytes()).await.unwrap();
    read_until(&mut before, "hello").await;

    std::fs::write(files.key(), "not a key: hunter2").unwrap();
    let error = tls.reload().unwrap_err().to_string();
    assert!(error.contains("key.pem") && !error.contains("hunter2"), "{error}");
    hello(&served, &second).await.expect("a bad key leaves the old one in force");
}

#[test]
fn files_of_no_use_are_named() {
    let (files, _) = Files::new();
    let key = std::fs::read(files.key()).unwrap();
    files.renew();
    std::fs::write(files.key(), key).unwrap();
    assert_names(&files, &files.key(), "together");
    std::fs::write(files.certificate(), "").unwrap();
    assert_names(&files, &files.certificate(), "holds no certificate");
    std::fs::write(files.certificate(), vec![b'x'; 2 << 20]).unwrap();
    assert_names(&files, &files.certificate(), "larger than");
    std::fs::remove_file(files.certificate()).unwrap();
    assert_names(&files, &files.certificate(), "cannot read");
    std::fs::create_dir(files.certificate()).unwrap();
    assert_names(&files, &files.certificate(), "not a regular file");
}

fn assert_names(files: &Files, path: &Path, problem: &str) {
    let error = files.load().unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()) && error.contains(problem), "{error}");
}
