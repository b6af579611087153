//! A client that was started: the tasks that look at endpoints and wait at them, and what is held meanwhile.
//!
//! One task an endpoint looks at it, one waits there; both end when the client is stopped or dropped. Leases live on until
//! they are released, dropped or lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use gpupool_api::lease::LeaseDevice;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::balance::Balancer;
use super::budget::RetryBudget;
use super::line::{Line, Order, Waiter};
use super::look::look_on;
use super::place::Place;
use super::returns::Returns;
use super::settings::Settings;
use super::turns::Turns;
use super::updates::{Telling, Update};
use crate::changes::{Changes, Follower};
use crate::{ClientError, random};

/// What a client is, started or not.
#[derive(Debug)]
pub(super) struct Core {
    pub settings: Settings,
    pub places: Vec<Arc<Place>>,
    pub weather: Arc<Changes>,
    pub balancer: Mutex<Balancer>,
    pub budget: Mutex<RetryBudget>,
    pub counts: Counts,
    pub returns: Arc<Returns>,
    pub turns: Arc<Turns>,
    pub telling: Telling,
}

/// What was asked for, over all runs.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub numbers: AtomicU64,
    pub requests: AtomicU64,
    pub granted: AtomicU64,
    pub failed: AtomicU64,
    /// Requests that wait for the endpoints to be well again.
    pub queued_for_retry: AtomicUsize,
}

impl Core {
    pub fn new(settings: Settings, places: Vec<Arc<Place>>, weather: Arc<Changes>, returns: Arc<Returns>) -> Self {
        Self {
            balancer: Mutex::new(Balancer::new(settings.strategy, places.len(), random::fraction)),
            budget: Mutex::new(RetryBudget::new()),
            counts: Counts::default(),
            returns,
            turns: Arc::default(),
            telling: Telling::new(),
            settings,
            places,
            weather,
        }
    }

    pub fn is_any_usable(&self) -> bool {
        self.places.iter().any(|place| place.is_usable())
    }
}

/// Who waits, in the order they came.
#[derive(Debug, Default)]
struct Waiting {
    last: u64,
    ids: BTreeSet<u64>,
}

/// An assignment that is held.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub place: usize,
    pub lease: u64,
    pub devices: Vec<LeaseDevice>,
    pub worker_id: Arc<str>,
    pub assigned_at: SystemTime,
}

#[derive(Debug)]
pub(super) struct Running {
    pub core: Arc<Core>,
    pub runtime: Handle,
    lines: Vec<mpsc::UnboundedSender<Order>>,
    waiting: Mutex<Waiting>,
    live: Mutex<BTreeMap<u64, Live>>,
    stop: Arc<Stop>,
}

impl Running {
    /// Starts all tasks, on the runtime this is called on.
    pub fn start(core: &Arc<Core>) -> Arc<Self> {
        let stop = Arc::new(Stop::default());
        let lines = core.places.iter().map(|place| {
            tokio::spawn(look_on(core.clone(), place.clone(), Stopping::new(&stop)));
            let (orders, taken) = mpsc::unbounded_channel();
            tokio::spawn(Line::new(place.clone()).run(taken, core.weather.follow()));
            orders
        });
        Arc::new(Self {
            lines: lines.collect(),
            core: core.clone(),
            runtime: Handle::current(),
            waiting: Mutex::default(),
            live: Mutex::default(),
            stop,
        })
    }

    /// Ends all tasks; those who wait are told.
    pub fn stop(&self) {
        self.stop.is_told.store(true, Ordering::SeqCst);
        self.stop.changes.tell();
    }

    pub fn stopping(&self) -> Stopping {
        Stopping::new(&self.stop)
    }

    pub fn places(&self) -> &[Arc<Place>] {
        &self.core.places
    }

    pub fn weather(&self) -> Follower {
        self.core.weather.follow()
    }

    /// Lets one more wait at every endpoint, in the same order at each.
    pub fn enter(&self, waiter: impl Fn(u64) -> Waiter) -> u64 {
        let mut waiting = locked(&self.waiting);
        waiting.last += 1;
        let id = waiting.last;
        waiting.ids.insert(id);
        for place in 0..self.lines.len() {
            self.order(place, Order::Enter(waiter(id)));
        }
        id
    }

    /// This one waits no longer; only the winner keeps what it got.
    pub fn leave(&self, waiter: u64, winner: Option<usize>) {
        if !locked(&self.waiting).ids.remove(&waiter) {
            return;
        }
        for place in 0..self.lines.len() {
            self.order(
                place,
                Order::Leave { waiter, keeps: winner == Some(place), _under_way: self.core.returns.begin() },
            );
        }
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        locked(&self.waiting).ids.len()
    }

    pub fn order(&self, place: usize, order: Order) {
        // A line that is gone has given everything back.
        let _ = self.lines[place].send(order);
    }

    pub fn live(&self) -> MutexGuard<'_, BTreeMap<u64, Live>> {
        locked(&self.live)
    }

    pub fn tell(&self, update: Update) {
        self.core.telling.tell(update);
    }

    /// Why nobody can be asked.
    pub fn unavailable(&self) -> ClientError {
        let places = &self.core.places;
        if let [place] = places.as_slice()
            && let Some(at) = place.known().breaker.probe_at()
        {
            let again_in = at.saturating_duration_since(Instant::now());
            return ClientError::BreakerOpen { endpoint_id: place.id.clone(), again_in };
        }
        let causes = places.iter().map(|place| (place.id.clone(), place.trouble())).collect();
        ClientError::AllEndpointsUnavailable { causes }
    }

    /// The next number of an assignment.
    pub fn number(&self) -> u64 {
        self.core.counts.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether the client was told to stop.
#[derive(Debug, Default)]
struct Stop {
    is_told: AtomicBool,
    changes: Arc<Changes>,
}

/// Learns when the client stops.
#[derive(Debug)]
pub(super) struct Stopping {
    stop: Arc<Stop>,
    changes: Follower,
}

impl Stopping {
    fn new(stop: &Arc<Stop>) -> Self {
        Self { stop: stop.clone(), changes: stop.changes.follow() }
    }
}

/// What is behind a lock; nothing here panics while it holds one.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the client stops.
pub(super) async fn told(stopping: &mut Stopping) {
    while !stopping.stop.is_told.load(Ordering::SeqCst) {
        stopping.changes.changed().await;
    }
}

/// Waits until an instant; for ever, where there is none.
pub(super) async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
