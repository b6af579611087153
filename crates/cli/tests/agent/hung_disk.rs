//! A hung disk stops leases and nothing else.
//!
//! The agent stores its state on a separate ext4 file system in a separate mount namespace, which is frozen while it runs. A
//! guard process thaws it even if the test is killed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use gpupool_testkit::{TestAgent, within_deadline};
use serde_json::Value;

use crate::common::http::RawEndpoint;
use crate::common::{acquire, eventually, skipped, whole_gpu};

const BINARY: &str = env!("CARGO_BIN_EXE_gpupool");

/// The size of the file system. The store with its log and its ballast takes 6 MiB.
const DISK_BYTES: u64 = 64 << 20;

/// A file system in a file, and the folder at which the agent mounts it.
struct DiskImage {
    folder: tempfile::TempDir,
}

impl DiskImage {
    /// Creates the file system; `None` if this machine cannot.
    fn new() -> Option<Self> {
        let disk = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(disk.state()).unwrap();
        std::fs::File::create(disk.image()).unwrap().set_len(DISK_BYTES).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(disk.image()).output();
        let mounted = made.and_then(|made| {
            let mut mount = Command::new("unshare");
            mount.args(["--mount", "mount", "-o", "loop"]).arg(disk.image()).arg(disk.state());
            if made.status.success() { mount.output() } else { Ok(made) }
        });
        match mounted {
            Ok(mounted) if mounted.status.success() => Some(disk),
            failed => {
                let error = failed.map(|failed| String::from_utf8_lossy(&failed.stderr).trim().to_owned());
                skipped("a hung disk", &error.unwrap_or_else(|error| error.to_string()).replace('\n', " "));
                None
            }
        }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Writes a program that mounts the disk for itself and becomes the agent.
    fn write_agent_script(&self) -> PathBuf {
        let path = self.folder.path().join("gpupool-on-disk");
        let (image, state) = (self.image(), self.state());
        let script = format!(
            "#!/bin/sh\nexec unshare --mount sh -c 'mount -o loop \"{}\" \"{}\" && exec \"$@\"' sh \"{BINARY}\" \"$@\"\n",
            image.display(),
            state.display(),
        );
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

/// A frozen file system, thawed when this is dropped.
struct FrozenDisk {
    pid: u32,
    state: PathBuf,
    guard: Child,
}

impl FrozenDisk {
    fn new(agent: &TestAgent, state: &Path) -> Self {
        let guard = in_mount_namespace(agent.pid())
            .args(["sh", "-c", "sleep 60; fsfreeze --unfreeze \"$0\""])
            .arg(state)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let frozen = Self { pid: agent.pid(), state: state.to_owned(), guard };
        let done = frozen.fsfreeze("--freeze");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        frozen
    }

    fn fsfreeze(&self, how: &str) -> Output {
        in_mount_namespace(self.pid).args(["fsfreeze", how]).arg(&self.state).output().unwrap()
    }
}

impl Drop for FrozenDisk {
    fn drop(&mut self) {
        self.fsfreeze("--unfreeze");
        let _ = self.guard.kill();
        let _ = self.guard.wait();
    }
}

/// Returns a command in the mount namespace of a process.
fn in_mount_namespace(pid: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &pid.to_string(), "--mount"]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_and_health_continue_while_the_disk_hangs() {
    let Some(disk) = DiskImage::new() else { return };
    let agent = TestAgent::builder(disk.write_agent_script()).simulate("2xH100").state_dir(disk.state()).start().await;
    let client = agent.client();
    let (held, _token) = acquire(&client, &whole_gpu()).await;
    let endpoint = RawEndpoint::tcp(&agent);
    let frozen = FrozenDisk::new(&agent, &disk.state());
    let asking = tokio::spawn({
        let client = agent.client();
        async move { client.request(&whole_gpu()).await }
    });

    let health = async || {
        let response = endpoint.get("/health");
        let (status, body) = (response.status, response.json());
        (status == 200 && body["status"] == "degraded" && body["store"] == "unknown").then_some(body)
    };
    let health = eventually("/health to report the hung disk", health).await;
    assert!(health["problems"].to_string().contains("may be waiting for its disk"), "{health}");
    assert!(health["pool_age_secs"].as_f64().unwrap() > 1.0, "{health}");

    let read_at = endpoint.get("/gpu/stats").json()["timestamp"].clone();
    let read_again = async || {
        let stats = endpoint.get("/gpu/stats").json();
        (stats["timestamp"] != read_at && stats["stale"] == false).then_some(())
    };
    eventually("GPUs to be read", read_again).await;

    let pool = endpoint.get("/v1/pool").json();
    assert!(pool["age_secs"].as_f64().unwrap() > 1.0 && pool["active"] == 1, "{pool}");
    let devices = endpoint.get("/v1/devices").json();
    let holders =
        |device: &Value| device["leases"].as_array().unwrap().iter().map(|lease| lease["id"].clone()).collect();
    let on_devices: Vec<Vec<Value>> = devices["devices"].as_array().unwrap().iter().map(holders).collect();
    assert_eq!(on_devices.concat(), [Value::from(held.id)], "{devices}");
    assert!(devices["age_secs"].as_f64().unwrap() > 1.0);
    let metrics = endpoint.get("/metrics");
    assert!(metrics.text().contains("gpupool_leases{state=\"active\"} 1"), "{}", metrics.text());
    let age = metrics.text().lines().find_map(|line| line.strip_prefix("gpupool_snapshot_age_seconds ")?.parse().ok());
    assert!(age > Some(1.0), "{age:?}");
    let list = endpoint.get("/v1/leases");
    assert_eq!((list.status, list.code().as_str()), (503, "busy"));
    assert!(!asking.is_finished(), "a lease was granted without a commit");

    drop(frozen);
    let lease = within_deadline("the request that waited for the disk", asking).await.unwrap().unwrap();
    assert_eq!(lease.devices.len(), 1);
    let recovered = async || (endpoint.get("/health").json()["status"] == "healthy").then_some(());
    eventually("/health to recover", recovered).await;
}
