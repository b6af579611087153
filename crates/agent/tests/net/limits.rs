//! Slow, greedy and too many clients.

use std::time::Duration;

use crate::skipped::skipped;
use crate::support::*;
use gpupool_agent::internals::net::{ListenSpec, NetLimits, TcpBind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn headers_that_trickle_get_408() {
    let served = serve_limited(NetLimits { header_time: SHORT, ..NetLimits::default() }).await;
    let mut stream = served.connect().await;
    let (mut read, mut write) = stream.split();
    let trickle = async {
        write.write_all(b"GET /hello HTTP/1.1\r\nslow: ").await.unwrap();
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
        std::future::pending::<()>().await
    };
    let response = tokio::select! { response = read_to_end(&mut read) => response, () = trickle => unreachable!() };
    assert!(status(&response).starts_with("408"), "{response}");
}

#[tokio::test]
async fn a_silent_client_is_closed() {
    let served = serve_limited(NetLimits { header_time: SHORT, ..NetLimits::default() }).await;
    let response = exchange(served.connect().await, b"").await;
    assert!(status(&response).starts_with("408"), "{response}");
}

#[tokio::test]
async fn a_missing_body_gets_408() {
    let served = serve_limited(NetLimits { body_time: SHORT, ..NetLimits::default() }).await;
    let request = b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\nhalf";
    let response = exchange(served.connect().await, request).await;
    assert!(status(&response).starts_with("408"), "{response}");
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_waiting_request_is_not() {
    let limits =
        NetLimits { idle_time: SHORT, header_time: SHORT, body_time: SHORT, write_time: SHORT, ..NetLimits::default() };
    let mut served = serve_limited(limits).await;
    let mut waiting = served.connect().await;
    waiting.write_all(get_request("/wait").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    // Idle later than the waiting request, and closed earlier: the wait was not cut off.
    let response = exchange(served.connect().await, get_request("/hello").as_bytes()).await;
    assert!(response.ends_with("hello"), "{response}");
    assert!(served.events.is_empty(), "the waiting request ended: {:?}", served.events.try_recv());
    served.shutdown.begin();
    assert!(read_until(&mut waiting, "stopping").await.contains("200 OK"));
}

#[tokio::test]
async fn only_a_client_that_does_not_read_its_response_is_closed() {
    let served = serve_limited(NetLimits { write_time: SHORT, ..NetLimits::default() }).await;
    let mut reading = served.connect().await;
    let mut unread = served.connect().await;
    for stream in [&mut reading, &mut unread] {
        stream.write_all(get_request("/endless").as_bytes()).await.unwrap();
    }
    let read_on = async {
        let mut bytes = vec![0; 65_536];
        loop {
            let length = reading.read(&mut bytes).await.unwrap();
            assert!(length > 0, "a client that reads was closed");
            tokio::time::sleep(SHORT / 20).await;
        }
    };
    let closed = soon("the client that does not read to be closed", unread.ready(tokio::io::Interest::ERROR));
    tokio::select! { ready = closed => assert!(ready.unwrap().is_error()), () = read_on => unreachable!() }
}

#[tokio::test]
async fn a_connection_over_the_limit_gets_503_and_is_accepted_when_there_is_room() {
    let served = serve_limited(NetLimits { connections: 2, ..NetLimits::default() }).await;
    let mut first = served.connect().await;
    let mut second = served.connect().await;
    for stream in [&mut first, &mut second] {
        stream.write_all(get_request("/hello").as_bytes()).await.unwrap();
        read_until(stream, "hello").await;
    }
    let response = exchange(served.connect().await, get_request("/hello").as_bytes()).await;
    assert!(status(&response).starts_with("503") && response.contains("too many connections"), "{response}");
    drop(first);
    let let_in = async {
        while !exchange(served.connect().await, last_request("/hello").as_bytes()).await.ends_with("hello") {}
    };
    soon("a connection to become free", let_in).await;
}

#[tokio::test]
async fn one_network_address_cannot_use_all_connections() {
    let Some(own) = network_address() else {
        skipped("connections per address", "this machine has no address beside loopback");
        return;
    };
    let place = TcpBind { host: own.to_string(), port: 0 };
    let limits = NetLimits { connections_per_address: 1, ..NetLimits::default() };
    let served = serve(ListenSpec { tcp: vec![place, localhost()], limits, ..ListenSpec::default() }).await;
    let mut first = served.connect().await;
    first.write_all(get_request("/who").as_bytes()).await.unwrap();
    read_until(&mut first, "uid None").await;
    let response = exchange(served.connect().await, get_request("/hello").as_bytes()).await;
    assert!(status(&response).starts_with("503") && response.contains("from your address"), "{response}");
    for _ in 0..2 {
        let local = tokio::net::TcpStream::connect(served.addresses[1]).await.unwrap();
        let response = exchange(local, last_request("/hello").as_bytes()).await;
        assert!(response.ends_with("hello"), "loopback is not counted: {response}");
    }
}

/// Returns the address that this machine would use to reach the network. Sends no data.
fn network_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback()).then_some(ip)
}
