//! How much trying again a client allows itself: a part of what it asks anyway, so that servers in trouble are not asked
//! more than servers that are well.

use crate::limits::{RETRY_BUDGET, RETRY_COST};

/// What is left for trying again, counted in requests.
#[derive(Debug)]
pub(super) struct RetryBudget {
    left: u32,
}

impl RetryBudget {
    pub fn new() -> Self {
        Self { left: RETRY_BUDGET * RETRY_COST }
    }

    /// Something new was asked: a part of a retry is earned.
    pub fn earn(&mut self) {
        self.left = (self.left + 1).min(RETRY_BUDGET * RETRY_COST);
    }

    /// Whether trying again once more is allowed; if so, it is taken.
    pub fn spend(&mut self) -> bool {
        let left = self.left.checked_sub(RETRY_COST);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_end_when_they_outgrow_what_is_asked() {
        let mut budget = RetryBudget::new();
        let at_once = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(at_once, RETRY_BUDGET as usize);
        (0..100).for_each(|_| budget.earn());
        let earned = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(earned, 100 / RETRY_COST as usize);
    }
}
