//! A request on its way: what is wanted, by whom, and until when.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::problem::Problem;
use gpupool_core::Request;
use tokio::time::Instant;

use super::running::Running;
use super::settings::Settings;
use super::updates::Update;
use crate::ClientError;

/// What somebody wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// As it is sent to those who decide.
    pub body: Arc<RequestBody>,
    pub worker_id: Arc<str>,
    pub asked: Instant,
    pub deadline: Instant,
    /// Whether it waits its turn.
    pub queues: bool,
    is_blocked: bool,
}

impl Wanted {
    /// Fills in what the client is set up with, and refuses what no server would take.
    pub fn new(mut body: RequestBody, settings: &Settings, places: usize) -> Result<Self, ClientError> {
        body.memory_threshold.get_or_insert(settings.memory_threshold);
        body.utilization_threshold.get_or_insert(settings.utilization_threshold);
        let worker_id = body.worker_id.get_or_insert_with(worker_id).clone();
        let asked = Instant::now();
        let limit = body.wait_limit_secs.take().map_or(Ok(settings.worker_timeout), |secs| {
            Duration::try_from_secs_f64(secs)
                .map_err(|_| invalid("wait_limit_secs", &secs.to_string(), "a number of seconds that is not negative"))
        })?;
        let queues = body.queue.take().unwrap_or(true);
        if body.max_duration_secs.is_none() {
            body.max_duration_secs = settings.stale_age.map(|age| age.as_secs_f64());
        }
        body.wait_secs = None;
        body.hedged = places > 1;
        Request::try_from(body.clone()).map_err(|error| invalid(error.field, &error.value, error.allowed))?;
        // Further off than anybody waits; an instant cannot be any time.
        let deadline = asked.checked_add(limit).unwrap_or(asked + Duration::from_secs(86_400 * 365));
        Ok(Self { body: Arc::new(body), worker_id, asked, deadline, queues, is_blocked: false })
    }

    /// The same, to be granted at once or not at all, and active at once.
    pub fn at_once(&self) -> Arc<RequestBody> {
        Arc::new(RequestBody { queue: Some(false), hedged: false, ..(*self.body).clone() })
    }

    pub fn too_long(&self) -> ClientError {
        ClientError::WaitedTooLong { worker_id: self.worker_id.to_string(), after: self.deadline - self.asked }
    }

    /// It waits; told once.
    pub fn blocked(&mut self, running: &Running, place: usize) {
        if std::mem::replace(&mut self.is_blocked, true) {
            return;
        }
        let endpoint_id = running.places()[place].id.clone();
        tracing::info!(worker_id = %self.worker_id, endpoint_id, "worker blocked: it waits for a GPU");
        running.tell(Update::Blocked { worker_id: self.worker_id.to_string() });
    }

    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }
}

/// A name that no other request of this process has, whichever client it is made by.
fn worker_id() -> Arc<str> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    format!("worker-{}-{number}", std::process::id()).into()
}

fn invalid(field: &str, value: &str, allowed: &str) -> ClientError {
    ClientError::Problem(Box::new(Problem {
        kind: "about:blank".into(),
        title: "Unprocessable Entity".into(),
        status: 422,
        code: "invalid".into(),
        detail: format!("{field} is {value}, and must be {allowed}"),
        field: Some(field.into()),
        value: Some(value.into()),
        allowed: Some(allowed.into()),
    }))
}
