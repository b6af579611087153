//! What an endpoint may hold for this client though nobody wants it: taken back now, or when the endpoint answers again.
//!
//! Where only the key of a request is known, it is asked once more under that key and then released: the same request is
//! the same lease, and one that never arrived cannot arrive later.

use std::sync::Arc;

use gpupool_api::RequestBody;
use tokio::runtime::Handle;

use super::place::{Place, is_fault};
use crate::{ClientError, IdempotencyKey};

/// Something nobody wants any more.
#[derive(Debug, Clone)]
pub(super) enum Stray {
    /// A lease, waiting or granted.
    Lease(u64),
    /// A request whose answer is not known.
    Asked(Arc<RequestBody>, IdempotencyKey),
}

/// Gives something back, in the background.
pub(super) fn give_back(runtime: &Handle, place: &Arc<Place>, stray: Stray) {
    let (place, under_way) = (place.clone(), place.returns.begin());
    runtime.spawn(async move {
        take_back(&place, stray).await;
        drop(under_way);
    });
}

/// Gives back what could not be before: the endpoint answers again.
pub(super) async fn give_back_remembered(place: &Place) {
    loop {
        let Some(stray) = place.known().strays.pop_front() else { return };
        if !take_back(place, stray).await {
            return;
        }
    }
}

/// Whether it worked; what did not is remembered.
async fn take_back(place: &Place, stray: Stray) -> bool {
    let mut unless_done = Remembered { place, stray: Some(stray.clone()) };
    let released = match &stray {
        Stray::Lease(lease) => place.release(*lease).await.map(|_| ()),
        Stray::Asked(body, key) => release_asked(place, body, key).await,
    };
    match released {
        Err(error) if is_fault(&error) || error.is_passing() => {
            tracing::debug!(endpoint_id = place.id, %error, ?stray, "not given back yet");
            return false;
        }
        Err(error) => tracing::debug!(endpoint_id = place.id, %error, "nothing to give back"),
        Ok(()) => {}
    }
    unless_done.stray = None;
    true
}

/// Remembers what was not given back, also where the giving back is given up half way.
struct Remembered<'a> {
    place: &'a Place,
    stray: Option<Stray>,
}

impl Drop for Remembered<'_> {
    fn drop(&mut self) {
        if let Some(stray) = self.stray.take() {
            self.place.remember(stray);
        }
    }
}

async fn release_asked(place: &Place, body: &RequestBody, key: &IdempotencyKey) -> Result<(), ClientError> {
    // As one that waits: refused for want of room it would leave nothing under its key, and could still arrive later. As an
    // offer: granted here, it must not become active.
    let body = RequestBody { queue: None, hedged: true, ..body.clone() };
    let lease = place.request(&body, key).await?;
    place.release(lease.id).await.map(|_| ())
}
