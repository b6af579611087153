//! How warm a chip is: it nears the temperature of its work exponentially, so any moment can be told without those
//! before it.

use std::time::Duration;

#[derive(Debug, Clone)]
pub(crate) struct Heat {
    since: Duration,
    from_c: f64,
    to_c: f64,
}

impl Heat {
    pub fn steady(celsius: f64) -> Self {
        Self { since: Duration::ZERO, from_c: celsius, to_c: celsius }
    }

    /// The temperature at `now`, if two thirds of the way take `constant`.
    pub fn at(&self, now: Duration, constant: Duration) -> f64 {
        if constant.is_zero() {
            return self.to_c;
        }
        let passed = now.saturating_sub(self.since).as_secs_f64() / constant.as_secs_f64();
        self.to_c + (self.from_c - self.to_c) * (-passed).exp()
    }

    /// From `now` on it nears `celsius`. Nothing changes where it did so already, so that asking twice is asking once.
    pub fn turn(&mut self, celsius: f64, now: Duration, constant: Duration) {
        if self.to_c != celsius {
            *self = Self { since: now, from_c: self.at(now, constant), to_c: celsius };
        }
    }
}
