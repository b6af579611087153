//! Many clients compete for few devices while the agent and clients are killed at random. Afterwards the audit trail must
//! agree with every response that a client received.
//!
//! `GPUPOOL_CHAOS_CLIENTS`, `GPUPOOL_CHAOS_SECS` and `GPUPOOL_CHAOS_SEED` set the size, the duration and the seed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_client::{AgentClient, ClientError, IdempotencyKey, LeaseQuery};
use gpupool_testkit::{ChaosRun, ClientObservations, SeededRng, TestAgent, TrailAudit};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use crate::common::child::ClientProcess;
use crate::common::{agent, eventually, http};

/// One of this many clients is a separate process.
const CLIENTS_PER_PROCESS: u64 = 12;

#[tokio::test(flavor = "multi_thread")]
async fn no_kill_overcommits_a_device_or_loses_or_revives_a_lease() {
    let chaos = ChaosRun::new("agent", 60, 6);
    let ChaosRun { clients, secs, seed, .. } = chaos;
    let mut chance = SeededRng::new(seed);
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gpupool.toml");
    std::fs::write(&config, "[leases]\nhold_grace_secs = 1\n").unwrap();
    let builder = agent().simulate("16xH100").argument("--access-log=false").argument("--log-level=warn");
    let mut agent = builder.argument("--config").argument(&config).start().await;

    let seen = Arc::new(Mutex::new(ClientObservations::default()));
    let until = Instant::now() + Duration::from_secs(secs);
    let mut running = tokio::task::JoinSet::new();
    for number in 0..clients {
        let mut chance = chance.fork();
        if number % CLIENTS_PER_PROCESS == 0 {
            let (socket, seen) = (agent.socket().to_owned(), seen.clone());
            running.spawn_blocking(move || {
                while Instant::now() < until {
                    let mut process = ClientProcess::start(&socket);
                    let Some(lease) = process.wait_for_lease() else { continue };
                    seen.lock().unwrap().granted.push(lease);
                    std::thread::sleep(Duration::from_millis(chance.below(400)));
                    process.kill();
                }
            });
            continue;
        }
        let client = if chance.percent_chance(50) { agent.client() } else { agent.client_unix() };
        let address = ([127, 0, 0, 1], agent.port()).into();
        let chaos_client = ChaosClient { number, address, client, seen: seen.clone(), chance };
        running.spawn(chaos_client.run(until));
    }
    let kills = kill_at_random(&mut agent, &mut chance, until).await;
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    assert!(kills > 0, "the agent was never killed: GPUPOOL_CHAOS_SECS is too short");

    let client = agent.client_unix();
    eventually("all leases to end", async || {
        let live = client.leases(&LeaseQuery::default()).await.ok()?;
        live.leases.is_empty().then_some(())
    })
    .await;
    let devices = client.devices().await.unwrap().devices;
    let promised: f64 = devices.iter().map(|device| device.promised).sum();
    assert!(promised == 0.0, "{promised} devices are still promised: {devices:#?}");
    let audit = TrailAudit::collect(&client).await.unwrap();
    let seen = seen.lock().unwrap();
    audit.assert_clean(&seen);
    assert!(audit.records.len() as u64 > clients / 2, "only {} records were made", audit.records.len());
    assert!(!seen.granted.is_empty() && !seen.released.is_empty(), "no lease was granted or released");
    assert!(!agent.log().contains("panicked"), "{}", agent.log());
    eprintln!("{kills} kills, {} grants seen, {} records, seed {seed}", seen.granted.len(), audit.records.len());
}

async fn kill_at_random(agent: &mut TestAgent, chance: &mut SeededRng, until: Instant) -> u32 {
    let mut kills = 0;
    loop {
        // Each start of the agent gives every lease a full ttl: without longer pauses unused leases would stay, and no other
        // client would be served.
        let pause = Duration::from_millis(if chance.percent_chance(20) { 4_000 } else { 300 + chance.below(1_200) });
        if Instant::now() + pause > until {
            return kills;
        }
        tokio::time::sleep(pause).await;
        agent.restart().await;
        kills += 1;
    }
}

/// A client that sends one request after the other and tries every operation on its leases.
struct ChaosClient {
    number: u64,
    address: std::net::SocketAddr,
    client: AgentClient,
    seen: Arc<Mutex<ClientObservations>>,
    chance: SeededRng,
}

impl ChaosClient {
    async fn run(mut self, until: Instant) {
        let mut turn = 0_u64;
        while Instant::now() < until {
            turn += 1;
            let key = format!("client-{}-turn-{turn}", self.number);
            let body = self.random_body();
            if self.chance.percent_chance(15) {
                self.request_and_hang_up(&body, &key).await;
            }
            let Some(lease) = self.request(&body, &key, until).await else { continue };
            if self.chance.percent_chance(20) {
                // A retry must return the same lease.
                self.request(&body, &key, until).await;
            }
            match (lease.state, lease.token) {
                (LeaseState::Active, Some(token)) => self.use_lease(lease.id, token).await,
                (LeaseState::Queued, _) if self.chance.percent_chance(50) => self.wait_and_use(lease.id).await,
                (LeaseState::Queued | LeaseState::Offered, _) if self.chance.percent_chance(70) => {
                    self.release(lease.id).await
                }
                // The client abandons the request.
                _ => {}
            }
        }
    }

