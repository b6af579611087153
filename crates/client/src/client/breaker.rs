//! When an endpoint that fails is left alone, when it is tried again, and how its share of the work comes back.
//!
//! Closed: it is asked. Open: it is not, until its time is up. Half-open: it is looked at, and asked again once it answered
//! twice. Knows no clock and no chance of its own.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits::{
    BREAKER_FAILURES, BREAKER_FIRST, BREAKER_GROWTH, BREAKER_MOST, BREAKER_SUCCESSES, RETURN_FIRST_SHARE, RETURN_TIME,
};

/// What became of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing that matters to others.
    None,
    /// It is left alone from now on.
    Opened,
    /// It is asked again.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Closed,
    Open { until: Instant },
    HalfOpen { successes: u32 },
}

/// Keeps count of one endpoint's successes and failures.
#[derive(Debug, Clone)]
pub(super) struct Breaker {
    state: State,
    failures_in_a_row: u32,
    /// Times it opened, each soon after the one before.
    openings: u32,
    /// When it was closed again.
    returned: Option<Instant>,
    successes: u64,
    failures: u64,
}

impl Breaker {
    pub fn new() -> Self {
        Self { state: State::Closed, failures_in_a_row: 0, openings: 0, returned: None, successes: 0, failures: 0 }
    }

    /// Whether the endpoint may be asked.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// When it is to be looked at again, where it is left alone.
    pub fn probe_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed | State::HalfOpen { .. } => None,
        }
    }

    /// It is being looked at: its time is up, or somebody wants it.
    pub fn begin_probe(&mut self) {
        if let State::Open { .. } = self.state {
            self.state = State::HalfOpen { successes: 0 };
        }
    }

    /// It answered.
    pub fn succeeded(&mut self, now: Instant) -> Change {
        self.successes += 1;
        match self.state {
            State::Closed => self.failures_in_a_row = 0,
            // The answer to a question from before it was left alone.
            State::Open { .. } => {}
            State::HalfOpen { successes } if successes + 1 < BREAKER_SUCCESSES => {
                self.state = State::HalfOpen { successes: successes + 1 };
            }
            State::HalfOpen { .. } => {
                self.state = State::Closed;
                self.failures_in_a_row = 0;
                self.returned = Some(now);
                return Change::Closed;
            }
        }
        Change::None
    }

    /// It failed. `chance` in 0..1 spreads the times at which many clients come back.
    pub fn failed(&mut self, now: Instant, chance: f64) -> Change {
        self.failures += 1;
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        let opens = match self.state {
            State::Closed => self.failures_in_a_row >= BREAKER_FAILURES,
            State::Open { .. } => false,
            State::HalfOpen { .. } => true,
        };
        if !opens {
            return Change::None;
        }
        let was_closed = self.is_closed();
        let is_soon = !was_closed || self.returned.is_some_and(|at| now.duration_since(at) < RETURN_TIME);
        self.openings = if is_soon { self.openings.saturating_add(1) } else { 1 };
        self.state = State::Open { until: now + pause(self.openings, chance) };
        if was_closed { Change::Opened } else { Change::None }
    }

    /// How much of its share of the work an endpoint gets that has just come back, 0..=1.
    pub fn share(&self, now: Instant) -> f64 {
        let Some(returned) = self.returned else { return 1.0 };
        let part = now.duration_since(returned).as_secs_f64() / RETURN_TIME.as_secs_f64();
        (RETURN_FIRST_SHARE + part * (1.0 - RETURN_FIRST_SHARE)).min(1.0)
    }

    /// Failures since the last success.
    pub fn failures_in_a_row(&self) -> u32 {
        self.failures_in_a_row
    }

    /// Successes and failures since the start.
    pub fn counts(&self) -> (u64, u64) {
        (self.successes, self.failures)
    }

    /// The name of the state it is in.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            State::Closed => "closed",
            State::Open { .. } => "open",
            State::HalfOpen { .. } => "half_open",
        }
    }
}

