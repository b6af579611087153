//! One agent leases a card of the machine, also if several users run one.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseState;
use gpupool_testkit::{TestAgent, TestAgentBuilder};
use nvml_standin::machines::{mig_gpu, server_gpu};
use nvml_standin::{NvmlScenario, StandInDevice, install_library};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::http::RawEndpoint;
use crate::common::machine::{ALICE, BOB, accessible_directory, is_root};
use crate::common::{acquire, agent, eventually, skipped, whole_gpu};

/// A machine with GPUs behind a stand-in for NVML, on which agents of several users run.
struct SharedMachine {
    folder: TempDir,
}

impl SharedMachine {
    /// Creates a machine with a GPU in three MIG instances and an idle whole GPU. Only root can run agents of others.
    fn new(test: &str) -> Option<Self> {
        if !is_root() {
            skipped(test, "only root can run agents of other users");
            return None;
        }
        let folder = accessible_directory();
        // Every user may create the directory of claims, as in /dev/shm.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        let whole = StandInDevice { compute: Vec::new(), ..server_gpu(1) };
        let scenario =
            NvmlScenario { devices: vec![mig_gpu(), whole], driver: "570".into(), ..NvmlScenario::default() };
        install_library(folder.path(), &scenario, &[]).unwrap();
        Some(Self { folder })
    }

    fn claims(&self) -> PathBuf {
        self.folder.path().join("claims")
    }

    /// Returns an agent of a user, by uid, with the GPUs of this machine.
    fn agent_of(&self, uid: u32) -> TestAgentBuilder {
        let path = |name: &str| self.folder.path().join(name);
        let (command, state_dir) = (path(&format!("gpupool-{uid}")), path(&format!("state-{uid}")));
        let binary = env!("CARGO_BIN_EXE_gpupool");
        let script = format!("#!/bin/sh\nexec setpriv --reuid={uid} --regid={uid} --clear-groups '{binary}' \"$@\"\n");
        std::fs::write(&command, script).unwrap();
        std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
        if !state_dir.exists() {
            std::fs::create_dir(&state_dir).unwrap();
            std::os::unix::fs::chown(&state_dir, Some(uid), Some(uid)).unwrap();
        }
        let builder = TestAgent::builder(command).real_devices().state_dir(&state_dir);
        let builder = builder.variable("GPUPOOL_BACKEND", "nvml").variable("HOME", state_dir.display().to_string());
        let library = path("libnvidia-ml.so.1").display().to_string();
        builder.variable("GPUPOOL_NVML", library).variable("GPUPOOL_CLAIMS", self.claims().display().to_string())
    }
}

/// Returns the reasons that close the devices of an agent.
fn closures(agent: &TestAgent) -> Vec<Value> {
    let devices = RawEndpoint::unix(agent).get("/v1/devices").json();
    devices["devices"].as_array().unwrap().iter().map(|device| device["closed"].clone()).collect()
}

fn health_problems(agent: &TestAgent) -> String {
    RawEndpoint::unix(agent).get("/health").json()["problems"].to_string()
}

async fn until_closures(agent: &TestAgent, what: &str, expected: &Value) {
    let start = Instant::now();
    let are = async || (closures(agent) == vec![expected.clone(); 4]).then_some(());
    eventually(what, are).await;
    assert!(start.elapsed() < Duration::from_secs(30), "{what} after {:?}", start.elapsed());
}

