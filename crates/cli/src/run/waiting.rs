//! Waiting for our turn: shows how it goes, ends when told to, and leaves nothing in the queue.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use gpupool_api::RequestBody;
use gpupool_api::pool::DeviceList;
use gpupool_client::limits::WAIT_POLL_INTERVAL;
use gpupool_client::{AgentClient, ClientError, IdempotencyKey, LeaseGuard, WaitOptions, WaitProgress};
use gpupool_confine::Signal;
use tokio::sync::watch;

use super::job::at;
use crate::output::Voice;
use crate::signals::Signals;
use crate::units::shown_finely;

/// How much later than the agent we give up waiting: only where it does not.
const WAIT_SLACK: Duration = Duration::from_secs(15);
/// How often the live line is written anew: it shows seconds.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// Holders named while waiting; the rest is counted.
const HOLDERS_NAMED: usize = 4;

/// How the waiting ended.
pub(super) enum Turn {
    Granted(LeaseGuard),
    /// We were told to end.
    Cancelled(Signal),
}

/// Asks, and waits until it is granted, refused, or no longer wanted.
pub(super) async fn wait(
    client: &AgentClient,
    body: RequestBody,
    limit: Option<Duration>,
    signals: &mut Signals,
    voice: &Voice,
) -> anyhow::Result<Turn> {
    let key = IdempotencyKey::random();
    let options = WaitOptions { key: Some(key.clone()), refresh: WAIT_POLL_INTERVAL };
    let (tell, progress) = watch::channel(None);
    let last = progress.clone();
    let granted = client.wait_until_granted(body.clone(), options, |news| drop(tell.send_replace(Some(news))));
    let over = limit.and_then(|limit| tokio::time::Instant::now().checked_add(limit)?.checked_add(WAIT_SLACK));
    let outcome = tokio::select! {
        granted = granted => granted.map(Turn::Granted).map_err(|error| advised(error, limit, last.borrow().as_ref())),
        signal = signals.next_to_end() => Ok(Turn::Cancelled(signal)),
        () = show(client, progress, voice) => Err(anyhow!("the waiting ended without an answer")),
        () = at(over) => Err(anyhow!("the agent did not say in time that the waiting is over")),
    };
    if !matches!(outcome, Ok(Turn::Granted(_))) {
        client.cancel_request(&body, &key).await;
    }
    outcome
}

/// Adds what to do next to why it was not granted.
fn advised(error: ClientError, limit: Option<Duration>, last: Option<&WaitProgress>) -> anyhow::Error {
    const LESS: &str = "ask for less (--fraction, --memory), or see who holds what: gpupool status";
    match &error {
        ClientError::Ended(lease) if lease.cause.as_deref() == Some("wait_limit_passed") => {
            let waited = limit.map(|limit| format!(" within {}", shown_finely(limit))).unwrap_or_default();
            let why = match last {
                Some(WaitProgress::Waiting { reason: Some(reason), .. }) => reason.clone(),
                _ => error.to_string(),
            };
            anyhow!("no GPU was granted{waited} ({why}): wait longer (--wait), {LESS}")
        }
        ClientError::Problem(problem) if problem.code == "no_capacity" => {
            anyhow!("{error}: wait for it (without --no-wait), {LESS}")
        }
        _ => error.into(),
    }
}

/// Shows how it goes for as long as it goes.
async fn show(client: &AgentClient, mut progress: watch::Receiver<Option<WaitProgress>>, voice: &Voice) {
    let begun = Instant::now();
    let mut line = voice.live_line();
    let mut text = String::new();
    loop {
        let tick = if line.is_some() { LINE_EVERY } else { Duration::MAX };
        match tokio::time::timeout(tick, progress.changed()).await {
            // Nobody tells any more: the waiting is over, which is said elsewhere.
            Ok(Err(_)) => return std::future::pending().await,
            Ok(Ok(())) => {
                let Some(news) = progress.borrow_and_update().clone() else { continue };
                let holders = client.devices().await.map(|devices| holders(&devices)).unwrap_or_default();
                let before = std::mem::replace(&mut text, sentence(&news, &holders));
                if text != before && line.is_none() {
                    voice.note(&text);
                }
            }
            // Another second went by.
            Err(_) => {}
        }
        if let Some(line) = line.as_mut().filter(|_| !text.is_empty()) {
            line.show(&format!("gpupool: {} · {text}", shown_finely(begun.elapsed())));
        }
    }
}

fn sentence(news: &WaitProgress, holders: &str) -> String {
    let held = if holders.is_empty() { String::new() } else { format!(" · {holders}") };
    format!("{news}{held}")
}

/// Who holds what: `GPU 0 alice, GPU 1 bob and 2 more`.
fn holders(devices: &DeviceList) -> String {
    let held: Vec<String> = devices
        .devices
        .iter()
        .filter(|device| !device.leases.is_empty())
        .map(|device| {
            let mut owners: Vec<&str> = device.leases.iter().map(|lease| lease.owner.as_str()).collect();
            owners.dedup();
            format!("GPU {} {}", device.gpu_id, owners.join("+"))
        })
        .collect();
    if held.is_empty() {
        return String::new();
    }
    let named = held.iter().take(HOLDERS_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match held.len().saturating_sub(HOLDERS_NAMED) {
        0 => format!("held: {named}"),
        more => format!("held: {named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(gpu_id: u32, owners: &[&str]) -> serde_json::Value {
        let lease = |owner: &&str| {
            json!({"id": 1, "owner": owner, "worker_id": null, "fraction": 0.5, "memory_mib": null, "draining": false,
                   "granted_at": null})
        };
        json!({"gpu_id": gpu_id, "node": "n", "uuid": "u", "vendor": "nvidia", "name": "H100", "memory_mib": null,
               "memory_used_mib": null, "utilization_percent": null, "temperature_c": null, "power_w": null,
               "health": "healthy", "health_reason": null, "cordoned": false, "closed": null, "promised": 0.0,
               "promised_memory_mib": 0, "leases": owners.iter().map(lease).collect::<Vec<_>>(), "foreign": null,
               "processes": [], "processes_complete": true, "partition": null, "labels": {}, "timestamp": null,
               "stale": false})
    }

    #[test]
    fn holders_are_named_and_the_rest_is_counted() {
        let told = |devices: Vec<serde_json::Value>| {
            holders(&serde_json::from_value(json!({"devices": devices, "timestamp": "t"})).unwrap())
        };
        assert_eq!(told(vec![device(0, &[])]), "");
        assert_eq!(told(vec![device(0, &["ann", "bob"]), device(1, &["ann"])]), "held: GPU 0 ann+bob, GPU 1 ann");
        let many = (0..7).map(|id| device(id, &["ann"])).collect();
        assert_eq!(told(many), "held: GPU 0 ann, GPU 1 ann, GPU 2 ann, GPU 3 ann and 3 more");
    }
}
