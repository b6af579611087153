//! The effect of a shutdown on requests and connections.

use std::time::Duration;

use crate::support::*;
use gpupool_agent::internals::net::NetLimits;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

#[tokio::test]
async fn shutdown_answers_waiting_requests_closes_idle_connections_and_accepts_no_more() {
    let mut served = serve_limited(NetLimits::default()).await;
    let mut silent = served.connect().await;
    let mut idle = served.connect().await;
    idle.write_all(get_request("/hello").as_bytes()).await.unwrap();
    read_until(&mut idle, "hello").await;
    let mut waiting = served.connect().await;
    waiting.write_all(get_request("/wait").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    let address = served.address();
    assert_eq!(served.stop().await.cut_off, 0);
    assert!(read_to_end(&mut waiting).await.ends_with("stopping"));
    assert_eq!(read_to_end(&mut idle).await, "");
    assert_eq!(read_to_end(&mut silent).await, "");
    assert!(TcpStream::connect(address).await.is_err(), "still listening");
}

#[tokio::test]
async fn a_request_that_does_not_finish_in_the_grace_is_cut_off_and_counted() {
    let mut served =
        serve_limited(NetLimits { shutdown_grace: Duration::from_millis(50), ..NetLimits::default() }).await;
    let mut stream = served.connect().await;
    stream.write_all(get_request("/stubborn").as_bytes()).await.unwrap();
    assert_eq!(served.event().await, HandlerEvent::Waiting);
    served.shutdown.begin();
    assert_eq!(served.event().await, HandlerEvent::WaitEnded);
    assert_eq!(served.stop().await.cut_off, 1);
    assert_eq!(read_to_end(&mut stream).await, "");
}
