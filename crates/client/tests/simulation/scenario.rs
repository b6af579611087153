//! One run from a seed: servers, clients, their requests, and faults.
//!
//! First everything happens at once, then all faults end, and after the promised times the state must be clean: every
//! endpoint available, no lease held, no request waiting.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Balancing, Client, Endpoint, limits};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::audit::{ClientHold, InvariantAudit};
use crate::event_counts::EventCounts;
use crate::network::{ClientLifetime, FaultyNetwork, FaultyTransport, millis};
use crate::seeded_rng::SeededRng;
use crate::simulated_server::{Misreport, ServerKind, SimulatedServer};

/// Longest ttl of a request.
const LONGEST_TTL: u64 = 300;
/// Longest wait and longest hold, in seconds.
const LONGEST_WAIT: u64 = 40;
const LONGEST_HOLD: u64 = 20;

pub struct RunResults {
    pub violations: Vec<String>,
    pub hash: u64,
    pub event_counts: EventCounts,
}

thread_local! {
    /// Panics on this thread, including those of background tasks.
    pub static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

pub fn run(seed: u64, prints: bool) -> RunResults {
    PANICS.take();
    gpupool_client::seed_randomness(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let (mut violations, hash, event_counts) = runtime.block_on(play_scenario(seed, prints));
    violations.extend(PANICS.take());
    RunResults { violations, hash, event_counts }
}

async fn play_scenario(seed: u64, prints: bool) -> (Vec<String>, u64, EventCounts) {
    // A stream of random numbers other than the client's own.
    let mut chance = SeededRng::new(!seed);
    let audit = InvariantAudit::new(prints);
    let is_quiet = chance.percent_chance(15);
    let faults = if is_quiet { 0 } else { *chance.pick(&[2, 5, 10, 25]) };
    let servers = servers(&mut chance, &audit, is_quiet);
    audit.servers.set(servers.clone()).unwrap();
    // If only confirmations fail, many do: that is when two leases could be held.
    let only_confirmations = !is_quiet && chance.percent_chance(20);
    let (faults, only) = if only_confirmations { (60, "/confirm") } else { (faults, "") };
    let is_calm = is_quiet || (only_confirmations && chance.percent_chance(70));
    if only_confirmations && is_calm {
        audit.only_confirmations.set(()).unwrap();
    }
    let network = FaultyNetwork::new(servers, audit.clone(), chance.fork(), faults, only);
    let until = Instant::now() + millis(&mut chance, 60_000, 150_000);

    let mut slots = JoinSet::new();
    let clients = 2 + chance.below(2) as usize;
    for slot in 0..clients {
        let plan = ClientSlot { network: network.clone(), number: slot, until, is_quiet, chance: chance.fork() };
        slots.spawn(plan.live());
    }
    if !is_calm {
        tokio::spawn(inject_server_faults(network.clone(), clients, until, chance.fork()));
    }
    sleep_until(until).await;
    heal(&network);
    audit.trace("all faults end".into());

    let latest = until + Duration::from_secs(LONGEST_WAIT + LONGEST_HOLD + 60);
    let mut alive = Vec::new();
    while let Ok(Some(ended)) = tokio::time::timeout_at(latest, slots.join_next()).await {
        alive.extend(ended.unwrap());
    }
    if !slots.is_empty() {
        audit.report_violation("a client did not end".into());
    }
    audit.check_all_returned();
    alive.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    // The longest pause of a breaker, the polls that close it, and their responses.
    let recovered = until + limits::MAX_BREAKER_PAUSE + Duration::from_secs(25);
    sleep_until(recovered).await;
    check_recovery(&network, &alive);
    if is_quiet {
        audit.check_fifo_order();
    }
    // Leases of dead or stopped clients end with their ttl by the slowest clock.
    sleep(Duration::from_secs(LONGEST_TTL * 10 / 9 + 20)).await;
    for server in &network.servers {
        let left = server.inspect(|pool| pool.leases().filter(|lease| !lease.state.is_ended()).count());
        if left > 0 {
            audit.report_violation(format!("server{} has {left} leases in the end", server.number));
        }
    }
    audit.results()
}

fn servers(chance: &mut SeededRng, audit: &Arc<InvariantAudit>, is_quiet: bool) -> Vec<Arc<SimulatedServer>> {
    let count = 2 + chance.below(2) as usize;
    let servers = (0..count).map(|number| {
        let kind = if number > 0 && chance.percent_chance(15) { ServerKind::Statistics } else { ServerKind::Agent };
        let speed = if is_quiet { 1.0 } else { 0.9 + chance.below(21) as f64 / 100.0 };
        SimulatedServer::start(number, kind, 1 + chance.below(3) as u32, speed, audit.clone())
    });
    servers.collect()
}

/// Injects faults of whole servers.
async fn inject_server_faults(network: Arc<FaultyNetwork>, clients: usize, until: Instant, mut chance: SeededRng) {
    while Instant::now() < until {
        sleep(millis(&mut chance, 1_000, 12_000)).await;
        if Instant::now() >= until {
            return;
        }
        let number = chance.below(network.servers.len() as u64) as usize;
        let (kind, lasts) = (chance.below(6), millis(&mut chance, 200, 40_000));
        let slot = chance.below(clients as u64) as usize;
        let misreport = *chance.pick(&[Misreport::AllFree, Misreport::AllTaken, Misreport::MoreThanThereAre]);
        let network = network.clone();
        tokio::spawn(async move {
            let what =
                ["crashes", "pauses", "is cut off", "is cut off from one", "lies", "is used by others"][kind as usize];
            network.audit.trace(format!("server{number} {what} for {} s", lasts.as_secs_f64()));
            set_server_fault(&network, kind, number, slot, clients, misreport, true);
            sleep_until((Instant::now() + lasts).min(until)).await;
            network.audit.trace(format!("server{number} {what} no longer"));
            set_server_fault(&network, kind, number, slot, clients, misreport, false);
        });
    }
}

fn set_server_fault(
    network: &FaultyNetwork,
    kind: u64,
    number: usize,
    slot: usize,
    clients: usize,
    misreport: Misreport,
    is_on: bool,
) {
    let server = &network.servers[number];
    match kind {
        0 if is_on => server.crash(),
        0 => server.restart(),
        1 => server.pause(is_on),
        2 => (0..clients).for_each(|slot| network.cut(slot, number, is_on)),
        3 => network.cut(slot, number, is_on),
        4 => server.set_misreport(is_on.then_some(misreport)),
        _ => server.set_busy(is_on.then_some(0)),
    }
}

fn heal(network: &FaultyNetwork) {
    network.heal();
    for server in &network.servers {
        server.restart();
        server.pause(false);
        server.set_misreport(None);
        server.set_busy(None);
    }
}

/// Every endpoint is available again, and no living client has a lease left.
fn check_recovery(network: &FaultyNetwork, alive: &[(Arc<ClientLifetime>, Client)]) {
    for (lifetime, client) in alive {
        let status = client.error_recovery_status().unwrap();
        if !status.degraded_endpoints.is_empty() {
            network.audit.report_violation(format!("{}: not usable again: {status}", lifetime.name));
        }
    }
    for server in &network.servers {
        let left: Vec<String> = server.inspect(|pool| {
            let live = pool.leases().filter(|lease| !lease.state.is_ended());
            let theirs = live.filter(|lease| alive.iter().any(|(lifetime, _)| *lifetime.name == *lease.request.owner));
            theirs.map(|lease| format!("{} of {:?} ({:?})", lease.id, lease.request.worker_id, lease.state)).collect()
        });
        if !left.is_empty() {
            network.audit.report_violation(format!("server{} still has {}", server.number, left.join(", ")));
        }
    }
}

/// A sequence of clients.
struct ClientSlot {
    network: Arc<FaultyNetwork>,
    number: usize,
    until: Instant,
    is_quiet: bool,
    chance: SeededRng,
}

impl ClientSlot {
    /// Runs the clients and returns the last one.
    async fn live(mut self) -> Option<(Arc<ClientLifetime>, Client)> {
        for letter in 'a'..='c' {
            let lifetime = ClientLifetime::new(format!("client{}{letter}", self.number), self.number);
            let dies = (!self.is_quiet && letter < 'c' && self.chance.percent_chance(30))
                .then(|| Instant::now() + millis(&mut self.chance, 3_000, 60_000));
            let dies = dies.filter(|at| *at < self.until);
            let client = self.client(&lifetime);
            let (mut tasks, audit) = (JoinSet::new(), self.network.audit.clone());
            tasks.spawn(self.calls(&lifetime, &client));
            match dies {
                None => {
                    while let Some(ended) = tasks.join_next().await {
                        ended.unwrap();
                    }
                    return client.is_started().then_some((lifetime, client));
                }
                Some(at) => {
                    sleep_until(at).await;
                    audit.trace(format!("{} dies", lifetime.name));
                    lifetime.end();
                    audit.end_all_holds(&lifetime.name);
                    audit.forget_client(&lifetime.name);
                    tasks.shutdown().await;
                    drop(client);
                    sleep(millis(&mut self.chance, 100, 10_000)).await;
                }
            }
        }
        None
    }

    fn client(&mut self, lifetime: &Arc<ClientLifetime>) -> Client {
        let count = self.network.servers.len();
        let addresses: Vec<String> = (0..count).map(|server| format!("http://server{server}:8000")).collect();
        let strategies = [Balancing::Availability, Balancing::RoundRobin, Balancing::Weighted];
        let (network, lifetime) = (self.network.clone(), lifetime.clone());
        let builder = Client::builder().strategy(*self.chance.pick(&strategies));
        let builder = match self.chance.percent_chance(15) {
            true => builder.endpoint(&addresses[0]),
            false => builder.endpoints(addresses.join(",")),
        };
        let builder = builder.endpoint_timeout(Duration::from_secs(*self.chance.pick(&[2, 10])));
        let transports = move |endpoint: &Endpoint| -> Arc<dyn gpupool_client::transport::Transport> {
            let named = addresses.iter().position(|address| *address == endpoint.to_string());
            Arc::new(FaultyTransport { network: network.clone(), lifetime: lifetime.clone(), server: named.unwrap() })
        };
        builder.transport(transports).build().unwrap()
    }

    /// All calls of a client from its start on.
    fn calls(&mut self, lifetime: &Arc<ClientLifetime>, client: &Client) -> impl Future<Output = ()> + Send + 'static {
        let span = self.until.saturating_duration_since(Instant::now()).as_millis() as u64;
        let count = 4 + self.chance.below(20);
        let mut calls: Vec<(Duration, PlannedCall)> = Vec::new();
        for number in 0..count {
            let at = millis(&mut self.chance, 0, span);
            calls.push((at, PlannedCall::new(&self.network, lifetime, client, number, &mut self.chance)));
        }
        let stops = self.chance.percent_chance(if self.is_quiet { 0 } else { 25 });
        let stops = stops.then(|| (millis(&mut self.chance, 1_000, 60_000), millis(&mut self.chance, 0, 20_000)));
        let (client, name, audit) = (client.clone(), lifetime.name.clone(), self.network.audit.clone());
        async move {
            client.start().await.unwrap();
            let mut tasks = JoinSet::new();
            for (at, call) in calls {
                tasks.spawn(async move {
                    sleep(at).await;
                    call.make().await;
                });
            }
            if let Some((after, pause)) = stops {
                tasks.spawn(async move {
                    sleep(after).await;
                    audit.trace(format!("{name} stops"));
                    audit.end_all_holds(&name);
                    client.stop().await;
                    sleep(pause).await;
                    audit.trace(format!("{name} starts again"));
                    client.start().await.unwrap();
                });
            }
            while let Some(ended) = tasks.join_next().await {
                ended.unwrap();
            }
        }
    }
}

/// A planned call of `request()` and the use of its lease.
struct PlannedCall {
    audit: Arc<InvariantAudit>,
    servers: Vec<ServerKind>,
    name: String,
    worker: String,
    client: Client,
    body: RequestBody,
    patience: Option<Duration>,
    hold: Duration,
    releases: bool,
}

impl PlannedCall {
    fn new(
        network: &FaultyNetwork,
        lifetime: &ClientLifetime,
        client: &Client,
        number: u64,
        chance: &mut SeededRng,
    ) -> Self {
        let worker = format!("{}-{number}", lifetime.name);
        let mut body = match chance.below(10) {
            0..=5 => RequestBody::default(),
            6 => RequestBody { fraction: Some(0.25), ..RequestBody::default() },
            7 => RequestBody { fraction: Some(0.5), ..RequestBody::default() },
            8 => RequestBody { memory_mib: Some(6_000), ..RequestBody::default() },
            _ => RequestBody { gpus: Some(2), ..RequestBody::default() },
        };
        if chance.percent_chance(3) {
            body.memory_threshold = Some(0.0);
        }
        body.queue = chance.percent_chance(10).then_some(false);
        body.worker_id = Some(worker.as_str().into());
        body.wait_limit_secs = Some(*chance.pick(&[0.5, 3.0, 10.0, 10.0, LONGEST_WAIT as f64]));
        body.ttl_secs = Some(*chance.pick(&[3.0, 10.0, 60.0, LONGEST_TTL as f64]));
        Self {
            audit: network.audit.clone(),
            servers: network.servers.iter().map(|server| server.kind).collect(),
            name: lifetime.name.clone(),
            worker,
            client: client.clone(),
            body,
            patience: chance.percent_chance(25).then(|| millis(chance, 0, 15_000)),
            hold: millis(chance, 0, LONGEST_HOLD * 1_000),
            releases: chance.percent_chance(50),
        }
    }

    /// Servers that have been available to this client for some time.
    fn usable(&self) -> Vec<usize> {
        let Ok(status) = self.client.error_recovery_status() else { return Vec::new() };
        let is_usable = |server: &usize| {
            let breaker = status.circuit_breaker_stats.get(&format!("server{server}"));
            breaker.is_some_and(|breaker| breaker.state == "closed" && breaker.traffic_share > 0.2)
        };
        (0..self.servers.len()).filter(is_usable).collect()
    }

    async fn make(self) {
        let (audit, worker) = (&self.audit, self.worker.as_str());
        let request_template =
            RequestBody { worker_id: None, wait_limit_secs: None, ttl_secs: None, ..self.body.clone() };
        let limit = Duration::from_secs_f64(self.body.wait_limit_secs.unwrap());
        let request_shape = format!("{} {:?}", serde_json::to_string(&request_template).unwrap(), self.body.ttl_secs);
        audit.record_request(&self.name, worker, request_shape, limit);
        let asked = self.client.request(self.body.clone());
        let lease = match self.patience {
            None => asked.await,
            Some(patience) => match timeout(patience, asked).await {
                Ok(answer) => answer,
                Err(_) => return audit.record_cancelled(worker, &self.usable()),
            },
        };
        let lease = match lease {
            Ok(lease) => lease,
            Err(error) => return audit.record_error(worker, &error.to_string(), &self.usable()),
        };
        let server: usize = lease.endpoint_id().trim_start_matches("server").parse().unwrap();
        let devices = lease.devices().iter().map(|device| (device.gpu_id, device.fraction)).collect();
        let by_client = self.servers[server] == ServerKind::Statistics;
        let hold = ClientHold { server, lease: lease.id(), at: Instant::now(), devices, by_client, is_held: true };
        audit.record_grant(worker, hold, &self.usable());
        let is_lost = timeout(self.hold, lease.wait_until_lost()).await.is_ok();
        audit.end_hold(worker, is_lost);
        if self.releases {
            // A release that fails now is retried later.
            let _ = lease.release().await;
        }
    }
}
