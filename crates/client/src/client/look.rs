//! Looking at an endpoint: who decides there, what its GPUs do, whether it answers at all. What it answers is what balances
//! the load; that it answers is what closes its breaker again.

use std::sync::Arc;
use std::time::Duration;

use gpupool_api::stats::Stats;
use tokio::time::Instant;

use super::books::Books;
use super::capacity::{Gpu, Seen};
use super::place::{Desk, Place};
use super::running::{Core, Stopping, told};
use super::settings::Settings;
use super::stray::give_back_remembered;
use super::updates::Update;
use crate::ClientError;
use crate::backoff::Backoff;
use crate::limits::{LOOK_PAUSE, PROBE_PAUSE, ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST};

/// Looks again and again, until the client stops.
pub(super) async fn look_on(core: Arc<Core>, place: Arc<Place>, mut stop: Stopping) {
    let backoff = Backoff::between(ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST);
    let mut looker = Looker { core, place, checked: None, backoff, was_usable: false };
    loop {
        tokio::select! {
            biased;
            () = told(&mut stop) => return,
            () = looker.look() => {}
        }
        let next = looker.next_look();
        tokio::select! {
            biased;
            () = told(&mut stop) => return,
            () = tokio::time::sleep_until(next) => {}
            () = looker.place.look_now.notified() => looker.spread().await,
        }
    }
}

struct Looker {
    core: Arc<Core>,
    place: Arc<Place>,
    /// When `/health` was last asked for.
    checked: Option<Instant>,
    backoff: Backoff,
    /// Whether those who follow were told that it can be asked.
    was_usable: bool,
}

impl Looker {
    async fn look(&mut self) {
        let began = Instant::now();
        {
            let mut known = self.place.known();
            match known.breaker.probe_at() {
                Some(at) if began >= at => known.breaker.begin_probe(),
                // Not before its time, unless somebody wants it; then it was made ready.
                Some(_) => {
                    known.looks += 1;
                    drop(known);
                    self.tell_change();
                    return self.place.tell_weather();
                }
                None => {}
            }
            known.asked_since = Some(began);
        }
        let looked = self.see().await;
        self.place.known().asked_since = None;
        self.place.judge(Some(began), looked.as_ref().err());
        let is_seen = looked.is_ok();
        match looked {
            Ok(gpus) => {
                self.backoff.reset();
                self.place.known().seen = Some(Seen { at: Instant::now(), gpus: gpus.clone() });
                self.tell(Update::Statistics { endpoint_id: self.place.id.clone(), gpus });
            }
            Err(error) => {
                let mut known = self.place.known();
                // Also where it is a clear no, such as a token that is not known: it is no use.
                known.error = Some(error.to_string());
                tracing::debug!(endpoint_id = self.place.id, %error, "endpoint could not be looked at");
            }
        }
        self.place.known().looks += 1;
        self.tell_change();
        self.place.tell_weather();
        if is_seen {
            give_back_remembered(&self.place).await;
            self.check_health().await;
        }
    }

    fn tell_change(&mut self) {
        let endpoint_id = self.place.id.clone();
        let is_usable = self.place.is_usable();
        match (std::mem::replace(&mut self.was_usable, is_usable), is_usable) {
            (false, true) => self.tell(Update::EndpointUp { endpoint_id }),
            (true, false) => self.tell(Update::EndpointDown { endpoint_id, error: self.place.trouble() }),
            _ => {}
        }
    }

    /// Its GPUs, as whoever decides there has them.
    async fn see(&mut self) -> Result<Vec<Gpu>, ClientError> {
        match self.place.desk() {
            Some(Desk::Agent) => self.agents_gpus().await,
            Some(Desk::Books(books)) => self.read(&books, None).await,
            None => self.learn().await,
        }
    }

    /// Learns who decides. Only a server that has statistics and knows nothing of `/v1` leaves it to this client.
    async fn learn(&mut self) -> Result<Vec<Gpu>, ClientError> {
        let agent = &self.place.agent;
        match agent.pool().await {
            Ok(pool) if pool.authority == "agent" => {
                let gpus = self.agents_gpus().await?;
                self.decides(Desk::Agent);
                Ok(gpus)
            }
            Ok(pool) => {
                let what = format!("/v1/pool says that {:?} decides, which is not known here", pool.authority);
                Err(agent.not_ours(http::StatusCode::OK, what))
            }
            Err(ClientError::NotOurs { status: 404, .. }) => {
                let books = self.new_books();
                // The sizes of memory are only here; a server without them has the rest.
                let stats = agent.stats().await.ok();
                let gpus = self.read(&books, stats.as_ref()).await?;
                self.decides(Desk::Books(books));
                Ok(gpus)
            }
            Err(error) => Err(error),
        }
    }

    fn decides(&self, desk: Desk) {
        let authority = match desk {
            Desk::Agent => "agent",
            Desk::Books(_) => "client",
        };
        tracing::info!(endpoint_id = self.place.id, authority, "endpoint found");
        self.place.known().desk = Some(desk);
    }

    fn new_books(&self) -> Arc<Books> {
        let Settings { polling_interval, endpoint_timeout, .. } = self.core.settings;
        Arc::new(Books::new(&self.place.id, "client", polling_interval * 3 + endpoint_timeout))
    }

    async fn agents_gpus(&self) -> Result<Vec<Gpu>, ClientError> {
        Ok(self.place.agent.devices().await?.devices.into_iter().map(Gpu::from).collect())
    }

    async fn read(&self, books: &Books, stats: Option<&Stats>) -> Result<Vec<Gpu>, ClientError> {
        let summary = self.place.agent.summary().await?;
        books.take_in(&summary, stats);
        Ok(books.gpus())
    }

    async fn check_health(&mut self) {
        let now = Instant::now();
        if self.checked.is_some_and(|at| now.duration_since(at) < self.core.settings.health_check_interval) {
            return;
        }
        self.checked = Some(now);
        let health = self.place.agent.health().await.map(|health| health.status).ok();
        self.place.known().health = health;
    }

    fn next_look(&mut self) -> Instant {
        let now = Instant::now();
        let known = self.place.known();
        if let Some(at) = known.breaker.probe_at() {
            return at.max(now);
        }
        let is_half_open = !known.breaker.is_closed();
        let failed = known.error.is_some();
        drop(known);
        let interval = self.core.settings.polling_interval;
        now + match (is_half_open, failed) {
            (true, _) => PROBE_PAUSE,
            // Sooner than usual, to know soon.
            (false, true) => self.backoff.next().min(interval.max(ROUND_PAUSE_FIRST)),
            (false, false) => spread(interval),
        }
    }

    /// Many may want a look at once: one look serves all of them.
    async fn spread(&self) {
        tokio::time::sleep(LOOK_PAUSE).await;
    }

    fn tell(&self, update: Update) {
        self.core.telling.tell(update);
    }
}

/// A little sooner or later, so that many clients do not look at the same instant.
fn spread(interval: Duration) -> Duration {
    interval.mul_f64(0.95 + crate::random::fraction() / 10.0)
}
