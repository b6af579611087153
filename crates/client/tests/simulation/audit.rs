//! Observes all steps of the servers and all results of the clients, and records violations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use gpupool_core::{EndCause, LeaseId, LeaseState, Pool, PoolEffect, PoolTime};
use tokio::time::Instant;

use crate::event_counts::EventCounts;
use crate::simulated_server::{MEMORY_MIB, SimulatedServer};

/// Time after its limit within which a request must time out.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(1);

/// Time within which a client requests again after it lost an offer.
const REENTRY_TIME_LIMIT: Duration = Duration::from_secs(3);
/// Calls within this span count as concurrent, because responses take time.
const CONCURRENT_CALL_SPAN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct InvariantAudit {
    began: Instant,
    prints: bool,
    pub servers: OnceLock<Vec<Arc<SimulatedServer>>>,
    /// Set if only confirmations fail: a client that loses an offer can request again at once.
    pub only_confirmations: OnceLock<()>,
    state: Mutex<AuditState>,
}

#[derive(Debug, Default)]
struct AuditState {
    violations: Vec<String>,
    hash: u64,
    granted: BTreeMap<(usize, u64), GrantRecord>,
    tokens: BTreeMap<usize, u64>,
    calls: BTreeMap<String, CallRecord>,
    event_counts: EventCounts,
    /// By worker and server: time of a lost offer without a new request there since.
    lost_offers: BTreeMap<(String, usize), Instant>,
}

#[derive(Debug)]
struct GrantRecord {
    worker: String,
    hedged: bool,
    is_active: bool,
    generation: u64,
    /// On the server's clock.
    active_since: PoolTime,
    promises: Vec<(u32, u32, u64)>,
}

/// One call of `request()`.
#[derive(Debug)]
struct CallRecord {
    client: String,
    request_shape: String,
    asked: Instant,
    limit: Duration,
    held: Option<ClientHold>,
    is_over: bool,
}

#[derive(Debug, Clone)]
pub struct ClientHold {
    pub server: usize,
    pub lease: u64,
    pub at: Instant,
    pub devices: Vec<(u32, f64)>,
    pub by_client: bool,
    pub is_held: bool,
}

impl InvariantAudit {
    pub fn new(prints: bool) -> Arc<Self> {
        let state = Mutex::new(AuditState { hash: 0xcbf2_9ce4_8422_2325, ..AuditState::default() });
        Arc::new(Self {
            began: Instant::now(),
            prints,
            servers: OnceLock::new(),
            only_confirmations: OnceLock::new(),
            state,
        })
    }