    fn random_body(&mut self) -> RequestBody {
        let chance = &mut self.chance;
        let mut body = RequestBody {
            owner: Some(format!("user-{}", self.number % 7).into()),
            worker_id: Some(format!("client-{}", self.number).into()),
            ttl_secs: Some(*chance.pick(&[1.0, 1.5, 2.0, 3.0])),
            priority: Some(*chance.pick(&[-1, 0, 0, 0, 1])),
            queue: Some(chance.percent_chance(70)),
            wait_secs: Some(*chance.pick(&[0.0, 0.2, 0.5, 1.0])),
            // Each start of the agent gives every waiter its full wait limit.
            wait_limit_secs: Some(*chance.pick(&[0.5, 1.0, 3.0])),
            hedged: chance.percent_chance(4),
            ..RequestBody::default()
        };
        match chance.below(10) {
            0..=4 => body.fraction = Some((100 + chance.below(800)) as f64 / 1000.0),
            5 => body.memory_mib = Some(1 + chance.below(80_000)),
            6 => {
                body.fraction = Some(*chance.pick(&[0.1, 0.25, 0.5]));
                body.memory_mib = Some(1 + chance.below(40_000));
            }
            7 => body.gpus = Some(1 + chance.below(4) as u16),
            8 => {
                body.gpus = Some(2);
                body.fraction = Some(0.3);
            }
            _ => body.sharing = true,
        }
        if chance.percent_chance(20) {
            body.max_duration_secs = Some(0.5);
        }
        body
    }

    /// Sends the request and closes the connection, so that the agent may or may not receive it.
    async fn request_and_hang_up(&mut self, body: &RequestBody, key: &str) {
        let Ok(mut stream) = tokio::net::TcpStream::connect(self.address).await else { return };
        let body = serde_json::to_string(body).unwrap();
        let text = http::request("POST", "/v1/leases", &[("Idempotency-Key", key)], Some(&body));
        let _ = stream.write_all(text.as_bytes()).await;
    }

    /// Sends the request with the same key until there is a response.
    async fn request(&mut self, body: &RequestBody, key: &str, until: Instant) -> Option<LeaseBody> {
        let named = IdempotencyKey::new(key).unwrap();
        loop {
            match self.client.request_as(body, &named).await {
                Ok(lease) => {
                    let mut seen = self.seen.lock().unwrap();
                    // Each owner has its own keys.
                    seen.keyed.push((format!("{}/{key}", lease.owner), lease.id));
                    let is_granted = lease.state == LeaseState::Active;
                    seen.granted.extend(lease.token.filter(|_| is_granted).map(|token| (lease.id, token)));
                    drop(seen);
                    return Some(lease);
                }
                Err(ClientError::Problem(problem)) if problem.status < 500 => {
                    let expected = ["no_capacity", "too_many_waiting", "unsatisfiable", "policy"];
                    assert!(expected.contains(&problem.code.as_str()), "{body:?} was refused: {problem:?}");
                    return None;
                }
                Err(error) if Instant::now() > until => {
                    assert!(error.is_transient(), "{error}");
                    return None;
                }
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    }

    /// Follows a lease for a while, and uses it if it is granted meanwhile.
    async fn wait_and_use(&mut self, lease: u64) {
        let Ok(followed) = self.client.follow(lease, Duration::from_secs(2)).await else { return };
        if let (LeaseState::Active, Some(token)) = (followed.state, followed.token) {
            self.seen.lock().unwrap().granted.push((lease, token));
            self.use_lease(lease, token).await;
        }
    }

    async fn use_lease(&mut self, lease: u64, token: u64) {
        let pause = Duration::from_millis(self.chance.below(300));
        match self.chance.below(10) {
            0..=3 => {
                for _ in 0..self.chance.below(3) {
                    tokio::time::sleep(pause).await;
                    let _ = self.client.renew(lease, token).await;
                }
                self.release(lease).await;
            }
            4..=6 => {
                let Ok(mut hold) = self.client.hold_lease(lease, token).await else { return };
                let _ = tokio::time::timeout(pause, hold.wait_until_ended()).await;
                if self.chance.percent_chance(50) {
                    self.release(lease).await;
                }
            }
            7 => {
                let _ = self.client.revoke(lease, *self.chance.pick(&[0.0, 0.3])).await;
            }
            8 => {
                // A wrong token must not renew the lease.
                let stale = self.client.renew(lease, token + 1).await;
                assert!(stale.is_err(), "lease {lease} was renewed with a wrong token");
                self.release(lease).await;
            }
            // The lease ends with its ttl.
            _ => {}
        }
    }

    async fn release(&mut self, lease: u64) {
        if let Ok(Some(released)) = self.client.release(lease).await {
            assert!(released.state.is_ended(), "a release returned {released:?}");
            self.seen.lock().unwrap().released.push(lease);
        }
    }
}
