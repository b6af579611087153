//! What is counted.

use std::time::Duration;

use axum::http::{Method, StatusCode};
use gpupool_core::{Effect, Pool};

use crate::owner::StoreState;
use crate::sampler::Sample;

/// What is counted.
#[derive(Default)]
pub struct Metrics {}

impl Metrics {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A request was answered.
    pub fn answered(&self, _method: &Method, _route: &str, _status: StatusCode, _took: Duration) {}

    /// Something was committed.
    pub fn effect(&self, _effect: &Effect, _pool: &Pool) {}

    /// Devices were read.
    pub fn sampled(&self, _sample: &Sample) {}

    /// The store works differently than before.
    pub fn store(&self, _state: &StoreState) {}

    /// Everything, in the text form of Prometheus.
    pub fn encode(&self) -> String {
        String::new()
    }
}
