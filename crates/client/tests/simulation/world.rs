//! One run from a seed: servers, clients, what they want, and what goes wrong meanwhile.
//!
//! First everything happens at once, then nothing goes wrong any more, and after the times that are promised all must be
//! well: every endpoint usable, nothing held, nobody waiting.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Balancing, Client, Endpoint, limits};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::audit::{Audit, Won};
use crate::chance::SeededRng;
use crate::counts::Counts;
use crate::network::{Carrier, Life, Network, millis};
use crate::server::{Kind, Lie, Server};

/// The longest any request lives without a renewal.
const LONGEST_TTL: u64 = 300;
/// The longest anybody waits or holds.
const LONGEST_WAIT: u64 = 40;
const LONGEST_HOLD: u64 = 20;

pub struct Results {
    pub wrong: Vec<String>,
    pub hash: u64,
    pub counts: Counts,
}

thread_local! {
    /// Panics on this thread: those of tasks in the background would not be seen otherwise.
    pub static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

pub fn run(seed: u64, prints: bool) -> Results {
    PANICS.take();
    gpupool_client::seed_randomness(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let (mut wrong, hash, counts) = runtime.block_on(play(seed, prints));
    wrong.extend(PANICS.take());
    Results { wrong, hash, counts }
}

async fn play(seed: u64, prints: bool) -> (Vec<String>, u64, Counts) {
    // Not the numbers that the client takes from the same seed.
    let mut chance = SeededRng::new(!seed);
    let audit = Audit::new(prints);
    let is_quiet = chance.percent_chance(15);
    let faults = if is_quiet { 0 } else { *chance.pick(&[2, 5, 10, 25]) };
    let servers = servers(&mut chance, &audit, is_quiet);
    audit.servers.set(servers.clone()).unwrap();
    // Where only confirmations go wrong, many do: that is when two could be held.
    let only_confirmations = !is_quiet && chance.percent_chance(20);
    let (faults, only) = if only_confirmations { (60, "/confirm") } else { (faults, "") };
    let is_calm = is_quiet || (only_confirmations && chance.percent_chance(70));
    if only_confirmations && is_calm {
        audit.only_confirmations.set(()).unwrap();
    }
    let network = Network::new(servers, audit.clone(), chance.fork(), faults, only);
    let until = Instant::now() + millis(&mut chance, 60_000, 150_000);

    let mut slots = JoinSet::new();
    let clients = 2 + chance.below(2) as usize;
    for slot in 0..clients {
        let plan = Slot { network: network.clone(), number: slot, until, is_quiet, chance: chance.fork() };
        slots.spawn(plan.live());
    }
    if !is_calm {
        tokio::spawn(trouble(network.clone(), clients, until, chance.fork()));
    }
    sleep_until(until).await;
    heal(&network);
    audit.note("nothing goes wrong from now on".into());

    let latest = until + Duration::from_secs(LONGEST_WAIT + LONGEST_HOLD + 60);
    let mut alive = Vec::new();
    while let Ok(Some(ended)) = tokio::time::timeout_at(latest, slots.join_next()).await {
        alive.extend(ended.unwrap());
    }
    if !slots.is_empty() {
        audit.wrong("a client did not come to its end".into());
    }
    audit.all_came_back();
    alive.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    // The longest an endpoint is left alone, the looks that close its breaker, and their answers.
    let recovered = until + limits::BREAKER_MOST + Duration::from_secs(25);
    sleep_until(recovered).await;
    all_is_well(&network, &alive);
    if is_quiet {
        audit.is_first_come_first_served();
    }
    // What those held that are gone or stopped ends with its time, by the slowest clock.
    sleep(Duration::from_secs(LONGEST_TTL * 10 / 9 + 20)).await;
    for server in &network.servers {
        let left = server.look(|pool| pool.leases().filter(|lease| !lease.state.is_ended()).count());
        if left > 0 {
            audit.wrong(format!("server{} has {left} leases in the end", server.number));
        }
    }
    audit.results()
}

fn servers(chance: &mut SeededRng, audit: &Arc<Audit>, is_quiet: bool) -> Vec<Arc<Server>> {
    let count = 2 + chance.below(2) as usize;
    let servers = (0..count).map(|number| {
        let kind = if number > 0 && chance.percent_chance(15) { Kind::Statistics } else { Kind::Agent };
        let speed = if is_quiet { 1.0 } else { 0.9 + chance.below(21) as f64 / 100.0 };
        Server::start(number, kind, 1 + chance.below(3) as u32, speed, audit.clone())
    });
    servers.collect()
}

/// What goes wrong with whole servers.
async fn trouble(network: Arc<Network>, clients: usize, until: Instant, mut chance: SeededRng) {
    while Instant::now() < until {
        sleep(millis(&mut chance, 1_000, 12_000)).await;
        if Instant::now() >= until {
            return;
        }
        let number = chance.below(network.servers.len() as u64) as usize;
        let (kind, lasts) = (chance.below(6), millis(&mut chance, 200, 40_000));
        let slot = chance.below(clients as u64) as usize;
        let lie = *chance.pick(&[Lie::AllFree, Lie::AllTaken, Lie::MoreThanThereAre]);
        let network = network.clone();
        tokio::spawn(async move {
            let what =
                ["crashes", "pauses", "is cut off", "is cut off from one", "lies", "is used by others"][kind as usize];
            network.audit.note(format!("server{number} {what} for {} s", lasts.as_secs_f64()));
            set(&network, kind, number, slot, clients, lie, true);
            sleep_until((Instant::now() + lasts).min(until)).await;
            network.audit.note(format!("server{number} {what} no more"));
            set(&network, kind, number, slot, clients, lie, false);
        });
    }
}

fn set(network: &Network, kind: u64, number: usize, slot: usize, clients: usize, lie: Lie, is_on: bool) {
    let server = &network.servers[number];
    match kind {
        0 if is_on => server.crash(),
        0 => server.restart(),
        1 => server.pause(is_on),
        2 => (0..clients).for_each(|slot| network.cut(slot, number, is_on)),
        3 => network.cut(slot, number, is_on),
        4 => server.set_lie(is_on.then_some(lie)),
        _ => server.set_busy(is_on.then_some(0)),
    }
}

fn heal(network: &Network) {
    network.heal();
    for server in &network.servers {
        server.restart();
        server.pause(false);
        server.set_lie(None);
        server.set_busy(None);
    }
}

/// Every endpoint can be asked again, and nobody has anything left anywhere who could have given it back.
fn all_is_well(network: &Network, alive: &[(Arc<Life>, Client)]) {
    for (life, client) in alive {
        let status = client.error_recovery_status().unwrap();
        if !status.degraded_endpoints.is_empty() {
            network.audit.wrong(format!("{}: not usable again: {status}", life.name));
        }
    }
    for server in &network.servers {
        let left: Vec<String> = server.look(|pool| {
            let live = pool.leases().filter(|lease| !lease.state.is_ended());
            let theirs = live.filter(|lease| alive.iter().any(|(life, _)| *life.name == *lease.request.owner));
            theirs.map(|lease| format!("{} of {:?} ({:?})", lease.id, lease.request.worker_id, lease.state)).collect()
        });
        if !left.is_empty() {
            network.audit.wrong(format!("server{} still has {}", server.number, left.join(", ")));
        }
    }
}

/// One client after the other.
struct Slot {
    network: Arc<Network>,
    number: usize,
    until: Instant,
    is_quiet: bool,
    chance: SeededRng,
}

impl Slot {
    /// The client that lives in the end.
    async fn live(mut self) -> Option<(Arc<Life>, Client)> {
        for letter in 'a'..='c' {
            let life = Life::new(format!("client{}{letter}", self.number), self.number);
            let dies = (!self.is_quiet && letter < 'c' && self.chance.percent_chance(30))
                .then(|| Instant::now() + millis(&mut self.chance, 3_000, 60_000));
            let dies = dies.filter(|at| *at < self.until);
            let client = self.client(&life);
            let (mut tasks, audit) = (JoinSet::new(), self.network.audit.clone());
            tasks.spawn(self.calls(&life, &client));
            match dies {
                None => {
                    while let Some(ended) = tasks.join_next().await {
                        ended.unwrap();
                    }
                    return client.is_started().then_some((life, client));
                }
                Some(at) => {
                    sleep_until(at).await;
                    audit.note(format!("{} dies", life.name));
                    life.end();
                    audit.all_let_go(&life.name);
                    audit.forget(&life.name);
                    tasks.shutdown().await;
                    drop(client);
                    sleep(millis(&mut self.chance, 100, 10_000)).await;
                }
            }
        }
        None
    }

    fn client(&mut self, life: &Arc<Life>) -> Client {
        let count = self.network.servers.len();
        let addresses: Vec<String> = (0..count).map(|server| format!("http://server{server}:8000")).collect();
        let strategies = [Balancing::Availability, Balancing::RoundRobin, Balancing::Weighted];
        let (network, life) = (self.network.clone(), life.clone());
        let builder = Client::builder().strategy(*self.chance.pick(&strategies));
        let builder = match self.chance.percent_chance(15) {
            true => builder.endpoint(&addresses[0]),
            false => builder.endpoints(addresses.join(",")),
        };
        let builder = builder.endpoint_timeout(Duration::from_secs(*self.chance.pick(&[2, 10])));
        let carriers = move |endpoint: &Endpoint| -> Arc<dyn gpupool_client::transport::Transport> {
            let named = addresses.iter().position(|address| *address == endpoint.to_string());
            Arc::new(Carrier { network: network.clone(), life: life.clone(), server: named.unwrap() })
        };
        builder.transport(carriers).build().unwrap()
    }

    /// Everything this client does, from its start on.
    fn calls(&mut self, life: &Arc<Life>, client: &Client) -> impl Future<Output = ()> + Send + 'static {
        let span = self.until.saturating_duration_since(Instant::now()).as_millis() as u64;
        let count = 4 + self.chance.below(20);
        let mut calls: Vec<(Duration, Call)> = Vec::new();
        for number in 0..count {
            let at = millis(&mut self.chance, 0, span);
            calls.push((at, Call::new(&self.network, life, client, number, &mut self.chance)));
        }
        let stops = self.chance.percent_chance(if self.is_quiet { 0 } else { 25 });
        let stops = stops.then(|| (millis(&mut self.chance, 1_000, 60_000), millis(&mut self.chance, 0, 20_000)));
        let (client, name, audit) = (client.clone(), life.name.clone(), self.network.audit.clone());
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
                    audit.note(format!("{name} stops"));
                    audit.all_let_go(&name);
                    client.stop().await;
                    sleep(pause).await;
                    audit.note(format!("{name} starts again"));
                    client.start().await.unwrap();
                });
            }
            while let Some(ended) = tasks.join_next().await {
                ended.unwrap();
            }
        }
    }
}

