//! Helpers of all fleet tests.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientBuilder, HeldLease, LeaseQuery};
use gpupool_testkit::{
    ClientObservations, FaultProxy, ProxyMode, TestAgent, TestAgentBuilder, TrailAudit, eventually, within_deadline,
};

/// Agents, each behind its own proxy.
pub struct Fleet {
    pub agents: Vec<TestAgent>,
    pub paths: Vec<FaultProxy>,
}

pub fn agent(devices: &str) -> TestAgentBuilder {
    let quiet =
        TestAgent::builder(env!("CARGO_BIN_EXE_gpupool")).argument("--access-log=false").argument("--log-level=warn");
    quiet.simulate(devices)
}

impl Fleet {
    /// Starts one agent per device list, such as `4xH100`.
    pub async fn start(devices: &[&str]) -> Self {
        let (mut agents, mut paths) = (Vec::new(), Vec::new());
        for devices in devices {
            let agent = agent(devices).start().await;
            paths.push(FaultProxy::start(agent.port()).await);
            agents.push(agent);
        }
        Self { agents, paths }
    }

    /// Returns the addresses of all proxies, separated by commas.
    pub fn addresses(&self) -> String {
        self.paths.iter().map(FaultProxy::address).collect::<Vec<_>>().join(",")
    }

    /// Prepares a client of all agents with short polling intervals.
    pub fn builder(&self) -> ClientBuilder {
        quick_polling(Client::builder().endpoints(self.addresses()))
    }

    pub async fn client(&self) -> Client {
        start_client(self.builder()).await
    }

    pub fn set_proxy_mode(&self, number: usize, path: ProxyMode) {
        self.paths[number].set_mode(path);
    }

    /// Leases every GPU of every agent without the tested client.
    pub async fn lease_all_gpus(&self) -> Vec<Vec<u64>> {
        let mut held = Vec::new();
        for agent in &self.agents {
            let client = agent.client();
            let mut here = Vec::new();
            let body = RequestBody { queue: Some(false), ttl_secs: Some(600.0), ..RequestBody::default() };
            while let Ok(lease) = client.request(&body).await {
                here.push(lease.id);
            }
            held.push(here);
        }
        held
    }

    /// Returns the number of waiting requests of an agent.
    pub async fn waiting_at(&self, number: usize) -> usize {
        self.agents[number].client().pool().await.unwrap().waiting
    }

    /// Waits until no lease is active or queued anywhere.
    pub async fn wait_until_empty(&self) {
        for agent in &self.agents {
            let client = agent.client();
            let live = LeaseQuery::default();
            eventually("everything to be given back", async || {
                let leases = client.leases(&live).await.ok()?.leases;
                leases.is_empty().then_some(())
            })
            .await;
        }
    }

    /// Checks the audit trail of every agent.
    pub async fn check_audit(&self) {
        for agent in &self.agents {
            TrailAudit::collect(&agent.client()).await.unwrap().assert_clean(&ClientObservations::default());
        }
    }
}

/// Shortens polling intervals to make tests fast.
pub fn quick_polling(builder: ClientBuilder) -> ClientBuilder {
    builder.polling_interval(Duration::from_millis(200)).endpoint_timeout(Duration::from_secs(2))
}

pub async fn start_client(builder: ClientBuilder) -> Client {
    let client = builder.build().unwrap();
    within_deadline("the client to start", client.start()).await.unwrap();
    client
}

pub async fn request_whole_gpu(client: &Client) -> HeldLease {
    within_deadline("a GPU", client.request(RequestBody::default())).await.unwrap()
}

/// Waits until an endpoint is healthy or unhealthy.
pub async fn wait_for_health(client: &Client, number: usize, expected: bool) {
    let what = format!("endpoint {number} to be {}", if expected { "healthy" } else { "left alone" });
    eventually(&what, async || {
        let is_healthy = client.endpoints_info().unwrap()[number].is_healthy;
        (is_healthy == expected).then_some(())
    })
    .await;
}
