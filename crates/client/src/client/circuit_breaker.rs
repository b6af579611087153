//! The circuit breaker of an endpoint. Closed: requests are sent. Open: no requests until the pause is over. Half-open:
//! the endpoint is polled, and closed again after two successes; its share of the traffic then returns gradually. Time
//! and random numbers are arguments.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits::{
    BREAKER_CLOSING_SUCCESSES, BREAKER_FAILURE_LIMIT, BREAKER_PAUSE_GROWTH, INITIAL_TRAFFIC_SHARE, MAX_BREAKER_PAUSE,
    MIN_BREAKER_PAUSE, TRAFFIC_RAMP_TIME,
};

/// Effect of a success or failure on the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BreakerChange {
    /// No change of availability.
    None,
    /// The endpoint became unavailable.
    Opened,
    /// The endpoint became available again.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum BreakerState {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    HalfOpen {
        successes: u32,
    },
}

/// Circuit breaker of one endpoint.
#[derive(Debug, Clone, Default)]
pub(super) struct CircuitBreaker {
    state: BreakerState,
    /// Failures since the last success.
    pub consecutive_failures: u32,
    /// Openings in a row, each soon after the previous one.
    recent_openings: u32,
    /// Instant of the last closing.
    closed_at: Option<Instant>,
    /// Successes since the start.
    pub successes: u64,
    /// Failures since the start.
    pub failures: u64,
}

impl CircuitBreaker {
    /// Whether requests may be sent.
    pub(super) fn is_closed(&self) -> bool {
        self.state == BreakerState::Closed
    }

    /// Returns the instant of the next probe; `None` unless the breaker is open.
    pub(super) fn next_probe(&self) -> Option<Instant> {
        match self.state {
            BreakerState::Open { until } => Some(until),
            BreakerState::Closed | BreakerState::HalfOpen { .. } => None,
        }
    }

    /// Starts a probe: the pause is over, or a caller requested it.
    pub(super) fn begin_probe(&mut self) {
        if let BreakerState::Open { .. } = self.state {
            self.state = BreakerState::HalfOpen { successes: 0 };
        }
    }

    /// Records a success.
    pub(super) fn record_success(&mut self, now: Instant) -> BreakerChange {
        self.successes += 1;
        match self.state {
            BreakerState::Closed => self.consecutive_failures = 0,
            // The response to a request from before the opening.
            BreakerState::Open { .. } => {}
            BreakerState::HalfOpen { successes } if successes + 1 < BREAKER_CLOSING_SUCCESSES => {
                self.state = BreakerState::HalfOpen { successes: successes + 1 };
            }
            BreakerState::HalfOpen { .. } => {
                self.state = BreakerState::Closed;
                self.consecutive_failures = 0;
                self.closed_at = Some(now);
                return BreakerChange::Closed;
            }
        }
        BreakerChange::None
    }

    /// Records a failure. `chance` in 0..1 spreads the returns of many clients.
    pub(super) fn record_failure(&mut self, now: Instant, chance: f64) -> BreakerChange {
        self.failures += 1;
        self.consecutive_failures = self.consecutive_failures.saturating_add(1);
        let opens = match self.state {
            BreakerState::Closed => self.consecutive_failures >= BREAKER_FAILURE_LIMIT,
            BreakerState::Open { .. } => false,
            BreakerState::HalfOpen { .. } => true,
        };
        if !opens {
            return BreakerChange::None;
        }
        let was_closed = self.is_closed();
        let is_recent = !was_closed || self.closed_at.is_some_and(|at| now.duration_since(at) < TRAFFIC_RAMP_TIME);
        self.recent_openings = if is_recent { self.recent_openings.saturating_add(1) } else { 1 };
        self.state = BreakerState::Open { until: now + open_duration(self.recent_openings, chance) };
        if was_closed { BreakerChange::Opened } else { BreakerChange::None }
    }

    /// Returns the share of its traffic that a recovered endpoint gets, 0..=1.
    pub(super) fn traffic_share(&self, now: Instant) -> f64 {
        let Some(closed_at) = self.closed_at else { return 1.0 };
        let part = now.duration_since(closed_at).as_secs_f64() / TRAFFIC_RAMP_TIME.as_secs_f64();
        (INITIAL_TRAFFIC_SHARE + part * (1.0 - INITIAL_TRAFFIC_SHARE)).min(1.0)
    }

    /// Returns the name of the state.
    pub(super) fn state_name(&self) -> &'static str {
        match self.state {
            BreakerState::Closed => "closed",
            BreakerState::Open { .. } => "open",
            BreakerState::HalfOpen { .. } => "half_open",
        }
    }
}

