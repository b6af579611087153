//! Grants that an endpoint may still hold for this client although no caller wants them: released now, or when the
//! endpoint responds again.
//!
//! If only the key of a request is known, the request is sent again under that key and then released. The key
//! identifies the lease, so the original request has no effect if it arrives later.

use std::sync::Arc;

use gpupool_api::RequestBody;
use tokio::runtime::Handle;

use super::endpoint_state::{EndpointState, is_fault};
use crate::{ClientError, IdempotencyKey};

/// A grant without a caller.
#[derive(Debug, Clone)]
pub(super) enum OrphanedGrant {
    /// A queued or granted lease.
    Lease(u64),
    /// A request whose response is unknown.
    Unanswered(Arc<RequestBody>, IdempotencyKey),
}

/// Releases a grant in the background.
pub(super) fn release_in_background(runtime: &Handle, endpoint: &Arc<EndpointState>, orphan: OrphanedGrant) {
    let (endpoint, pending_work) = (endpoint.clone(), endpoint.pending_work.begin());
    // Ends with the response or its time limit; stopping the client waits for it.
    runtime.spawn(async move {
        release_or_remember(&endpoint, orphan).await;
        drop(pending_work);
    });
}

/// Releases the remembered grants of an endpoint that responds again.
pub(super) async fn release_remembered(endpoint: &EndpointState) {
    loop {
        let Some(orphan) = endpoint.lock_record().orphans.pop_front() else { return };
        if !release_or_remember(endpoint, orphan).await {
            return;
        }
    }
}

/// Releases a grant; on failure remembers it and returns `false`.
async fn release_or_remember(endpoint: &EndpointState, orphan: OrphanedGrant) -> bool {
    let mut remember_on_drop = RememberOnDrop { endpoint, orphan: Some(orphan.clone()) };
    let released = match &orphan {
        OrphanedGrant::Lease(lease) => endpoint.release(*lease).await.map(|_| ()),
        OrphanedGrant::Unanswered(body, key) => release_unanswered(endpoint, body, key).await,
    };
    match released {
        Err(error) if is_fault(&error) || error.is_transient() => {
            tracing::debug!(endpoint_id = endpoint.id, %error, ?orphan, "release failed; retried later");
            return false;
        }
        Err(error) => tracing::debug!(endpoint_id = endpoint.id, %error, "nothing to release"),
        Ok(()) => {}
    }
    remember_on_drop.orphan = None;
    true
}

/// Remembers a grant that was not released, also if the release is dropped half way.
struct RememberOnDrop<'a> {
    endpoint: &'a EndpointState,
    orphan: Option<OrphanedGrant>,
}

impl Drop for RememberOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(orphan) = self.orphan.take() {
            self.endpoint.remember_orphan(orphan);
        }
    }
}

async fn release_unanswered(
    endpoint: &EndpointState,
    body: &RequestBody,
    key: &IdempotencyKey,
) -> Result<(), ClientError> {
    // As a queued request: a refusal for lack of capacity would leave nothing under its key, and the original could
    // still arrive later. As a hedged request: a grant must not become active.
    let body = RequestBody { queue: None, hedged: true, ..body.clone() };
    let lease = endpoint.request(&body, key).await?;
    endpoint.release(lease.id).await.map(|_| ())
}
