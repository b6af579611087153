//! Waiting for what happens, in place of sleeping and hoping.

use std::time::Duration;

use gpupool_api::events::EventBody;
use gpupool_client::{AgentClient, EventStream};

use crate::DEADLINE;

/// Between two looks at a state that nobody tells of.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What happens at an agent since it was made; nothing is missed, through restarts of the agent too.
#[derive(Debug)]
pub struct EventWatcher {
    events: EventStream,
    /// Events that were not what was waited for, for the failure message.
    passed: Vec<EventBody>,
}

impl EventWatcher {
    /// Follows what happens from now on.
    pub async fn new(client: &AgentClient) -> Self {
        let events = within_deadline("the stream of events", client.events(None)).await;
        Self { events: events.expect("an agent tells its events"), passed: Vec::new() }
    }

    /// The first event from here on that is wanted. Panics with what happened instead.
    pub async fn wait_for(&mut self, what: &str, wanted: impl Fn(&EventBody) -> bool) -> EventBody {
        let found = async {
            loop {
                let (_, event) = self.events.next().await.expect("an agent tells its events");
                if wanted(&event) {
                    return event;
                }
                self.passed.push(event);
            }
        };
        match tokio::time::timeout(DEADLINE, found).await {
            Ok(event) => event,
            Err(_) => panic!("waited {DEADLINE:?} for {what}; what happened was {:#?}", self.passed),
        }
    }

    /// The first event of this kind about this lease.
    pub async fn wait_for_lease(&mut self, kind: &str, lease: u64) -> EventBody {
        self.wait_for(&format!("{kind} of lease {lease}"), |event| event.kind == kind && event.lease == Some(lease))
            .await
    }

    /// The first event of this kind about this device.
    pub async fn wait_for_device(&mut self, kind: &str, gpu_id: u32) -> EventBody {
        let wanted = |event: &EventBody| event.kind == kind && event.gpu_ids.contains(&gpu_id);
        self.wait_for(&format!("{kind} of GPU {gpu_id}"), wanted).await
    }
}

/// Waits, and panics with what was waited for where it takes too long.
pub async fn within_deadline<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited {DEADLINE:?} for {what}"),
    }
}

/// Looks again and again until there is an answer: for states that nobody tells of.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    within_deadline(what, found).await
}