/// A call of `request()`, and what is done with what comes of it.
struct Call {
    audit: Arc<Audit>,
    servers: Vec<Kind>,
    name: String,
    worker: String,
    client: Client,
    body: RequestBody,
    patience: Option<Duration>,
    hold: Duration,
    releases: bool,
}

impl Call {
    fn new(network: &Network, life: &Life, client: &Client, number: u64, chance: &mut SeededRng) -> Self {
        let worker = format!("{}-{number}", life.name);
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
            name: life.name.clone(),
            worker,
            client: client.clone(),
            body,
            patience: chance.percent_chance(25).then(|| millis(chance, 0, 15_000)),
            hold: millis(chance, 0, LONGEST_HOLD * 1_000),
            releases: chance.percent_chance(50),
        }
    }

    /// The servers this client asks, and has asked for some time.
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
        let wish = RequestBody { worker_id: None, wait_limit_secs: None, ttl_secs: None, ..self.body.clone() };
        let limit = Duration::from_secs_f64(self.body.wait_limit_secs.unwrap());
        let shape = format!("{} {:?}", serde_json::to_string(&wish).unwrap(), self.body.ttl_secs);
        audit.asked(&self.name, worker, shape, limit);
        let asked = self.client.request(self.body.clone());
        let lease = match self.patience {
            None => asked.await,
            Some(patience) => match timeout(patience, asked).await {
                Ok(answer) => answer,
                Err(_) => return audit.given_up(worker, &self.usable()),
            },
        };
        let lease = match lease {
            Ok(lease) => lease,
            Err(error) => return audit.told(worker, &error.to_string(), &self.usable()),
        };
        let server: usize = lease.endpoint_id().trim_start_matches("server").parse().unwrap();
        let devices = lease.devices().iter().map(|device| (device.gpu_id, device.fraction)).collect();
        let by_books = self.servers[server] == Kind::Statistics;
        let won = Won { server, lease: lease.id(), at: Instant::now(), devices, by_books, is_held: true };
        audit.won(worker, won, &self.usable());
        let is_lost = timeout(self.hold, lease.wait_until_lost()).await.is_ok();
        audit.let_go(worker, is_lost);
        if self.releases {
            // What could not be given back at once is given back later.
            let _ = lease.release().await;
        }
    }
}