    fn lock(&self) -> MutexGuard<'_, AuditState> {
        self.state.lock().unwrap()
    }

    /// Writes a line of the trace.
    pub fn trace(&self, text: String) {
        let at = self.began.elapsed().as_millis();
        if self.prints {
            eprintln!("{:>9.3} {text}", at as f64 / 1000.0);
        }
        let mut state = self.lock();
        state.event_counts.exchanges += 1;
        for byte in text.bytes().chain(at.to_le_bytes()) {
            state.hash = (state.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub fn report_violation(&self, text: String) {
        let line = format!("at {:.3} s: {text}", self.began.elapsed().as_secs_f64());
        self.trace(format!("WRONG {text}"));
        self.lock().violations.push(line);
    }

    pub fn results(&self) -> (Vec<String>, u64, EventCounts) {
        let state = self.lock();
        (state.violations.clone(), state.hash, state.event_counts)
    }

    /// Checks one step of a server.
    pub fn check_step(
        &self,
        server: &SimulatedServer,
        generation: u64,
        pool: &Pool,
        effects: &[PoolEffect],
        invariants: Result<(), String>,
    ) {
        if let Err(why) = invariants {
            self.report_violation(format!("server{} violates an invariant: {why}", server.number));
        }
        for effect in effects {
            match effect {
                PoolEffect::Offered { lease, token, .. } => {
                    self.record_server_grant(server, generation, pool, *lease, token.0, false)
                }
                PoolEffect::Granted { lease, token, .. } => {
                    self.record_server_grant(server, generation, pool, *lease, token.0, true)
                }
                PoolEffect::Ended { lease, cause } => self.record_server_end(server, generation, pool, *lease, cause),
                PoolEffect::Queued { lease } => {
                    let worker = worker_of(pool, *lease);
                    self.trace(format!("server{}: lease {lease} of {worker} waits", server.number));
                    self.lock().lost_offers.remove(&(worker, server.number));
                }
                _ => {}
            }
        }
    }

    fn record_server_grant(
        &self,
        server: &SimulatedServer,
        generation: u64,
        pool: &Pool,
        id: LeaseId,
        token: u64,
        is_active: bool,
    ) {
        let lease = pool.lease(id).unwrap();
        let (number, worker) = (server.number, worker_of(pool, id));
        let word = if is_active { "active" } else { "offered" };
        self.trace(format!("server{number}: lease {id} of {worker} is {word}"));
        let promises: Vec<_> =
            lease.promises.iter().map(|promise| (promise.device.0, promise.share.0, promise.memory.as_mib())).collect();
        let was_offered = self.lock().granted.contains_key(&(number, id.0));
        if !was_offered {
            let before = self.lock().tokens.insert(number, token);
            if before.is_some_and(|before| before >= token) {
                self.report_violation(format!("server{number}: token {token} comes after {before:?}"));
            }
        }
        self.lock().lost_offers.remove(&(worker.clone(), number));
        if is_active {
            self.check_single_active(server, pool, id, &worker);
        }
        let (hedged, active_since) = (lease.request.hedged, server.now());
        let granted = GrantRecord { worker, hedged, is_active, generation, active_since, promises };
        self.lock().granted.insert((number, id.0), granted);
        self.check_promises(server);
    }

    fn check_promises(&self, server: &SimulatedServer) {
        let mut sums: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
        for ((_, _), granted) in self.lock().granted.iter().filter(|((number, _), _)| *number == server.number) {
            for (device, share, memory) in &granted.promises {
                let sum = sums.entry(*device).or_default();
                *sum = (sum.0 + share, sum.1 + memory);
            }
        }
        for (device, (share, memory)) in sums {
            if share > 1000 || memory > MEMORY_MIB {
                self.report_violation(format!(
                    "server{}: device {device} is promised {share}‰, {memory} MiB",
                    server.number
                ));
            }
        }
    }

    /// At most one lease of a call is active while it waits everywhere.
    fn check_single_active(&self, server: &SimulatedServer, pool: &Pool, id: LeaseId, worker: &str) {
        let hedged = pool.lease(id).unwrap().request.hedged;
        let others: Vec<(usize, u64, u64)> = {
            let state = self.lock();
            let others = state.granted.iter().filter(|(key, other)| {
                **key != (server.number, id.0) && other.worker == worker && other.is_active && other.hedged && hedged
            });
            others.map(|(key, other)| (key.0, key.1, other.generation)).collect()
        };
        for (number, lease, generation) in others {
            let there = &self.servers.get().unwrap()[number];
            let is_active = |pool: &Pool| {
                let known = pool.lease(LeaseId(lease));
                // A paused server has not noticed the end yet.
                known.is_some_and(|known| {
                    known.state == LeaseState::Active && known.expires_at.is_none_or(|at| at > there.now())
                })
            };
            let (is_active, generation_now) = match number == server.number {
                true => (is_active(pool), generation),
                false => (there.inspect(is_active), there.generation()),
            };
            if is_active && generation_now != generation {
                self.lock().event_counts.restarts += 1;
            } else if is_active {
                let here = server.number;
                self.report_violation(format!(
                    "{worker}: lease {id} of server{here} beside lease {lease} of server{number}"
                ));
            }
        }
    }

    fn record_server_end(&self, server: &SimulatedServer, generation: u64, pool: &Pool, id: LeaseId, cause: &EndCause) {
        let number = server.number;
        self.trace(format!("server{number}: lease {id} of {} is over ({cause:?})", worker_of(pool, id)));
        let mut state = self.lock();
        let Some(granted) = state.granted.remove(&(number, id.0)) else { return };
        if !granted.is_active {
            return;
        }
        let held = state.calls.get(&granted.worker).and_then(|call| call.held.clone());
        let held = held.filter(|held| (held.server, held.lease) == (number, id.0));
        let Some(held) = held else {
            state.event_counts.orphans += 1;
            drop(state);
            let lease = pool.lease(id).unwrap();
            let is_renewed = lease.expires_at.is_some_and(|at| at.0 > granted.active_since.0 + lease.request.ttl.0);
            if is_renewed && granted.generation == generation {
                self.report_violation(format!(
                    "{}: lease {id} of server{number} has no holder and was renewed",
                    granted.worker
                ));
            }
            return;
        };
        drop(state);
        if !held.is_held {
            return;
        }
        match cause {
            EndCause::ByOwner => {
                self.report_violation(format!(
                    "{}: lease {id} of server{number} was given back under its holder",
                    granted.worker
                ));
            }
            // A fast clock ends the lease before its holder can know.
            EndCause::TtlPassed if !server.is_fast() => {
                self.report_violation(format!(
                    "{}: lease {id} of server{number} ended, and its holder was not told",
                    granted.worker
                ));
            }
            _ => {}
        }
    }

    /// Records that an offer can no longer be confirmed.
    pub fn offer_is_gone(&self, server: usize, lease: u64) {
        let worker = self.servers.get().unwrap()[server].inspect(|pool| worker_of(pool, LeaseId(lease)));
        self.lock().lost_offers.insert((worker, server), Instant::now());
    }

    pub fn record_request(&self, client: &str, worker: &str, request_shape: String, limit: Duration) {
        self.trace(format!("{worker} requests {request_shape} and waits {} s", limit.as_secs_f64()));
        let call = CallRecord {
            client: client.into(),
            request_shape,
            asked: Instant::now(),
            limit,
            held: None,
            is_over: false,
        };
        self.lock().calls.insert(worker.into(), call);
    }

    /// Ends a call: it returned or was cancelled while these servers were available.
    fn end_call(&self, worker: &str, usable: &[usize]) {
        let mut state = self.lock();
        let call = state.calls.get_mut(worker).unwrap();
        call.is_over = true;
        let (took, limit) = (call.asked.elapsed(), call.limit);
        let lost_offers: Vec<_> = state.lost_offers.iter().filter(|((who, _), _)| who == worker).collect();
        let late = lost_offers.iter().find(|(_, at)| at.elapsed() > REENTRY_TIME_LIMIT).map(|((_, server), _)| *server);
        drop(state);
        if let Some(server) = late.filter(|server| usable.contains(server) && self.only_confirmations.get().is_some()) {
            self.report_violation(format!(
                "{worker} lost its offer of server{server}, and did not request again there"
            ));
        }
        if took > limit + TIMEOUT_MARGIN {
            self.report_violation(format!(
                "{worker} waits {} s at most, and was told after {} s",
                limit.as_secs_f64(),
                took.as_secs_f64()
            ));
        }
    }

    pub fn record_grant(&self, worker: &str, held: ClientHold, usable: &[usize]) {
        self.trace(format!("{worker} has lease {} of server{}", held.lease, held.server));
        self.end_call(worker, usable);
        let mut state = self.lock();
        state.event_counts.granted += 1;
        state.event_counts.granted_waiting +=
            u64::from(state.granted.get(&(held.server, held.lease)).is_some_and(|granted| granted.hedged));
        let call = state.calls.get_mut(worker).unwrap();
        let client = call.client.clone();
        call.held = Some(held.clone());
        drop(state);
        if held.by_client {
            self.check_client_accounting(&client, held.server);
        }
    }

    /// The accounting of one client grants no more of a server's GPUs than there is.
    fn check_client_accounting(&self, client: &str, server: usize) {
        let mut sums: BTreeMap<u32, f64> = BTreeMap::new();
        let state = self.lock();
        let held = state.calls.values().filter(|call| call.client == client).filter_map(|call| call.held.as_ref());
        for held in held.filter(|held| held.by_client && held.is_held && held.server == server) {
            for (gpu, fraction) in &held.devices {
                *sums.entry(*gpu).or_default() += fraction;
            }
        }
        drop(state);
        for (gpu, sum) in sums.into_iter().filter(|(_, sum)| *sum > 1.0005) {
            self.report_violation(format!("{client} gives {sum} of GPU {gpu} of server{server}"));
        }
    }

    pub fn record_error(&self, worker: &str, error: &str, usable: &[usize]) {
        self.trace(format!("{worker} gets an error: {error}"));
        self.end_call(worker, usable);
        self.lock().event_counts.errors += 1;
    }

    pub fn record_cancelled(&self, worker: &str, usable: &[usize]) {
        self.trace(format!("{worker} cancels"));
        self.end_call(worker, usable);
        self.lock().event_counts.cancelled += 1;
    }

    /// Ends a hold: the lease was released or lost.
    pub fn end_hold(&self, worker: &str, is_lost: bool) {
        self.trace(format!("{worker} ends its hold{}", if is_lost { " after a loss" } else { "" }));
        let mut state = self.lock();
        state.event_counts.lost += u64::from(is_lost);
        if let Some(held) = state.calls.get_mut(worker).and_then(|call| call.held.as_mut()) {
            held.is_held = false;
        }
    }

    /// Ends all holds of a client that stops or dies.
    pub fn end_all_holds(&self, client: &str) {
        let mut state = self.lock();
        for held in state.calls.values_mut().filter(|call| call.client == client).filter_map(|call| call.held.as_mut())
        {
            held.is_held = false;
        }
    }

    /// Earlier requests of the same shape were served earlier. Holds only without faults, since a queue position can be
    /// lost with a server or a connection.
    pub fn check_fifo_order(&self) {
        let served: Vec<(String, String, String, Instant, Instant)> = {
            let state = self.lock();
            let served = state.calls.iter().filter_map(|(worker, call)| {
                let held = call.held.as_ref()?;
                Some((worker.clone(), call.client.clone(), call.request_shape.clone(), call.asked, held.at))
            });
            served.collect()
        };
        for (worker, client, request_shape, asked, at) in &served {
            let passed = served.iter().find(|(_, other, request_template, earlier, later)| {
                other == client
                    && request_template == request_shape
                    && *earlier + CONCURRENT_CALL_SPAN < *asked
                    && *later > *at + CONCURRENT_CALL_SPAN
            });
            if let Some((other, ..)) = passed {
                self.report_violation(format!("{worker} came after {other} and was served before it"));
            }
        }
    }

    /// Every call ended.
    pub fn check_all_returned(&self) {
        let open: Vec<String> = {
            let state = self.lock();
            state.calls.iter().filter(|(_, call)| !call.is_over).map(|(worker, _)| worker.clone()).collect()
        };
        for worker in open {
            self.report_violation(format!("the call of {worker} never ended"));
        }
    }

    pub fn forget_client(&self, client: &str) {
        let mut state = self.lock();
        for call in state.calls.values_mut().filter(|call| call.client == client) {
            call.is_over = true;
        }
    }
}

fn worker_of(pool: &Pool, lease: LeaseId) -> String {
    let lease = pool.lease(lease);
    lease.and_then(|lease| lease.request.worker_id.as_ref()).map(ToString::to_string).unwrap_or_default()
}
