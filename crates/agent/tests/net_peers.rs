//! The identity of peers: real processes, of other users if the test may start them.
//!
//! A program of its own: a child that is being started holds the sockets of every listener until it is another program.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../tests/skipped.rs"]
mod skipped;
#[path = "net/support.rs"]
mod support;

use std::convert::Infallible;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bytes::Bytes;
use gpupool_agent::internals::net::{
    IncomingBody, ListenSpec, NetListeners, Peer, PeerProcessError, PeerTransport, Shutdown, TcpBind, UnixBind,
};
use http::{Request, Response};
use http_body_util::Full;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use skipped::skipped;
use support::*;
use tokio::sync::mpsc;

/// A uid that no machine uses.
const UNUSED_UID: u32 = 54_321;
const CLIENT_OF: &str = "GPUPOOL_TEST_CLIENT_OF";

/// Not a test of its own: the client that the tests below start as another process.
#[test]
fn client_process() {
    let Ok(target) = std::env::var(CLIENT_OF) else { return };
    let (mut read, mut write): (Box<dyn Read>, Box<dyn Write>) = match target.parse::<std::net::SocketAddr>() {
        Ok(address) => {
            let stream = std::net::TcpStream::connect(address).unwrap();
            (Box::new(stream.try_clone().unwrap()), Box::new(stream))
        }
        Err(_) => {
            let stream = UnixStream::connect(target).unwrap();
            (Box::new(stream.try_clone().unwrap()), Box::new(stream))
        }
    };
    write.write_all(last_request("/who").as_bytes()).unwrap();
    let mut response = String::new();
    read.read_to_string(&mut response).unwrap();
    println!("\n{response}");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn start_client(target: &str, uid: u32) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["client_process", "--exact", "--nocapture"]).env(CLIENT_OF, target);
    if uid != my_uid() {
        command.uid(uid);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

async fn response_to_client(target: &str, uid: u32) -> (u32, String) {
    let client = start_client(target, uid);
    let pid = client.id();
    let output = tokio::task::spawn_blocking(|| client.wait_with_output());
    let output = soon("the client process to end", output).await.unwrap().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let response = printed.lines().find(|line| line.starts_with("uid ")).unwrap_or_else(|| panic!("{printed}"));
    (pid, response.to_owned())
}

fn my_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// This user, and another one if that is allowed.
fn users() -> Vec<u32> {
    if my_uid() == 0 {
        return vec![0, UNUSED_UID];
    }
    skipped("a client of another user", "only root may start a process of another user");
    vec![my_uid()]
}

fn open_to_all(dir: &Path) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
}

#[tokio::test]
async fn a_loopback_client_is_identified_by_its_user() {
    for host in ["127.0.0.1", "::1", "::"] {
        let bind = TcpBind { host: host.to_owned(), port: 0 };
        let Ok(net) = NetListeners::bind(ListenSpec { tcp: vec![bind.clone()], ..ListenSpec::default() }).await else {
            skipped(&format!("a client at {host}"), "this machine has no such address");
            continue;
        };
        drop(net);
        let served = serve(ListenSpec { tcp: vec![bind], ..ListenSpec::default() }).await;
        let target = served.address().to_string().replace("[::]", "127.0.0.1");
        for uid in users() {
            let (_, response) = response_to_client(&target, uid).await;
            let expected = format!("uid Some({uid}) credentials None process Err(NotUnix)");
            assert_eq!(response, expected, "listening on {host}");
        }
    }
}

#[tokio::test]
async fn a_unix_client_is_identified_by_user_and_process() {
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let path = dir.path().join("agent.sock");
    let _served = serve(ListenSpec { unix: Some(UnixBind::new(&path)), ..ListenSpec::default() }).await;
    for uid in users() {
        let (pid, response) = response_to_client(path.to_str().unwrap(), uid).await;
        assert!(
            response.starts_with(&format!("uid Some({uid}) credentials Some(PeerCredentials {{ pid: Some({pid})")),
            "{response}"
        );
        assert!(response.contains(&format!("process Ok(({pid}, ")), "{response}");
    }
}

#[tokio::test]
async fn the_handle_of_a_unix_client_shows_when_its_process_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let (sender, mut peers) = mpsc::unbounded_channel::<Peer>();
    let service = tower::service_fn(move |request: Request<IncomingBody>| {
        sender.send(request.extensions().get::<Peer>().cloned().unwrap()).unwrap();
        std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let net =
        NetListeners::bind(ListenSpec { unix: Some(UnixBind::new(&path)), ..ListenSpec::default() }).await.unwrap();
    let shutdown = Shutdown::new();
    let served = tokio::spawn(net.serve(service, shutdown.clone()));

    let mut client = start_client(path.to_str().unwrap(), my_uid());
    let peer = soon("the client's request", peers.recv()).await.unwrap();
    assert_eq!(peer.transport(), PeerTransport::Unix);
    let process = peer.process().unwrap();
    assert_eq!(process.pid, client.id());
    let ended = |wait: i64| {
        let mut ask = [PollFd::new(&process.pidfd, PollFlags::IN)];
        poll(&mut ask, Some(&Timespec { tv_sec: wait, tv_nsec: 0 })).unwrap() == 1
    };
    assert!(!ended(0), "the process is alive");
    client.kill().unwrap();
    client.wait().unwrap();
    assert!(ended(PATIENCE.as_secs().cast_signed()), "the process was killed");
    assert!(matches!(peer.process(), Err(PeerProcessError::Gone)), "{:?}", peer.process());
    shutdown.begin();
    soon("the listeners to end", served).await.unwrap();
}
