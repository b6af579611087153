//! Waiting for events and conditions instead of sleeping.

use std::time::Duration;

use gpupool_api::events::EventBody;
use gpupool_client::{AgentClient, EventStream};

use crate::DEADLINE;

/// Poll interval for conditions without an event.
const CONDITION_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Observer of an agent's events since its creation; misses none, even across restarts of the agent.
#[derive(Debug)]
pub struct EventWatcher {
    events: EventStream,
    /// Events that did not match, for the failure message.
    other_events: Vec<EventBody>,
}

impl EventWatcher {
    /// Observes events from now on.
    pub async fn new(client: &AgentClient) -> Self {
        let events = within_deadline("the stream of events", client.events(None)).await;
        Self { events: events.expect("the event stream of the agent"), other_events: Vec::new() }
    }

    /// Waits for the next matching event. Panics with the other events after the deadline.
    pub async fn wait_for(&mut self, what: &str, matches: impl Fn(&EventBody) -> bool) -> EventBody {
        let found = async {
            loop {
                let (_, event) = self.events.next().await.expect("the event stream of the agent");
                if matches(&event) {
                    return event;
                }
                self.other_events.push(event);
            }
        };
        match tokio::time::timeout(DEADLINE, found).await {
            Ok(event) => event,
            Err(_) => panic!("waited {DEADLINE:?} for {what}; other events: {:#?}", self.other_events),
        }
    }

    /// Waits for the next event of this kind about this lease.
    pub async fn wait_for_lease(&mut self, kind: &str, lease: u64) -> EventBody {
        self.wait_for(&format!("{kind} of lease {lease}"), |event| event.kind == kind && event.lease == Some(lease))
            .await
    }

    /// Waits for the next event of this kind about this device.
    pub async fn wait_for_device(&mut self, kind: &str, gpu_id: u32) -> EventBody {
        let matches = |event: &EventBody| event.kind == kind && event.gpu_ids.contains(&gpu_id);
        self.wait_for(&format!("{kind} of GPU {gpu_id}"), matches).await
    }
}

/// Waits for a future. Panics with its description after the deadline.
pub async fn within_deadline<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited {DEADLINE:?} for {what}"),
    }
}

/// Polls a condition without an event until it has a value.
pub async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = condition().await {
                return found;
            }
            tokio::time::sleep(CONDITION_POLL_INTERVAL).await;
        }
    };
    within_deadline(what, found).await
}
