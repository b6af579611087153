//! A client that was started: the tasks that look at endpoints and wait at them, and what is held meanwhile.
//!
//! One task an endpoint looks at it, one waits there; both end when the client is stopped or dropped. Leases live on until
//! they are released, dropped or lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use gpupool_api::lease::LeaseDevice;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};

use super::balance::Balancer;
use super::builder::Settings;
use super::direct::RetryBudget;
use super::place::Place;
use super::recovery::look_on;
use super::seek::{Line, ORDERS_OF_A_WAITER, Order, Waiter};
use super::status::{StatusUpdate, Telling};
use crate::endpoint::is_meant;
use crate::limits::{DIRECT_PATIENCE, WAITING};
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
    /// Requests that wait for the endpoints to be well again.
    pub queued_for_retry: Arc<Returns>,
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
}

impl Core {
    pub(super) fn new(
        settings: Settings,
        places: Vec<Arc<Place>>,
        weather: Arc<Changes>,
        returns: Arc<Returns>,
    ) -> Self {
        Self {
            balancer: Mutex::new(Balancer::new(settings.strategy, places.len(), random::fraction)),
            budget: Mutex::new(RetryBudget::new()),
            counts: Counts::default(),
            returns,
            queued_for_retry: Arc::default(),
            turns: Arc::default(),
            telling: Telling::new(),
            settings,
            places,
            weather,
        }
    }

    /// The endpoint that somebody means by its id, its host and port, or its address.
    pub(super) fn place_called(&self, said: &str) -> Option<&Arc<Place>> {
        self.places.iter().find(|place| is_meant(said, &place.id, place.agent.endpoint()))
    }

    pub(super) fn is_any_usable(&self) -> bool {
        self.places.iter().any(|place| place.is_usable())
    }
}

/// Requests in the order they came, by number.
#[derive(Debug, Default)]
struct Arrivals {
    last: u64,
    numbers: BTreeSet<u64>,
}

impl Arrivals {
    /// One more.
    fn arrive(&mut self) -> u64 {
        self.last += 1;
        self.numbers.insert(self.last);
        self.last
    }
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

/// Keeps room in the lines for one that waits; given back when it has left all of them.
pub(super) type Admission = Arc<OwnedSemaphorePermit>;

#[derive(Debug)]
pub(super) struct Running {
    pub core: Arc<Core>,
    pub runtime: Handle,
    lines: Vec<mpsc::Sender<Order>>,
    admissions: Arc<Semaphore>,
    waiting: Mutex<Arrivals>,
    live: Mutex<BTreeMap<u64, Live>>,
    /// Changes once or more when the client stops.
    stop: Arc<Changes>,
}

impl Running {
    /// Starts all tasks, on the runtime this is called on.
    pub(super) fn start(core: &Arc<Core>) -> Arc<Self> {
        Self::start_for(core, WAITING)
    }

    /// The same, for so many requests that wait.
    pub(super) fn start_for(core: &Arc<Core>, waiting: usize) -> Arc<Self> {
        let stop: Arc<Changes> = Arc::default();
        let lines = core.places.iter().map(|place| {
            // Ends when the client stops.
            tokio::spawn(look_on(core.clone(), place.clone(), stop.follow_from_start()));
            // Room for all orders there can be: nobody who gives one, or drops a request, ever waits.
            let (orders, taken) = mpsc::channel(ORDERS_OF_A_WAITER * waiting);
            // Ends with the last sender of its orders, which this has.
            tokio::spawn(Line::new(place.clone()).run(taken, core.weather.follow()));
            orders
        });
        Arc::new(Self {
            lines: lines.collect(),
            admissions: Arc::new(Semaphore::new(waiting)),
            core: core.clone(),
            runtime: Handle::current(),
            waiting: Mutex::default(),
            live: Mutex::default(),
            stop,
        })
    }

    /// Ends all tasks; those who wait are told.
    pub(super) fn stop(&self) {
        self.stop.tell();
    }

    /// Tells of the client's stop, even if it is already over.
    pub(super) fn stopping(&self) -> Follower {
        self.stop.follow_from_start()
    }