/// How long the endpoint is left alone: from nine to eleven tenths of what its openings come to.
fn pause(openings: u32, chance: f64) -> Duration {
    let grown = BREAKER_GROWTH.powi(i32::try_from(openings.saturating_sub(1)).unwrap_or(i32::MAX));
    let pause = (BREAKER_FIRST.as_secs_f64() * grown).min(BREAKER_MOST.as_secs_f64());
    Duration::from_secs_f64((pause * (0.9 + chance / 5.0)).min(BREAKER_MOST.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new();
        let changes: Vec<Change> = (0..BREAKER_FAILURES).map(|_| breaker.failed(now, 0.5)).collect();
        assert_eq!(changes, [Change::None, Change::None, Change::Opened]);
        breaker
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_a_success_between_does_not() {
        let now = Instant::now();
        let mut breaker = Breaker::new();
        for _ in 0..10 {
            breaker.failed(now, 0.5);
            breaker.failed(now, 0.5);
            assert_eq!(breaker.succeeded(now), Change::None);
        }
        assert!(breaker.is_closed());
        assert_eq!(opened(now).probe_at(), Some(now + BREAKER_FIRST));
    }

    #[test]
    fn it_closes_after_two_successes_and_its_share_comes_back_step_by_step() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert_eq!(breaker.succeeded(now), Change::None, "an answer from before says nothing");
        breaker.begin_probe();
        assert_eq!((breaker.succeeded(now), breaker.is_closed()), (Change::None, false));
        assert_eq!((breaker.succeeded(now), breaker.is_closed()), (Change::Closed, true));
        assert!((breaker.share(now) - RETURN_FIRST_SHARE).abs() < 1e-9);
        let half = breaker.share(now + RETURN_TIME / 2);
        assert!(half > RETURN_FIRST_SHARE && half < 1.0);
        assert_eq!(breaker.share(now + RETURN_TIME), 1.0);
    }

    #[test]
    fn it_stays_away_longer_each_time_up_to_a_bound_and_forgets_after_a_good_time() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now = breaker.probe_at().unwrap();
            breaker.begin_probe();
            assert_eq!(breaker.failed(now, 0.5), Change::None);
            pauses.push(breaker.probe_at().unwrap() - now);
        }
        assert_eq!(pauses[0], BREAKER_FIRST.mul_f64(1.5));
        assert!(pauses.windows(2).all(|pair| pair[1] >= pair[0]));
        assert_eq!(pauses[9], BREAKER_MOST);
        breaker.begin_probe();
        breaker.succeeded(now);
        breaker.succeeded(now);
        now += RETURN_TIME;
        for _ in 0..BREAKER_FAILURES {
            breaker.failed(now, 0.5);
        }
        assert_eq!(breaker.probe_at(), Some(now + BREAKER_FIRST));
    }

    proptest! {
        #[test]
        fn whatever_happens_it_is_left_alone_for_a_bounded_time_and_can_always_come_back(
            steps in prop::collection::vec((0_u8..3, 0_u64..200, 0.0_f64..1.0), 0..200),
        ) {
            let mut now = Instant::now();
            let mut breaker = Breaker::new();
            for (step, secs, chance) in steps {
                now += Duration::from_secs(secs);
                let was_closed = breaker.is_closed();
                let change = match step {
                    0 => breaker.succeeded(now),
                    1 => breaker.failed(now, chance),
                    _ => { breaker.begin_probe(); Change::None }
                };
                prop_assert_eq!(change == Change::Opened, was_closed && !breaker.is_closed());
                prop_assert_eq!(change == Change::Closed, !was_closed && breaker.is_closed());
                if let Some(at) = breaker.probe_at() {
                    prop_assert!(at <= now + BREAKER_MOST);
                }
                prop_assert!((RETURN_FIRST_SHARE..=1.0).contains(&breaker.share(now)));
            }
            breaker.begin_probe();
            for _ in 0..BREAKER_SUCCESSES {
                breaker.succeeded(now);
            }
            prop_assert!(breaker.is_closed());
        }
    }
}
