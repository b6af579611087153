//! A started client: its tasks and the assignments it holds.
//!
//! Each endpoint has a poller task and a queue task; both end when the client is stopped or dropped. Leases live on
//! until they are released, dropped or lost.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use gpupool_api::lease::LeaseDevice;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use super::arrival_order::{ArrivalOrder, TicketSet};
use super::builder::ClientSettings;
use super::change_notifier::{ChangeNotifier, ChangeObserver, PendingWork};
use super::direct_request::RetryBudget;
use super::endpoint_poller::poll_endpoint;
use super::endpoint_queue::{COMMANDS_PER_WAITER, EndpointQueue, EndpointWaiter, QueueCommand};
use super::endpoint_state::EndpointState;
use super::load_balancer::LoadBalancer;
use super::status::{StatusPublisher, StatusUpdate};
use crate::endpoint::matches_endpoint;
use crate::limits::MAX_WAITING_REQUESTS;
use crate::{ClientError, random};

/// State of a client that outlives stop and start.
#[derive(Debug)]
pub(super) struct ClientCore {
    pub settings: ClientSettings,
    pub endpoints: Vec<Arc<EndpointState>>,
    pub availability: Arc<ChangeNotifier>,
    pub balancer: Mutex<LoadBalancer>,
    pub retry_budget: Mutex<RetryBudget>,
    pub counters: RequestCounters,
    pub pending_work: Arc<PendingWork>,
    /// Calls that wait for an available endpoint.
    pub queued_for_retry: Arc<PendingWork>,
    pub arrival_order: Arc<ArrivalOrder>,
    pub publisher: StatusPublisher,
}

/// Totals since the client was created.
#[derive(Debug, Default)]
pub(super) struct RequestCounters {
    pub last_assignment: AtomicU64,
    pub requests: AtomicU64,
    pub granted: AtomicU64,
    pub failed: AtomicU64,
}

impl ClientCore {
    pub(super) fn new(
        settings: ClientSettings,
        endpoints: Vec<Arc<EndpointState>>,
        availability: Arc<ChangeNotifier>,
        pending_work: Arc<PendingWork>,
    ) -> Self {
        Self {
            balancer: Mutex::new(LoadBalancer::new(settings.strategy, endpoints.len(), random::random_fraction)),
            retry_budget: Mutex::new(RetryBudget::new()),
            counters: RequestCounters::default(),
            pending_work,
            queued_for_retry: Arc::default(),
            arrival_order: Arc::default(),
            publisher: StatusPublisher::new(),
            settings,
            endpoints,
            availability,
        }
    }

    /// Finds an endpoint by its id, its host and port, or its address.
    pub(super) fn find_endpoint(&self, name: &str) -> Option<&Arc<EndpointState>> {
        self.endpoints.iter().find(|endpoint| matches_endpoint(name, &endpoint.id, endpoint.agent.endpoint()))
    }

    pub(super) fn is_any_usable(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.is_usable())
    }
}

/// A held assignment.
#[derive(Debug, Clone)]
pub(super) struct ActiveAssignment {
    pub endpoint: usize,
    pub lease: u64,
    pub devices: Vec<LeaseDevice>,
    pub worker_id: Arc<str>,
    pub assigned_at: SystemTime,
}

/// Permit to wait in the endpoint queues; returned after the request has left all of them.
pub(super) type WaitPermit = Arc<OwnedSemaphorePermit>;

#[derive(Debug)]
pub(super) struct RunningClient {
    pub core: Arc<ClientCore>,
    pub runtime: Handle,
    queues: Vec<mpsc::Sender<QueueCommand>>,
    wait_permits: Arc<Semaphore>,
    waiters: Mutex<TicketSet>,
    assignments: Mutex<BTreeMap<u64, ActiveAssignment>>,
    /// Notified when the client stops.
    stop_notifier: Arc<ChangeNotifier>,
}

impl RunningClient {
    /// Starts all tasks on the current runtime.
    pub(super) fn start(core: &Arc<ClientCore>) -> Arc<Self> {
        Self::start_with_limit(core, MAX_WAITING_REQUESTS)
    }

    /// Same as [`Self::start`] with another limit of waiting requests.
    pub(super) fn start_with_limit(core: &Arc<ClientCore>, max_waiting: usize) -> Arc<Self> {
        let stop_notifier: Arc<ChangeNotifier> = Arc::default();
        let queues = core.endpoints.iter().map(|endpoint| {
            // Ends when the client stops.
            tokio::spawn(poll_endpoint(core.clone(), endpoint.clone(), stop_notifier.observe_from_start()));
            // Capacity for every possible command: sending one, or dropping a request, never blocks.
            let (commands, command_receiver) = mpsc::channel(COMMANDS_PER_WAITER * max_waiting);
            // Ends when the client drops the sender of its commands.
            tokio::spawn(EndpointQueue::new(endpoint.clone()).run(command_receiver, core.availability.observe()));
            commands
        });
        Arc::new(Self {
            queues: queues.collect(),
            wait_permits: Arc::new(Semaphore::new(max_waiting)),
            core: core.clone(),
            runtime: Handle::current(),
            waiters: Mutex::default(),
            assignments: Mutex::default(),
            stop_notifier,
        })
    }

    /// Ends all tasks and fails waiting requests.
    pub(super) fn stop(&self) {
        self.stop_notifier.notify();
    }

    /// Observes the stop of the client, including an earlier one.
    pub(super) fn observe_stop(&self) -> ChangeObserver {
        self.stop_notifier.observe_from_start()
    }

