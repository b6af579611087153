//! How long answers take, by route, method and kind of status.
//!
//! Counted for every request, so without a lock and, after the first of its kind, without memory: every route has its
//! place before the first request, and a place gets its ranges when it is first needed.

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::http::{Method, StatusCode};

use super::distribution::{ANSWERS, Distribution};
use super::page::Page;

const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "other"];
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// What is told as the route of a request that no route is for.
const NO_ROUTE: &str = "none";

#[derive(Debug, Default)]
pub(super) struct Requests {
    routes: OnceLock<HashMap<String, Route>>,
    no_route: Route,
    running: AtomicI64,
}

#[derive(Debug, Default)]
struct Route([[OnceLock<Box<Distribution>>; CLASSES.len()]; METHODS.len()]);

impl Requests {
    /// Says which routes there are; once, before the first request.
    pub fn know(&self, routes: impl IntoIterator<Item = String>) {
        let known = self.routes.set(routes.into_iter().map(|route| (route, Route::default())).collect());
        debug_assert!(known.is_ok(), "routes are told once");
    }

    pub fn answered(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let route = self.routes.get().and_then(|routes| routes.get(route)).unwrap_or(&self.no_route);
        let class = usize::from(status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        let place = route.0[place_of(method)][class].get_or_init(|| Box::new(Distribution::new(&ANSWERS)));
        place.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn begin(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(&self.running)
    }

    pub fn encode(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut routes: Vec<(&str, &Route)> =
            self.routes.get().into_iter().flatten().map(|(name, route)| (name.as_str(), route)).collect();
        routes.sort_unstable_by_key(|(name, _)| *name);
        routes.push((NO_ROUTE, &self.no_route));
        let lines = routes.iter().flat_map(|(name, route)| {
            let places = METHODS.iter().zip(&route.0).flat_map(|(method, classes)| {
                CLASSES.iter().zip(classes).map(move |(class, place)| (*method, *class, place))
            });
            places.filter_map(move |(method, class, place)| {
                Some(([("route", *name), ("method", method), ("status", class)], &**place.get()?))
            })
        });
        page.distributions("gpupool_http_request_seconds", "Time from the head of a request to its answer", lines)?;
        let running = self.running.load(Ordering::Relaxed) as f64;
        page.gauge("gpupool_http_requests_in_flight", "Requests that are being answered", Some(running))
    }
}

/// A request that is being answered, until it is dropped.
#[derive(Debug)]
pub struct Running<'a>(&'a AtomicI64);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn place_of(method: &Method) -> usize {
    match *method {
        Method::GET => 0,
        Method::HEAD => 1,
        Method::POST => 2,
        Method::DELETE => 3,
        Method::OPTIONS => 4,
        _ => 5,
    }
}