fn file_names(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[tokio::test]
async fn two_users_never_lease_the_same_gpu_and_a_killed_agent_leaves_it_to_the_other() {
    let Some(machine) = SharedMachine::new("agents of two users") else { return };
    let alice = machine.agent_of(ALICE).start().await;
    until_closures(&alice, "alice's agent leases all", &Value::Null).await;
    let cards = [mig_gpu().pci, server_gpu(1).pci].map(|pci| pci.to_lowercase()[4..].to_owned());
    let mut cards = Vec::from(cards);
    cards.sort();
    assert_eq!(file_names(&machine.claims()), cards, "instances share the claim of their card");

    let bob = machine.agent_of(BOB).start().await;
    until_closures(&bob, "bob's agent leases none", &json!("claimed_elsewhere")).await;
    let endpoint = RawEndpoint::unix(&bob);
    let device = &endpoint.get("/v1/devices").json()["devices"][0];
    let holder = format!("leased by the agent of uid {ALICE} (pid {})", alice.pid());
    assert_eq!((&device["health"], &device["health_reason"]), (&json!("healthy"), &json!(holder)));
    let metrics = endpoint.get("/metrics").text();
    assert!(metrics.contains("reason=\"claimed_elsewhere\""), "{metrics}");
    assert_eq!(endpoint.get("/gpu/count").json()["gpu_count"], json!(5), "statistics show all devices");
    assert!(
        health_problems(&bob).contains(&format!("the agent of uid {ALICE} leases it")),
        "{}",
        health_problems(&bob)
    );
    assert_eq!(endpoint.post("/v1/leases", &json!({"queue": false})).code(), "no_capacity");
    let waits =
        bob.client_unix().request(&RequestBody { ttl_secs: Some(60.0), ..RequestBody::default() }).await.unwrap();
    assert_eq!(waits.state, LeaseState::Queued);
    acquire(&alice.client_unix(), &whole_gpu()).await;

    alice.kill9().await;
    until_closures(&bob, "bob's agent leases all", &Value::Null).await;
    let granted = async || {
        let lease = bob.client_unix().follow(waits.id, Duration::ZERO).await.unwrap();
        (lease.state == LeaseState::Active).then_some(())
    };
    eventually("the waiting request is granted", granted).await;
    eventually("nothing is wrong", async || (health_problems(&bob) == "[]").then_some(())).await;
}

#[tokio::test]
async fn the_system_agent_takes_the_gpus_over_from_a_user() {
    let Some(machine) = SharedMachine::new("the system agent beside another") else { return };
    let alice = machine.agent_of(ALICE).start().await;
    until_closures(&alice, "alice's agent leases all", &Value::Null).await;
    let mut system = machine.agent_of(0).start().await;
    let rival = format!("the agent of uid {ALICE} claims it, too");
    // Alice's agent may yield before the problem is read, but the log keeps it.
    eventually("the rival is found", async || system.log().contains(&format!("uid {ALICE}")).then_some(())).await;
    until_closures(&system, "the system agent leases all", &Value::Null).await;
    acquire(&system.client_unix(), &whole_gpu()).await;
    until_closures(&alice, "alice's agent yields", &json!("claimed_elsewhere")).await;
    eventually("alice's agent names it", async || health_problems(&alice).contains("the agent of uid 0").then_some(()))
        .await;
    let no_rival = async || (!health_problems(&system).contains(&rival)).then_some(());
    eventually("the rival has yielded", no_rival).await;

    system.restart().await;
    until_closures(&system, "the system agent leases all again", &Value::Null).await;
    assert_eq!(
        closures(&alice),
        vec![json!("claimed_elsewhere"); 4],
        "a restart of the system agent gives nothing away"
    );
    system.kill9().await;
    until_closures(&alice, "alice's agent leases all again", &Value::Null).await;
}

#[tokio::test]
async fn a_user_who_never_yields_is_reported_and_does_not_stop_the_system_agent() {
    let Some(machine) = SharedMachine::new("a rival that stays") else { return };
    let alice = machine.agent_of(ALICE).start().await;
    until_closures(&alice, "alice's agent leases all", &Value::Null).await;
    alice.pause();
    let system = machine.agent_of(0).start().await;
    until_closures(&system, "the system agent leases all", &Value::Null).await;
    let problem = format!("the agent of uid {ALICE} claims it, too; this agent leases it");
    eventually("the rival is reported", async || health_problems(&system).contains(&problem).then_some(())).await;
    assert!(!health_problems(&system).contains(&alice.pid().to_string()), "everyone may read /health");
    acquire(&system.client_unix(), &whole_gpu()).await;
    alice.resume();
    until_closures(&alice, "alice's agent yields", &json!("claimed_elsewhere")).await;
}

#[tokio::test]
async fn simulated_gpus_are_not_claimed() {
    let folder = accessible_directory();
    let claims = folder.path().join("claims");
    let builder = || agent().simulate("2xH100").variable("GPUPOOL_CLAIMS", claims.display().to_string());
    let (first, second) = (builder().start().await, builder().start().await);
    for agent in [&first, &second] {
        assert_eq!(closures(agent), [Value::Null, Value::Null]);
    }
    assert!(!claims.exists());
}
