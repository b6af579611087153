//! How a client of many endpoints is set up.

use std::time::Duration;

use super::balance::Balancing;

/// What a client was set up with.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Whether it was told of several endpoints.
    pub is_multi_endpoint: bool,
    pub strategy: Balancing,
    /// In percent, as the thresholds of requests that name none.
    pub memory_threshold: f64,
    pub utilization_threshold: f64,
    pub polling_interval: Duration,
    pub health_check_interval: Duration,
    /// How long an answer may take.
    pub endpoint_timeout: Duration,
    /// How often a request that failed everywhere is tried again.
    pub max_retries: u32,
    /// How long requests wait that do not say.
    pub worker_timeout: Duration,
    /// How long anything may be held that says nothing about it.
    pub stale_age: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            is_multi_endpoint: false,
            strategy: Balancing::default(),
            memory_threshold: 80.0,
            utilization_threshold: 90.0,
            polling_interval: Duration::from_secs(5),
            health_check_interval: Duration::from_secs(30),
            endpoint_timeout: Duration::from_secs(10),
            max_retries: 3,
            worker_timeout: Duration::from_secs(300),
            stale_age: None,
        }
    }
}
