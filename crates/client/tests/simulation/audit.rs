//! Looks at everything the servers do and everything the clients are told, and writes down what must not be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use gpupool_core::{EndCause, LeaseId, LeaseState, Pool, PoolEffect, PoolTime};
use tokio::time::Instant;

use crate::counts::Counts;
use crate::server::{MEMORY_MIB, Server};

/// How long after its limit a request may be told that it waited too long.
const MARGIN: Duration = Duration::from_secs(1);

/// How long it may take until a client asks anew where it lost an offer.
const ASKS_AGAIN: Duration = Duration::from_secs(3);
/// Calls that are so close to each other that neither is before the other: answers take their time.
const APART: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Audit {
    began: Instant,
    prints: bool,
    pub servers: OnceLock<Vec<Arc<Server>>>,
    /// Only confirmations go wrong: whoever loses an offer can ask anew at once.
    pub only_confirmations: OnceLock<()>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    wrong: Vec<String>,
    hash: u64,
    granted: BTreeMap<(usize, u64), Granted>,
    tokens: BTreeMap<usize, u64>,
    calls: BTreeMap<String, Call>,
    counts: Counts,
    /// By worker and server: when it heard that an offer is gone, and has not asked there again yet.
    refused: BTreeMap<(String, usize), Instant>,
}

#[derive(Debug)]
struct Granted {
    worker: String,
    hedged: bool,
    is_active: bool,
    life: u64,
    /// On the server's clock.
    active_since: PoolTime,
    promises: Vec<(u32, u32, u64)>,
}

/// One call of `request()`.
#[derive(Debug)]
struct Call {
    client: String,
    shape: String,
    asked: Instant,
    limit: Duration,
    won: Option<Won>,
    is_over: bool,
}

#[derive(Debug, Clone)]
pub struct Won {
    pub server: usize,
    pub lease: u64,
    pub at: Instant,
    pub devices: Vec<(u32, f64)>,
    pub by_books: bool,
    pub is_held: bool,
}

