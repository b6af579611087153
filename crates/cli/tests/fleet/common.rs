//! What the stories share.

use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Client, ClientBuilder, HeldLease, LeaseQuery};
use gpupool_testkit::{
    ClientObservations, FaultProxy, ProxyMode, TestAgent, TestAgentBuilder, TrailAudit, eventually, within_deadline,
};

/// Agents, each behind a path of its own.
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
    /// One agent for each of these, such as `4xH100`.
    pub async fn of(devices: &[&str]) -> Self {
        let (mut agents, mut paths) = (Vec::new(), Vec::new());
        for devices in devices {
            let agent = agent(devices).start().await;
            paths.push(FaultProxy::start(agent.port()).await);
            agents.push(agent);
        }
        Self { agents, paths }
    }

    /// The addresses of all paths, with commas between.
    pub fn addresses(&self) -> String {
        self.paths.iter().map(FaultProxy::address).collect::<Vec<_>>().join(",")
    }

    /// A client of all of them, that looks often.
    pub fn builder(&self) -> ClientBuilder {
        quick(Client::builder().endpoints(self.addresses()))
    }

    pub async fn client(&self) -> Client {
        started(self.builder()).await
    }

    pub fn set(&self, number: usize, path: ProxyMode) {
        self.paths[number].set_mode(path);
    }

    /// Takes every GPU of every agent, past the client that is tried.
    pub async fn fill(&self) -> Vec<Vec<u64>> {
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

    /// How many requests wait at an agent.
    pub async fn waiting_at(&self, number: usize) -> usize {
        self.agents[number].client().pool().await.unwrap().waiting
    }

    /// Nothing is held or waits anywhere, as soon as what was dropped has been given back.
    pub async fn is_left_empty(&self) {
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

    /// No agent ever did what it must not.
    pub async fn is_clean(&self) {
        for agent in &self.agents {
            TrailAudit::collect(&agent.client()).await.unwrap().assert_clean(&ClientObservations::default());
        }
    }
}

/// Looks often, so that stories are short.
pub fn quick(builder: ClientBuilder) -> ClientBuilder {
    builder.polling_interval(Duration::from_millis(200)).endpoint_timeout(Duration::from_secs(2))
}

pub async fn started(builder: ClientBuilder) -> Client {
    let client = builder.build().unwrap();
    within_deadline("the client to start", client.start()).await.unwrap();
    client
}

pub async fn whole(client: &Client) -> HeldLease {
    within_deadline("a GPU", client.request(RequestBody::default())).await.unwrap()
}

/// Waits until an endpoint can be asked, or cannot.
pub async fn is_healthy(client: &Client, number: usize, expected: bool) {
    let what = format!("endpoint {number} to be {}", if expected { "healthy" } else { "left alone" });
    eventually(&what, async || {
        let is_healthy = client.endpoints_info().unwrap()[number].is_healthy;
        (is_healthy == expected).then_some(())
    })
    .await;
}