    pub(super) fn endpoints(&self) -> &[Arc<EndpointState>] {
        &self.core.endpoints
    }

    /// Waits for a free permit to wait, in the order of the calls.
    pub(super) async fn acquire_wait_permit(&self) -> WaitPermit {
        match Arc::clone(&self.wait_permits).acquire_owned().await {
            Ok(permit) => Arc::new(permit),
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// Adds a request to every endpoint queue, in the same order in each.
    pub(super) fn enter_queues(&self, waiter: impl Fn(u64) -> EndpointWaiter) -> u64 {
        let mut waiters = lock_unpoisoned(&self.waiters);
        let id = waiters.issue();
        for endpoint in 0..self.queues.len() {
            self.send_command(endpoint, QueueCommand::Enter(waiter(id)));
        }
        id
    }

    /// Removes a request from every queue; only the winner keeps its lease.
    pub(super) fn leave_queues(&self, waiter: u64, winner: Option<usize>, wait_permit: &WaitPermit) {
        if !lock_unpoisoned(&self.waiters).numbers.remove(&waiter) {
            return;
        }
        for endpoint in 0..self.queues.len() {
            let (_pending_work, _wait_permit) = (self.core.pending_work.begin(), wait_permit.clone());
            let keeps_lease = winner == Some(endpoint);
            self.send_command(endpoint, QueueCommand::Leave { waiter, keeps_lease, _pending_work, _wait_permit });
        }
    }

    /// Waits until a condition on the endpoints is met; `false` if the client stops first.
    pub(super) async fn wait_until(&self, is_met: impl Fn() -> bool) -> bool {
        let (mut availability, mut stopping) = (self.core.availability.observe(), self.observe_stop());
        while !is_met() {
            tokio::select! {
                biased;
                () = stopping.changed() => return false,
                () = availability.changed() => {}
            }
        }
        true
    }

    /// Returns the number of waiting requests.
    pub(super) fn waiting_count(&self) -> usize {
        lock_unpoisoned(&self.waiters).numbers.len()
    }

    pub(super) fn send_command(&self, endpoint: usize, command: QueueCommand) {
        // A queue that has ended has released everything.
        let sent = self.queues[endpoint].try_send(command);
        debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "the queue has capacity for all possible commands");
    }

    pub(super) fn assignments(&self) -> MutexGuard<'_, BTreeMap<u64, ActiveAssignment>> {
        lock_unpoisoned(&self.assignments)
    }

    pub(super) fn publish(&self, update: StatusUpdate) {
        self.core.publisher.publish(update);
    }

    /// Returns the error if no endpoint is available.
    pub(super) fn unavailable_error(&self) -> ClientError {
        let endpoints = &self.core.endpoints;
        if let [endpoint] = endpoints.as_slice()
            && let Some(at) = endpoint.lock_record().breaker.next_probe()
        {
            let retry_in = at.saturating_duration_since(Instant::now());
            return ClientError::BreakerOpen { endpoint_id: endpoint.id.clone(), retry_in };
        }
        let causes = endpoints.iter().map(|endpoint| (endpoint.id.clone(), endpoint.failure_summary())).collect();
        ClientError::AllEndpointsUnavailable { causes }
    }
}

impl Drop for RunningClient {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Locks a mutex; no code here panics while it holds a lock.
pub(super) fn lock_unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps until an instant; forever without one.
pub(super) async fn sleep_until_some(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use gpupool_api::RequestBody;

    use super::super::builder::ClientBuilder;
    use super::super::direct_request::PreparedRequest;
    use super::super::wait_everywhere::wait_everywhere;
    use super::*;
    use crate::transport::{ExchangeFuture, HttpRequest, Transport};

    /// A transport that never responds.
    #[derive(Debug)]
    struct SilentTransport;

    impl Transport for SilentTransport {
        fn exchange(&self, _: HttpRequest) -> ExchangeFuture<'_> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_for_a_permit_until_another_leaves_or_its_limit_passes() {
        let builder = ClientBuilder::default().endpoint("http://silent");
        let client = builder.transport(|_| Arc::new(SilentTransport)).build().unwrap();
        let core = client.handle.core.clone();
        let running = RunningClient::start_with_limit(&core, 2);
        let request = |secs: u64| {
            let body = RequestBody { wait_limit_secs: Some(secs as f64), ..RequestBody::default() };
            let prepared = PreparedRequest::new(body, &core.settings, 1).unwrap();
            let (running, ticket) = (running.clone(), core.arrival_order.issue_ticket());
            tokio::spawn(async move { wait_everywhere(&running, prepared, ticket).await })
        };
        let wait_for_waiters = async |numbers: [u64; 2]| {
            while lock_unpoisoned(&running.waiters).numbers != BTreeSet::from(numbers) {
                tokio::task::yield_now().await;
            }
        };
        let (first, second) = (request(3_000), request(3_000));
        wait_for_waiters([1, 2]).await;
        let error = request(10).await.unwrap().unwrap_err();
        assert!(matches!(error, ClientError::WaitedTooLong { .. }), "{error}");

        let third = request(3_000);
        first.abort();
        let entered = tokio::time::timeout(Duration::from_secs(60), wait_for_waiters([2, 3])).await;
        entered.expect("the third gets the permit of the first");
        running.stop();
        for stopped in [second, third] {
            assert!(matches!(stopped.await.unwrap(), Err(ClientError::NotStarted { .. })));
        }
    }
}
