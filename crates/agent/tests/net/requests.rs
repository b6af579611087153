//! Well- and ill-formed requests over real connections, and clients that leave.

use crate::skipped::skipped;
use crate::support::*;
use gpupool_agent::internals::net::{ListenSpec, NetError, NetLimits, NetListeners, TcpBind};
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn localhost_listens_on_both_families_with_one_port() {
    let both = TcpBind { host: "localhost".to_owned(), port: 0 };
    let served = serve(ListenSpec { tcp: vec![both], ..ListenSpec::default() }).await;
    for address in &served.addresses {
        assert_eq!(address.port(), served.address().port(), "{:?}", served.addresses);
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let response = exchange(stream, last_request("/hello").as_bytes()).await;
        assert!(response.ends_with("hello"), "{address}: {response}");
    }
    if served.addresses.len() != 2 {
        skipped("listening in both families", &format!("this machine has only {:?}", served.addresses));
    }
    assert_eq!(served.stop().await.cut_off, 0);
}

#[tokio::test]
async fn a_port_in_use_and_an_unknown_host_name_are_errors() {
    let served = serve_limited(NetLimits::default()).await;
    let taken = TcpBind { host: "127.0.0.1".to_owned(), port: served.address().port() };
    let error = NetListeners::bind(ListenSpec { tcp: vec![taken], ..ListenSpec::default() }).await.unwrap_err();
    assert!(matches!(error, NetError::InUse { address } if address == served.address()), "{error}");
    let unknown = TcpBind { host: "no such host".to_owned(), port: 0 };
    let error = NetListeners::bind(ListenSpec { tcp: vec![unknown], ..ListenSpec::default() }).await.unwrap_err();
    assert!(error.to_string().contains("no such host"), "{error}");
    assert!(matches!(NetListeners::bind(ListenSpec::default()).await.unwrap_err(), NetError::Nothing));
    let limits = NetLimits { header_bytes: 10, ..NetLimits::default() };
    let error =
        NetListeners::bind(ListenSpec { tcp: vec![localhost()], limits, ..ListenSpec::default() }).await.unwrap_err();
    assert_eq!(error.to_string(), "limit header_bytes is 10, must be at least 8192");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let served = serve_limited(NetLimits::default()).await;
    let echo =
        |word: &str| format!("POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{word}", word.len());
    let requests = format!("{}{}{}{}", echo("first"), get_request("/hello"), echo("third"), last_request("/hello"));
    let response = exchange(served.connect().await, requests.as_bytes()).await;
    let places: Vec<_> = ["first", "hello", "third"].iter().map(|word| response.find(word).unwrap()).collect();
    assert!(places.is_sorted(), "{response}");
    assert_eq!(response.matches("200 OK").count(), 4, "{response}");
}

#[tokio::test]
async fn malformed_requests_get_400_and_the_listener_continues() {
    let served = serve_limited(NetLimits::default()).await;
    let bad: [&[u8]; 7] = [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /hello HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: minus\r\n\r\n",
        b"\x00\xff\xfe\r\n\r\n",
        b"GET /\x80 HTTP/1.1\r\n\x01: 1\r\n\r\n",
    ];
    for request in bad {
        let response = exchange(served.connect().await, request).await;
        assert!(status(&response).starts_with("400"), "{:?} got {response:?}", String::from_utf8_lossy(request));
    }
    let response = exchange(served.connect().await, last_request("/hello").as_bytes()).await;
    assert!(response.ends_with("hello"), "{response}");
}

#[tokio::test]
async fn too_many_header_bytes_or_headers_get_431_even_while_still_sending() {
    let served = serve_limited(NetLimits::default()).await;
    let long = format!("GET /hello HTTP/1.1\r\nlong: {}\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET /hello HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(101));
    for request in [long, many] {
        let response = exchange(served.connect().await, request.as_bytes()).await;
        assert!(status(&response).starts_with("431"), "{} bytes got {response:?}", request.len());
    }
}

#[tokio::test]
async fn a_panicking_handler_costs_only_its_own_connection() {
    let served = serve_limited(NetLimits::default()).await;
    assert_eq!(exchange(served.connect().await, get_request("/panic").as_bytes()).await, "");
    let response = exchange(served.connect().await, last_request("/hello").as_bytes()).await;
    assert!(response.ends_with("hello"), "{response}");
    assert_eq!(served.stop().await.cut_off, 0);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let mut served = serve_limited(NetLimits::default()).await;
    let mut stream = served.connect().await;
    stream.write_all(get_request("/wait").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    drop(stream);
    assert_eq!(served.event().await, HandlerEvent::WaitEnded);
}

#[tokio::test]
async fn a_client_that_closes_only_its_sending_side_counts_as_gone() {
    let mut served = serve_limited(NetLimits::default()).await;
    let mut stream = served.connect().await;
    stream.write_all(get_request("/wait").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    stream.shutdown().await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::WaitEnded);
    assert_eq!(read_to_end(&mut stream).await, "");
}

#[tokio::test]
async fn a_client_that_leaves_with_more_requests_sent_is_noticed_too() {
    let mut served = serve_limited(NetLimits::default()).await;
    let mut stream = served.connect().await;
    let two = format!("{}{}", get_request("/wait"), get_request("/hello"));
    stream.write_all(two.as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    drop(stream);
    assert_eq!(served.event().await, HandlerEvent::WaitEnded);
}
