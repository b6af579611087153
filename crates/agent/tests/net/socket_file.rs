//! Rules for the file of the Unix socket.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::support::*;
use gpupool_agent::internals::net::{ListenSpec, NetError, NetListeners, UnixBind};

fn at(path: &Path) -> ListenSpec {
    ListenSpec { unix: Some(UnixBind::new(path)), ..ListenSpec::default() }
}

#[tokio::test]
async fn the_socket_has_the_given_mode_and_is_removed_at_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    for mode in [0o666, 0o600] {
        let unix = UnixBind { mode, ..UnixBind::new(&path) };
        let served = serve(ListenSpec { unix: Some(unix), ..ListenSpec::default() }).await;
        let file = std::fs::metadata(&path).unwrap();
        assert!(file.file_type().is_socket());
        assert_eq!(file.permissions().mode() & 0o777, mode);
        UnixStream::connect(&path).unwrap();
        served.stop().await;
        assert!(!path.exists(), "the file outlived its agent");
    }
}

#[tokio::test]
async fn the_socket_of_a_dead_agent_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "a closed socket leaves its file");
    let net = NetListeners::bind(at(&path)).await.unwrap();
    assert_eq!(net.unix_path(), Some(&*path));
    UnixStream::connect(&path).unwrap();
}

#[tokio::test]
async fn a_socket_in_use_and_other_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let live = dir.path().join("live.sock");
    let _listener = UnixListener::bind(&live).unwrap();
    let error = NetListeners::bind(at(&live)).await.unwrap_err();
    assert!(matches!(error, NetError::SocketInUse { .. }), "{error}");
    UnixStream::connect(&live).unwrap();

    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let error = NetListeners::bind(at(&file)).await.unwrap_err();
    assert!(matches!(error, NetError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[tokio::test]
async fn a_socket_that_replaced_ours_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let net = NetListeners::bind(at(&path)).await.unwrap();
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    let _another = UnixListener::bind(&path).unwrap();
    drop(net);
    UnixStream::connect(&path).unwrap();
}

#[tokio::test]
async fn a_path_that_is_too_long_or_has_no_directory_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = NetListeners::bind(at(&dir.path().join("x".repeat(120)))).await.unwrap_err().to_string();
    assert!(error.contains("at most 107"), "{error}");
    let error = NetListeners::bind(at(&dir.path().join("missing/agent.sock"))).await.unwrap_err().to_string();
    assert!(error.contains("missing/agent.sock"), "{error}");
}
