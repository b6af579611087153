//! Waits for the lease of `gpupool run`: shows the progress, stops on a signal or at the wait limit, and leaves nothing
//! in the queue.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use gpupool_api::RequestBody;
use gpupool_api::pool::DeviceList;
use gpupool_client::limits::WAIT_POLL_INTERVAL;
use gpupool_client::{AgentClient, ClientError, IdempotencyKey, LeaseGuard, WaitOptions, WaitProgress};
use gpupool_confine::Signal;
use tokio::sync::watch;

use super::command::sleep_until;
use crate::output::MessagePrinter;
use crate::signals::SignalListener;
use crate::units::format_short_duration;

/// Extra time to wait for the agent's own wait limit.
const WAIT_MARGIN: Duration = Duration::from_secs(15);
/// Interval between updates of the progress line, which shows seconds.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// Number of lease owners in the progress line; the others are counted.
const MAX_NAMED_HOLDERS: usize = 4;

pub(super) enum LeaseWaitOutcome {
    Granted(LeaseGuard),
    /// A signal ended the wait.
    Cancelled(Signal),
}

/// Requests the lease and waits until it is granted, refused or cancelled.
pub(super) async fn wait_for_lease(
    client: &AgentClient,
    body: RequestBody,
    limit: Option<Duration>,
    signals: &mut SignalListener,
    printer: &MessagePrinter,
) -> anyhow::Result<LeaseWaitOutcome> {
    let key = IdempotencyKey::random();
    let options = WaitOptions { key: Some(key.clone()), refresh: WAIT_POLL_INTERVAL };
    let (tell, progress) = watch::channel(None);
    let last = progress.clone();
    let granted =
        client.wait_until_granted(body.clone(), options, |progress_now| drop(tell.send_replace(Some(progress_now))));
    let deadline = limit.and_then(|limit| tokio::time::Instant::now().checked_add(limit)?.checked_add(WAIT_MARGIN));
    let outcome = tokio::select! {
        granted = granted => granted.map(LeaseWaitOutcome::Granted).map_err(|error| with_advice(error, limit, last.borrow().as_ref())),
        signal = signals.next_termination() => Ok(LeaseWaitOutcome::Cancelled(signal)),
        () = show_progress(client, progress, printer) => Err(anyhow!("the wait ended without a response")),
        () = sleep_until(deadline) => Err(anyhow!("the agent did not end the wait in time")),
    };
    if !matches!(outcome, Ok(LeaseWaitOutcome::Granted(_))) {
        client.cancel_request(&body, &key).await;
    }
    outcome
}

/// Adds the next step to the reason why the request was not granted.
fn with_advice(error: ClientError, limit: Option<Duration>, last: Option<&WaitProgress>) -> anyhow::Error {
    const LESS: &str = "request less (--fraction, --memory), or run `gpupool status` to see the leases";
    match &error {
        ClientError::Ended(lease) if lease.cause.as_deref() == Some("wait_limit_passed") => {
            let waited = limit.map(|limit| format!(" within {}", format_short_duration(limit))).unwrap_or_default();
            let why = match last {
                Some(WaitProgress::Waiting { reason: Some(reason), .. }) => reason.clone(),
                _ => error.to_string(),
            };
            anyhow!("no GPU was granted{waited} ({why}); wait longer (--wait), {LESS}")
        }
        ClientError::Problem(problem) if problem.code == "no_capacity" => {
            anyhow!("{error}; omit --no-wait to wait, {LESS}")
        }
        _ => error.into(),
    }
}

/// Shows the progress until the wait ends.
async fn show_progress(
    client: &AgentClient,
    mut progress: watch::Receiver<Option<WaitProgress>>,
    printer: &MessagePrinter,
) {
    let started_at = Instant::now();
    let mut line = printer.progress_line();
    let (mut text, mut line_text) = (String::new(), String::new());
    loop {
        let tick = if line.is_some() { LINE_INTERVAL } else { Duration::MAX };
        match tokio::time::timeout(tick, progress.changed()).await {
            // The sender is gone: the wait is over, and the caller reports the result.
            Ok(Err(_)) => return std::future::pending().await,
            Ok(Ok(())) => {
                let Some(progress_now) = progress.borrow_and_update().clone() else { continue };
                let holders = client.devices().await.map(|devices| describe_holders(&devices)).unwrap_or_default();
                let before = std::mem::replace(&mut text, status_text(&progress_now, &holders));
                line_text = short_status_text(&progress_now, &holders);
                if text != before && line.is_none() {
                    printer.info(&text);
                }
            }
            // The interval passed.
            Err(_) => {}
        }
        if let Some(line) = line.as_mut().filter(|_| !line_text.is_empty()) {
            line.show(&format!("gpupool: {} · {line_text}", format_short_duration(started_at.elapsed())));
        }
    }
}

fn status_text(progress_now: &WaitProgress, holders: &str) -> String {
    let held = if holders.is_empty() { String::new() } else { format!(" · {holders}") };
    format!("{progress_now}{held}")
}

/// Formats the progress for one line of a terminal, whose end is cut off: the reason comes first.
fn short_status_text(progress_now: &WaitProgress, holders: &str) -> String {
    let (position, reason) = match progress_now {
        WaitProgress::Waiting { position, reason, .. } => (position.map(|at| format!("number {at}")), reason.clone()),
        WaitProgress::AgentAway { error, .. } => (None, Some(error.clone())),
    };
    let held = Some(holders.to_owned()).filter(|held| !held.is_empty());
    let parts: Vec<String> = [position, reason, held].into_iter().flatten().collect();
    if parts.is_empty() { "waiting".into() } else { parts.join(" · ") }
}

/// Formats the owners of leases: `GPU 0 alice, GPU 1 bob and 2 more`.
fn describe_holders(devices: &DeviceList) -> String {
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
    let named = held.iter().take(MAX_NAMED_HOLDERS).cloned().collect::<Vec<_>>().join(", ");
    match held.len().saturating_sub(MAX_NAMED_HOLDERS) {
        0 => format!("leased: {named}"),
        more => format!("leased: {named} and {more} more"),
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
    fn the_line_keeps_its_reason_at_60_columns() {
        let reason = Some("needs 1 free GPU; none is free".to_owned());
        let waiting = WaitProgress::Waiting { lease: 12_345, position: Some(12), reason };
        let line = format!("gpupool: 59 m 59 s · {}", short_status_text(&waiting, "leased: GPU 0 alice"));
        let seen: String = line.chars().take(60).collect();
        assert!(seen.contains("number 12 · needs 1 free GPU; none is"), "{line}");
    }

    #[test]
    fn lease_owners_are_named_and_the_rest_is_counted() {
        let described = |devices: Vec<serde_json::Value>| {
            describe_holders(&serde_json::from_value(json!({"devices": devices, "timestamp": "t"})).unwrap())
        };
        assert_eq!(described(vec![device(0, &[])]), "");
        assert_eq!(
            described(vec![device(0, &["ann", "bob"]), device(1, &["ann"])]),
            "leased: GPU 0 ann+bob, GPU 1 ann"
        );
        let many = (0..7).map(|id| device(id, &["ann"])).collect();
        assert_eq!(described(many), "leased: GPU 0 ann, GPU 1 ann, GPU 2 ann, GPU 3 ann and 3 more");
    }
}
