//! A pulled cable: packets vanish without an error. Runs on a network namespace if this machine allows one.

use std::path::Path;
use std::process::Command;

use gpupool_client::Client;
use gpupool_testkit::{TestAgent, skipped};

use crate::common::{Fleet, quick_polling, request_whole_gpu, start_client, wait_for_health};

/// Network namespace with one link to this one; removed on drop.
struct TestNetwork {
    name: String,
    cable: String,
    /// Addresses of both ends.
    here: String,
    there: String,
}

impl TestNetwork {
    fn create() -> Result<Self, String> {
        // Names contain the process id, so that concurrent test runs do not collide.
        let id = std::process::id();
        let (high, low) = (id / 64 % 256, id % 64 * 4);
        let network = Self {
            name: format!("gpupool-{id}"),
            cable: format!("gp{id}"),
            here: format!("10.213.{high}.{}", low + 1),
            there: format!("10.213.{high}.{}", low + 2),
        };
        let Self { name, cable, here, there } = &network;
        run_ip(&format!("netns add {name}"))?;
        run_ip(&format!("link add {cable} type veth peer name inside netns {name}"))?;
        run_ip(&format!("addr add {here}/30 dev {cable}"))?;
        run_ip(&format!("link set {cable} up"))?;
        run_ip(&format!("-n {name} addr add {there}/30 dev inside"))?;
        run_ip(&format!("-n {name} link set inside up"))?;
        run_ip(&format!("-n {name} link set lo up"))?;
        Ok(network)
    }

    /// Prepares the program inside the namespace.
    fn program(&self, folder: &Path) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("gpupool");
        let binary = env!("CARGO_BIN_EXE_gpupool");
        std::fs::write(&path, format!("#!/bin/sh\nexec ip netns exec {} {binary} \"$@\"\n", self.name)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn disconnect(&self) {
        run_ip(&format!("-n {} link set inside down", self.name)).unwrap();
    }

    fn reconnect(&self) {
        run_ip(&format!("-n {} link set inside up", self.name)).unwrap();
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        let _ = run_ip(&format!("link del {}", self.cable));
        let _ = run_ip(&format!("netns del {}", self.name));
    }
}

fn run_ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let printed = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {printed}")) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pulled_cable_costs_only_the_gpus_behind_it() {
    let network = match TestNetwork::create() {
        Ok(network) => network,
        Err(why) => return skipped("a pulled cable", &why),
    };
    let folder = tempfile::tempdir().unwrap();
    let far = TestAgent::builder(network.program(folder.path())).simulate("4xH100");
    let far = far.variable("HOST", "0.0.0.0").argument("--open").argument("--access-log=false").start().await;
    let near = Fleet::start(&["1xH100"]).await;
    let endpoints = format!("http://{}:{},{}", network.there, far.port(), near.addresses());
    let client = start_client(quick_polling(Client::builder().endpoints(endpoints))).await;
    let lease = request_whole_gpu(&client).await;
    assert_eq!(lease.endpoint_id(), network.there, "the one with more room serves first");
    lease.release().await.unwrap();

    let held = request_whole_gpu(&client).await;
    network.disconnect();
    for _ in 0..3 {
        let lease = request_whole_gpu(&client).await;
        assert_eq!(lease.endpoint_id(), "127.0.0.1");
        lease.release().await.unwrap();
    }
    wait_for_health(&client, 0, false).await;
    network.reconnect();
    client.trigger_endpoint_recovery(&network.there).await.unwrap();
    wait_for_health(&client, 0, true).await;
    // The outage is shorter than the ttl, so the lease is still held and can be released.
    held.check_held().unwrap();
    held.release().await.unwrap();
    near.wait_until_empty().await;
    assert_eq!(far.client_unix().pool().await.unwrap().active, 0);
}
