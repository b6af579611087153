//! Endpoints with different transports and tokens.

use gpupool_api::RequestBody;
use gpupool_api::tokens::NewToken;
use gpupool_client::{Balancing, Client, SecretString};

use crate::common::{agent, quick_polling, start_client};

#[tokio::test(flavor = "multi_thread")]
async fn each_endpoint_has_its_own_transport_and_token() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let encrypted = agent("1xH100").argument("--tls-cert").argument(&certificate).argument("--tls-key").argument(&key);
    let encrypted = encrypted.start().await;
    let local = agent("1xH100").start().await;
    let plain = agent("1xH100").start().await;
    let token = |name: &str| NewToken { owner: name.into(), admin: false, read_only: false };
    let alice = encrypted.client_unix().create_token(&token("alice")).await.unwrap();
    let bob = plain.client_unix().create_token(&token("bob")).await.unwrap();

    let socket = format!("unix://{}", local.socket().display());
    let endpoints = format!("https://localhost:{},{socket},{}", encrypted.port(), plain.address());
    let builder = quick_polling(Client::builder().endpoints(&endpoints)).strategy(Balancing::RoundRobin);
    let builder = builder.ca_file(&certificate).token(SecretString::new(&alice.secret));
    let client = start_client(builder.token_for(plain.address(), SecretString::new(&bob.secret))).await;
    assert_eq!(client.pool_status().unwrap().healthy_endpoints, 3, "{:#?}", client.endpoints_info());
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(client.request(RequestBody::default()).await.unwrap());
    }
    let mut owners: Vec<(String, String)> =
        held.iter().map(|lease| (lease.endpoint_id().to_owned(), lease.granted().owner.clone())).collect();
    owners.sort();
    let me = &owners[0].1;
    assert_eq!(owners[0].0, local.socket().display().to_string());
    assert!(me != "alice" && me != "bob", "over the socket the kernel says who asks, not a token: {me}");
    assert_eq!(owners[1], ("127.0.0.1".to_owned(), "bob".to_owned()));
    assert_eq!(owners[2], ("localhost".to_owned(), "alice".to_owned()));
    for lease in held {
        lease.release().await.unwrap();
    }
}
