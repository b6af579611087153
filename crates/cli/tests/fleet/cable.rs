//! A cable that is pulled: packets vanish, nobody says so. On a network of its own, where this machine lets us make one.

use std::path::Path;
use std::process::Command;

use gpupool_client::Client;
use gpupool_testkit::{TestAgent, skipped};

use crate::common::{Fleet, is_healthy, quick, started, whole};

/// A network namespace with one cable to this one; gone when dropped.
struct Network {
    name: String,
    cable: String,
    /// Addresses of this end and of the other.
    here: String,
    there: String,
}

impl Network {
    fn make() -> Result<Self, String> {
        // Numbers of this process, so that two runs of the tests are in nobody's way.
        let id = std::process::id();
        let (high, low) = (id / 64 % 256, id % 64 * 4);
        let network = Self {
            name: format!("gpupool-{id}"),
            cable: format!("gp{id}"),
            here: format!("10.213.{high}.{}", low + 1),
            there: format!("10.213.{high}.{}", low + 2),
        };
        let Self { name, cable, here, there } = &network;
        ip(&format!("netns add {name}"))?;
        ip(&format!("link add {cable} type veth peer name inside netns {name}"))?;
        ip(&format!("addr add {here}/30 dev {cable}"))?;
        ip(&format!("link set {cable} up"))?;
        ip(&format!("-n {name} addr add {there}/30 dev inside"))?;
        ip(&format!("-n {name} link set inside up"))?;
        ip(&format!("-n {name} link set lo up"))?;
        Ok(network)
    }

    /// The program, run in there.
    fn program(&self, folder: &Path) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("gpupool");
        let binary = env!("CARGO_BIN_EXE_gpupool");
        std::fs::write(&path, format!("#!/bin/sh\nexec ip netns exec {} {binary} \"$@\"\n", self.name)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn pull(&self) {
        ip(&format!("-n {} link set inside down", self.name)).unwrap();
    }

    fn plug_in(&self) {
        ip(&format!("-n {} link set inside up", self.name)).unwrap();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {}", self.cable));
        let _ = ip(&format!("netns del {}", self.name));
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {said}")) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pulled_cable_costs_nothing_but_the_gpus_behind_it() {
    let network = match Network::make() {
        Ok(network) => network,
        Err(why) => return skipped("a pulled cable", &why),
    };
    let folder = tempfile::tempdir().unwrap();
    let far = TestAgent::builder(network.program(folder.path())).simulate("4xH100");
    let far = far.variable("HOST", "0.0.0.0").argument("--open").argument("--access-log=false").start().await;
    let near = Fleet::of(&["1xH100"]).await;
    let endpoints = format!("http://{}:{},{}", network.there, far.port(), near.addresses());
    let client = started(quick(Client::builder().endpoints(endpoints))).await;
    let lease = whole(&client).await;
    assert_eq!(lease.endpoint_id(), network.there, "the one with more room serves first");
    lease.release().await.unwrap();

    let held = whole(&client).await;
    network.pull();
    for _ in 0..3 {
        let lease = whole(&client).await;
        assert_eq!(lease.endpoint_id(), "127.0.0.1");
        lease.release().await.unwrap();
    }
    is_healthy(&client, 0, false).await;
    network.plug_in();
    client.trigger_endpoint_recovery(&network.there).await.unwrap();
    is_healthy(&client, 0, true).await;
    // Away for less than its ttl: it is still held, and goes back.
    held.check_held().unwrap();
    held.release().await.unwrap();
    near.is_left_empty().await;
    assert_eq!(far.client_unix().pool().await.unwrap().active, 0);
}