    pub(super) fn places(&self) -> &[Arc<Place>] {
        &self.core.places
    }

    /// Waits until one more may wait at the endpoints, in the order of the calls.
    pub(super) async fn admit(&self) -> Admission {
        match Arc::clone(&self.admissions).acquire_owned().await {
            Ok(permit) => Arc::new(permit),
            // It is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// Lets one more wait at every endpoint, in the same order at each.
    pub(super) fn enter(&self, waiter: impl Fn(u64) -> Waiter) -> u64 {
        let mut waiting = locked(&self.waiting);
        let id = waiting.arrive();
        for place in 0..self.lines.len() {
            self.order(place, Order::Enter(waiter(id)));
        }
        id
    }

    /// This one waits no longer; only the winner keeps what it got.
    pub(super) fn leave(&self, waiter: u64, winner: Option<usize>, admission: &Admission) {
        if !locked(&self.waiting).numbers.remove(&waiter) {
            return;
        }
        for place in 0..self.lines.len() {
            let (_under_way, _admission) = (self.core.returns.begin(), admission.clone());
            self.order(place, Order::Leave { waiter, keeps: winner == Some(place), _under_way, _admission });
        }
    }

    /// Waits until a condition on the endpoints holds; `false` if the client stops first.
    pub(super) async fn wait_until(&self, is_so: impl Fn() -> bool) -> bool {
        let (mut weather, mut stopping) = (self.core.weather.follow(), self.stopping());
        while !is_so() {
            tokio::select! {
                biased;
                () = stopping.changed() => return false,
                () = weather.changed() => {}
            }
        }
        true
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        locked(&self.waiting).numbers.len()
    }

    pub(super) fn order(&self, place: usize, order: Order) {
        // A line that is gone has given everything back.
        let given = self.lines[place].try_send(order);
        debug_assert!(!matches!(given, Err(TrySendError::Full(_))), "a line has room for all orders there can be");
    }

    pub(super) fn live(&self) -> MutexGuard<'_, BTreeMap<u64, Live>> {
        locked(&self.live)
    }

    pub(super) fn tell(&self, update: StatusUpdate) {
        self.core.telling.tell(update);
    }

    /// Why nobody can be asked.
    pub(super) fn unavailable(&self) -> ClientError {
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
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What is behind a lock; nothing here panics while it holds one.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until an instant; for ever, where there is none.
pub(super) async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

// Telling many that something changed.
//
// Unlike a watch channel it wakes those who wait in the order they came, so that a run can be repeated exactly.

/// Counts changes, and wakes whoever waits for one.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    count: AtomicU64,
    wake: Notify,
}

impl Changes {
    pub(super) fn tell(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.wake.notify_waiters();
    }

    /// Follows all changes, those of the past too.
    pub(super) fn follow_from_start(self: &Arc<Self>) -> Follower {
        Follower { changes: self.clone(), seen: 0 }
    }

    /// Whoever follows from now on.
    pub(super) fn follow(self: &Arc<Self>) -> Follower {
        Follower { changes: self.clone(), seen: self.count.load(Ordering::SeqCst) }
    }
}

/// Follows changes, none of which it misses.
#[derive(Debug)]
pub(crate) struct Follower {
    changes: Arc<Changes>,
    seen: u64,
}

impl Follower {
    /// What happened so far is known.
    pub(super) fn mark_seen(&mut self) {
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }

    /// Waits until something happened that was not seen; it is then.
    pub(super) async fn changed(&mut self) {
        let wake = self.changes.wake.notified();
        tokio::pin!(wake);
        // Before the count is read: whatever changes later wakes.
        wake.as_mut().enable();
        while self.changes.count.load(Ordering::SeqCst) == self.seen {
            wake.as_mut().await;
            wake.set(self.changes.wake.notified());
            wake.as_mut().enable();
        }
        self.seen = self.changes.count.load(Ordering::SeqCst);
    }
}

// What is on its way, to a server or back: counted, so that stopping can wait until nothing is.

/// How much is on its way.
#[derive(Debug, Default)]
pub(super) struct Returns {
    count: AtomicUsize,
    changes: Arc<Changes>,
}

impl Returns {
    /// One more is, until this is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> UnderWay {
        self.count.fetch_add(1, Ordering::SeqCst);
        UnderWay(self.clone())
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Waits until nothing is.
    pub(super) async fn none(&self) {
        let mut changes = self.changes.follow();
        while self.count() > 0 {
            changes.changed().await;
        }
    }
}

/// Something that is on its way.
#[derive(Debug)]
pub(super) struct UnderWay(Arc<Returns>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.changes.tell();
        }
    }
}

// The order in which requests were made, for those that are under way at once: whoever finds no room enters the queues after
// those who asked before, though their answers may come in another order.

/// Who asked and does not know yet whether there is room, by number.
#[derive(Debug, Default)]
pub(super) struct Turns {
    undecided: Mutex<Arrivals>,
    changes: Arc<Changes>,
}

impl Turns {
    /// The next one.
    pub(super) fn take(self: &Arc<Self>) -> Turn {
        Turn { turns: self.clone(), number: locked(&self.undecided).arrive() }
    }
}

/// A place in that order, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turn {
    /// Waits until nobody who came before is undecided; not for long, because one of them may ask a server that hangs.
    pub(super) async fn comes(&self) {
        let mut changes = self.turns.changes.follow();
        let is_first = || locked(&self.turns.undecided).numbers.first() == Some(&self.number);
        let comes = async {
            while !is_first() {
                changes.changed().await;
            }
        };
        let _ = timeout(DIRECT_PATIENCE, comes).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        locked(&self.turns.undecided).numbers.remove(&self.number);
        self.turns.changes.tell();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpupool_api::RequestBody;

    use super::super::builder::ClientBuilder;
    use super::super::direct::Wanted;
    use super::super::seek::seek;
    use super::*;
    use crate::transport::{ExchangeFuture, HttpRequest, Transport};

    /// A server that never answers.
    #[derive(Debug)]
    struct Silent;

    impl Transport for Silent {
        fn exchange(&self, _: HttpRequest) -> ExchangeFuture<'_> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_finds_the_lines_full_waits_until_one_leaves_or_its_time_is_up() {
        let client =
            ClientBuilder::default().endpoint("http://silent").transport(|_| Arc::new(Silent)).build().unwrap();
        let core = client.outer.core.clone();
        let running = Running::start_for(&core, 2);
        let request = |secs: u64| {
            let body = RequestBody { wait_limit_secs: Some(secs as f64), ..RequestBody::default() };
            let wanted = Wanted::new(body, &core.settings, 1).unwrap();
            let (running, turn) = (running.clone(), core.turns.take());
            tokio::spawn(async move { seek(&running, wanted, turn).await })
        };
        let until_they_are = async |numbers: [u64; 2]| {
            while locked(&running.waiting).numbers != BTreeSet::from(numbers) {
                tokio::task::yield_now().await;
            }
        };
        let (first, second) = (request(3_000), request(3_000));
        until_they_are([1, 2]).await;
        let error = request(10).await.unwrap().unwrap_err();
        assert!(matches!(error, ClientError::WaitedTooLong { .. }), "{error}");

        let third = request(3_000);
        first.abort();
        let entered = tokio::time::timeout(Duration::from_secs(60), until_they_are([2, 3])).await;
        entered.expect("the third takes the room of the first");
        running.stop();
        for stopped in [second, third] {
            assert!(matches!(stopped.await.unwrap(), Err(ClientError::NotStarted { .. })));
        }
    }

    #[tokio::test]
    async fn a_change_is_never_missed_and_told_once() {
        let changes = Arc::new(Changes::default());
        let mut follower = changes.follow();
        changes.tell();
        follower.changed().await;
        let again = tokio::time::timeout(std::time::Duration::ZERO, follower.changed()).await;
        assert!(again.is_err(), "nothing happened since");
        let waits = tokio::spawn(async move { follower.changed().await });
        tokio::task::yield_now().await;
        changes.tell();
        waits.await.unwrap();
    }
}