/// Returns the pause of an open breaker, randomized by a tenth in either direction.
fn open_duration(recent_openings: u32, chance: f64) -> Duration {
    let grown = BREAKER_PAUSE_GROWTH.powi(i32::try_from(recent_openings.saturating_sub(1)).unwrap_or(i32::MAX));
    let pause = (MIN_BREAKER_PAUSE.as_secs_f64() * grown).min(MAX_BREAKER_PAUSE.as_secs_f64());
    Duration::from_secs_f64((pause * (0.9 + chance / 5.0)).min(MAX_BREAKER_PAUSE.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opened_breaker(now: Instant) -> CircuitBreaker {
        let mut breaker = CircuitBreaker::default();
        let changes: Vec<BreakerChange> =
            (0..BREAKER_FAILURE_LIMIT).map(|_| breaker.record_failure(now, 0.5)).collect();
        assert_eq!(changes, [BreakerChange::None, BreakerChange::None, BreakerChange::Opened]);
        breaker
    }

    #[test]
    fn three_consecutive_failures_open_the_breaker() {
        let now = Instant::now();
        let mut breaker = CircuitBreaker::default();
        for _ in 0..10 {
            breaker.record_failure(now, 0.5);
            breaker.record_failure(now, 0.5);
            assert_eq!(breaker.record_success(now), BreakerChange::None);
        }
        assert!(breaker.is_closed());
        assert_eq!(opened_breaker(now).next_probe(), Some(now + MIN_BREAKER_PAUSE));
    }

    #[test]
    fn two_successes_close_the_breaker_and_traffic_returns_gradually() {
        let now = Instant::now();
        let mut breaker = opened_breaker(now);
        assert_eq!(breaker.record_success(now), BreakerChange::None, "an earlier response has no effect");
        breaker.begin_probe();
        assert_eq!((breaker.record_success(now), breaker.is_closed()), (BreakerChange::None, false));
        assert_eq!((breaker.record_success(now), breaker.is_closed()), (BreakerChange::Closed, true));
        assert!((breaker.traffic_share(now) - INITIAL_TRAFFIC_SHARE).abs() < 1e-9);
        let half = breaker.traffic_share(now + TRAFFIC_RAMP_TIME / 2);
        assert!(half > INITIAL_TRAFFIC_SHARE && half < 1.0);
        assert_eq!(breaker.traffic_share(now + TRAFFIC_RAMP_TIME), 1.0);
    }

    #[test]
    fn pauses_grow_up_to_a_limit_and_reset_after_a_good_time() {
        let mut now = Instant::now();
        let mut breaker = opened_breaker(now);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now = breaker.next_probe().unwrap();
            breaker.begin_probe();
            assert_eq!(breaker.record_failure(now, 0.5), BreakerChange::None);
            pauses.push(breaker.next_probe().unwrap() - now);
        }
        assert_eq!(pauses[0], MIN_BREAKER_PAUSE.mul_f64(1.5));
        assert!(pauses.windows(2).all(|pair| pair[1] >= pair[0]));
        assert_eq!(pauses[9], MAX_BREAKER_PAUSE);
        breaker.begin_probe();
        breaker.record_success(now);
        breaker.record_success(now);
        now += TRAFFIC_RAMP_TIME;
        for _ in 0..BREAKER_FAILURE_LIMIT {
            breaker.record_failure(now, 0.5);
        }
        assert_eq!(breaker.next_probe(), Some(now + MIN_BREAKER_PAUSE));
    }

    proptest! {
        #[test]
        fn after_any_history_the_pause_is_bounded_and_the_breaker_can_close(
            steps in prop::collection::vec((0_u8..3, 0_u64..200, 0.0_f64..1.0), 0..200),
        ) {
            let mut now = Instant::now();
            let mut breaker = CircuitBreaker::default();
            for (step, secs, chance) in steps {
                now += Duration::from_secs(secs);
                let was_closed = breaker.is_closed();
                let change = match step {
                    0 => breaker.record_success(now),
                    1 => breaker.record_failure(now, chance),
                    _ => { breaker.begin_probe(); BreakerChange::None }
                };
                prop_assert_eq!(change == BreakerChange::Opened, was_closed && !breaker.is_closed());
                prop_assert_eq!(change == BreakerChange::Closed, !was_closed && breaker.is_closed());
                if let Some(at) = breaker.next_probe() {
                    prop_assert!(at <= now + MAX_BREAKER_PAUSE);
                }
                prop_assert!((INITIAL_TRAFFIC_SHARE..=1.0).contains(&breaker.traffic_share(now)));
            }
            breaker.begin_probe();
            for _ in 0..BREAKER_CLOSING_SUCCESSES {
                breaker.record_success(now);
            }
            prop_assert!(breaker.is_closed());
        }
    }
}
