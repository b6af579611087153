//! No file descriptors left. Alone in its file, because the limit is that of the whole process.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "net/support.rs"]
mod support;

use std::fs::File;

use gpupool_agent::internals::net::NetLimits;
use rustix::process::{Resource, getrlimit, setrlimit};
use support::*;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn without_free_files_the_listener_waits_and_then_continues() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(300);
    setrlimit(Resource::Nofile, limit).unwrap();
    let served = serve_limited(NetLimits::default()).await;
    let mut stream = served.connect().await;
    stream.write_all(get_request("/hello").as_bytes()).await.unwrap();
    read_until(&mut stream, "hello").await;
    let mut hoard: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(hoard.len() > 100, "only {} files", hoard.len());
    // This client takes the last free file, so the listener cannot accept it.
    hoard.pop();
    let mut waiting = served.connect().await;
    waiting.write_all(get_request("/hello").as_bytes()).await.unwrap();
    // The earlier connection is served meanwhile.
    stream.write_all(get_request("/hello").as_bytes()).await.unwrap();
    read_until(&mut stream, "hello").await;
    drop(hoard);
    read_until(&mut waiting, "hello").await;
    assert_eq!(served.stop().await.cut_off, 0);
}