impl Audit {
    pub fn new(prints: bool) -> Arc<Self> {
        let inner = Mutex::new(Inner { hash: 0xcbf2_9ce4_8422_2325, ..Inner::default() });
        Arc::new(Self {
            began: Instant::now(),
            prints,
            servers: OnceLock::new(),
            only_confirmations: OnceLock::new(),
            inner,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// A line of the trace.
    pub fn note(&self, text: String) {
        let at = self.began.elapsed().as_millis();
        if self.prints {
            eprintln!("{:>9.3} {text}", at as f64 / 1000.0);
        }
        let mut inner = self.lock();
        inner.counts.exchanges += 1;
        for byte in text.bytes().chain(at.to_le_bytes()) {
            inner.hash = (inner.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub fn wrong(&self, text: String) {
        let line = format!("at {:.3} s: {text}", self.began.elapsed().as_secs_f64());
        self.note(format!("WRONG {text}"));
        self.lock().wrong.push(line);
    }

    pub fn results(&self) -> (Vec<String>, u64, Counts) {
        let inner = self.lock();
        (inner.wrong.clone(), inner.hash, inner.counts)
    }

    /// What a server did in one step.
    pub fn happened(&self, server: &Server, life: u64, pool: &Pool, effects: &[PoolEffect], sane: Result<(), String>) {
        if let Err(why) = sane {
            self.wrong(format!("server{} is not sane: {why}", server.number));
        }
        for effect in effects {
            match effect {
                PoolEffect::Offered { lease, token, .. } => self.granted(server, life, pool, *lease, token.0, false),
                PoolEffect::Granted { lease, token, .. } => self.granted(server, life, pool, *lease, token.0, true),
                PoolEffect::Ended { lease, cause } => self.ended(server, life, pool, *lease, cause),
                PoolEffect::Queued { lease } => {
                    let worker = worker_of(pool, *lease);
                    self.note(format!("server{}: lease {lease} of {worker} waits", server.number));
                    self.lock().refused.remove(&(worker, server.number));
                }
                _ => {}
            }
        }
    }

    fn granted(&self, server: &Server, life: u64, pool: &Pool, id: LeaseId, token: u64, is_active: bool) {
        let lease = pool.lease(id).unwrap();
        let (number, worker) = (server.number, worker_of(pool, id));
        let word = if is_active { "active" } else { "offered" };
        self.note(format!("server{number}: lease {id} of {worker} is {word}"));
        let promises: Vec<_> =
            lease.promises.iter().map(|promise| (promise.device.0, promise.share.0, promise.memory.as_mib())).collect();
        let was_offered = self.lock().granted.contains_key(&(number, id.0));
        if !was_offered {
            let before = self.lock().tokens.insert(number, token);
            if before.is_some_and(|before| before >= token) {
                self.wrong(format!("server{number}: token {token} comes after {before:?}"));
            }
        }
        self.lock().refused.remove(&(worker.clone(), number));
        if is_active {
            self.is_the_only_one(server, pool, id, &worker);
        }
        let (hedged, active_since) = (lease.request.hedged, server.now());
        let granted = Granted { worker, hedged, is_active, life, active_since, promises };
        self.lock().granted.insert((number, id.0), granted);
        self.is_not_over_promised(server);
    }

    fn is_not_over_promised(&self, server: &Server) {
        let mut sums: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
        for ((_, _), granted) in self.lock().granted.iter().filter(|((number, _), _)| *number == server.number) {
            for (device, share, memory) in &granted.promises {
                let sum = sums.entry(*device).or_default();
                *sum = (sum.0 + share, sum.1 + memory);
            }
        }
        for (device, (share, memory)) in sums {
            if share > 1000 || memory > MEMORY_MIB {
                self.wrong(format!("server{}: device {device} is promised {share}‰, {memory} MiB", server.number));
            }
        }
    }

    /// At most one lease of a call is active in the stage where it waits everywhere.
    fn is_the_only_one(&self, server: &Server, pool: &Pool, id: LeaseId, worker: &str) {
        let hedged = pool.lease(id).unwrap().request.hedged;
        let others: Vec<(usize, u64, u64)> = {
            let inner = self.lock();
            let others = inner.granted.iter().filter(|(place, other)| {
                **place != (server.number, id.0) && other.worker == worker && other.is_active && other.hedged && hedged
            });
            others.map(|(place, other)| (place.0, place.1, other.life)).collect()
        };
        for (number, lease, life) in others {
            let there = &self.servers.get().unwrap()[number];
            let is_active = |pool: &Pool| {
                let known = pool.lease(LeaseId(lease));
                // A server that is paused has not noticed the end yet.
                known.is_some_and(|known| {
                    known.state == LeaseState::Active && known.expires_at.is_none_or(|at| at > there.now())
                })
            };
            let (is_active, life_now) = match number == server.number {
                true => (is_active(pool), life),
                false => (there.look(is_active), there.life()),
            };
            if is_active && life_now != life {
                self.lock().counts.restarts += 1;
            } else if is_active {
                let here = server.number;
                self.wrong(format!("{worker}: lease {id} of server{here} beside lease {lease} of server{number}"));
            }
        }
    }

    fn ended(&self, server: &Server, life: u64, pool: &Pool, id: LeaseId, cause: &EndCause) {
        let number = server.number;
        self.note(format!("server{number}: lease {id} of {} is over ({cause:?})", worker_of(pool, id)));
        let mut inner = self.lock();
        let Some(granted) = inner.granted.remove(&(number, id.0)) else { return };
        if !granted.is_active {
            return;
        }
        let won = inner.calls.get(&granted.worker).and_then(|call| call.won.clone());
        let won = won.filter(|won| (won.server, won.lease) == (number, id.0));
        let Some(won) = won else {
            inner.counts.strays += 1;
            drop(inner);
            let lease = pool.lease(id).unwrap();
            let is_renewed = lease.expires_at.is_some_and(|at| at.0 > granted.active_since.0 + lease.request.ttl.0);
            if is_renewed && granted.life == life {
                self.wrong(format!("{}: lease {id} of server{number} is nobody's and was renewed", granted.worker));
            }
            return;
        };
        drop(inner);
        if !won.is_held {
            return;
        }
        match cause {
            EndCause::ByOwner => {
                self.wrong(format!("{}: lease {id} of server{number} was given back under its holder", granted.worker));
            }
            // A fast clock ends it before its holder can know.
            EndCause::TtlPassed if !server.is_fast() => {
                self.wrong(format!(
                    "{}: lease {id} of server{number} ended, and its holder was not told",
                    granted.worker
                ));
            }
            _ => {}
        }
    }

    /// A client heard that an offer cannot be confirmed any more.
    pub fn offer_is_gone(&self, server: usize, lease: u64) {
        let worker = self.servers.get().unwrap()[server].look(|pool| worker_of(pool, LeaseId(lease)));
        self.lock().refused.insert((worker, server), Instant::now());
    }

    pub fn asked(&self, client: &str, worker: &str, shape: String, limit: Duration) {
        self.note(format!("{worker} asks for {shape}, and waits {} s", limit.as_secs_f64()));
        let call = Call { client: client.into(), shape, asked: Instant::now(), limit, won: None, is_over: false };
        self.lock().calls.insert(worker.into(), call);
    }

    /// The call came back, or was given up; at a time when these servers could be asked.
    fn over(&self, worker: &str, usable: &[usize]) {
        let mut inner = self.lock();
        let call = inner.calls.get_mut(worker).unwrap();
        call.is_over = true;
        let (took, limit) = (call.asked.elapsed(), call.limit);
        let refused: Vec<_> = inner.refused.iter().filter(|((who, _), _)| who == worker).collect();
        let late = refused.iter().find(|(_, at)| at.elapsed() > ASKS_AGAIN).map(|((_, server), _)| *server);
        drop(inner);
        if let Some(server) = late.filter(|server| usable.contains(server) && self.only_confirmations.get().is_some()) {
            self.wrong(format!("{worker} lost its offer of server{server}, and did not ask there again"));
        }
        if took > limit + MARGIN {
            self.wrong(format!(
                "{worker} waits {} s at most, and was told after {} s",
                limit.as_secs_f64(),
                took.as_secs_f64()
            ));
        }
    }

    pub fn won(&self, worker: &str, won: Won, usable: &[usize]) {
        self.note(format!("{worker} has lease {} of server{}", won.lease, won.server));
        self.over(worker, usable);
        let mut inner = self.lock();
        inner.counts.won += 1;
        inner.counts.won_waiting +=
            u64::from(inner.granted.get(&(won.server, won.lease)).is_some_and(|granted| granted.hedged));
        let call = inner.calls.get_mut(worker).unwrap();
        let client = call.client.clone();
        call.won = Some(won.clone());
        drop(inner);
        if won.by_books {
            self.books_are_right(&client, won.server);
        }
    }

    /// What one client's books give of a server's GPUs is not more than there is.
    fn books_are_right(&self, client: &str, server: usize) {
        let mut sums: BTreeMap<u32, f64> = BTreeMap::new();
        let inner = self.lock();
        let held = inner.calls.values().filter(|call| call.client == client).filter_map(|call| call.won.as_ref());
        for won in held.filter(|won| won.by_books && won.is_held && won.server == server) {
            for (gpu, fraction) in &won.devices {
                *sums.entry(*gpu).or_default() += fraction;
            }
        }
        drop(inner);
        for (gpu, sum) in sums.into_iter().filter(|(_, sum)| *sum > 1.0005) {
            self.wrong(format!("{client} gives {sum} of GPU {gpu} of server{server}"));
        }
    }

    pub fn told(&self, worker: &str, error: &str, usable: &[usize]) {
        self.note(format!("{worker} is told: {error}"));
        self.over(worker, usable);
        self.lock().counts.told += 1;
    }

    pub fn given_up(&self, worker: &str, usable: &[usize]) {
        self.note(format!("{worker} wants it no more"));
        self.over(worker, usable);
        self.lock().counts.given_up += 1;
    }

    /// Its holder holds it no more: given back, or lost.
    pub fn let_go(&self, worker: &str, is_lost: bool) {
        self.note(format!("{worker} lets go{}", if is_lost { ", it is lost" } else { "" }));
        let mut inner = self.lock();
        inner.counts.lost += u64::from(is_lost);
        if let Some(won) = inner.calls.get_mut(worker).and_then(|call| call.won.as_mut()) {
            won.is_held = false;
        }
    }

    /// Everything of a client is let go at once: it stops or dies.
    pub fn all_let_go(&self, client: &str) {
        let mut inner = self.lock();
        for won in inner.calls.values_mut().filter(|call| call.client == client).filter_map(|call| call.won.as_mut()) {
            won.is_held = false;
        }
    }

    /// Nobody who asked for the same earlier was served later; only where nothing went wrong on the way, since a place in a
    /// queue can be lost with a server or a connection.
    pub fn is_first_come_first_served(&self) {
        let served: Vec<(String, String, String, Instant, Instant)> = {
            let inner = self.lock();
            let served = inner.calls.iter().filter_map(|(worker, call)| {
                let won = call.won.as_ref()?;
                Some((worker.clone(), call.client.clone(), call.shape.clone(), call.asked, won.at))
            });
            served.collect()
        };
        for (worker, client, shape, asked, at) in &served {
            let passed = served.iter().find(|(_, other, wish, earlier, later)| {
                other == client && wish == shape && *earlier + APART < *asked && *later > *at + APART
            });
            if let Some((other, ..)) = passed {
                self.wrong(format!("{worker} came after {other} and was served before it"));
            }
        }
    }

    /// Every call came to an end.
    pub fn all_came_back(&self) {
        let open: Vec<String> = {
            let inner = self.lock();
            inner.calls.iter().filter(|(_, call)| !call.is_over).map(|(worker, _)| worker.clone()).collect()
        };
        for worker in open {
            self.wrong(format!("{worker} was never told anything"));
        }
    }

    pub fn forget(&self, client: &str) {
        let mut inner = self.lock();
        for call in inner.calls.values_mut().filter(|call| call.client == client) {
            call.is_over = true;
        }
    }
}

fn worker_of(pool: &Pool, lease: LeaseId) -> String {
    let lease = pool.lease(lease);
    lease.and_then(|lease| lease.request.worker_id.as_ref()).map(ToString::to_string).unwrap_or_default()
}
