//! Expected workload, configured by an operator or learned from arrivals.
//!
//! `fgd` and `least-fragmentation` score a placement by the room it leaves for the tasks to come. The pool counts
//! arrivals by class and adopts the counts after 50, 100, 200 and 400 arrivals and then every 500. Between these steps
//! decisions stay cacheable.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::row::WorkloadRow;
use crate::units::{MilliCpus, Share};

/// Tasks that are alike to placement. The order of the fields decides between equal counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskClass {
    pub cpus: MilliCpus,
    pub share: Share,
    pub gpus: u16,
    /// Allowed models as written, `A|B`; empty for any.
    pub models: Arc<str>,
}

impl TaskClass {
    /// Returns the thousandths it takes of all GPUs together.
    pub fn gpu_milli(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.share.0)
    }

    /// Returns the allowed models; none means any.
    pub fn model_names(&self) -> impl Iterator<Item = &str> {
        self.models.split('|').filter(|name| !name.is_empty())
    }
}

/// Class of the target workload with its part of all tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetClass {
    pub class: TaskClass,
    /// Part of all tasks; the parts of the target classes add up to 1.
    pub part: f64,
}

/// Returns the most frequent classes that together cover 95 % of tasks; fragmentation is measured against them.
///
/// Sorted by count, then by class, both descending; the class that crosses 95 % is included.
pub fn target_classes(counts: &[(TaskClass, u64)]) -> Vec<TargetClass> {
    let mut sorted: Vec<&(TaskClass, u64)> = counts.iter().filter(|(_, count)| *count > 0).collect();
    sorted.sort_by(|a, b| (b.1, &b.0).cmp(&(a.1, &a.0)));
    let total = sorted.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
    let mut covered = 0_u64;
    let mut taken = 0;
    while taken < sorted.len() && (covered as f64) / (total as f64) < 0.95 {
        covered = covered.saturating_add(sorted[taken].1);
        taken += 1;
    }
    // Two divisions, not one: the published figures round this way.
    let part = |count: u64| (count as f64 / total as f64) / (covered as f64 / total as f64);
    sorted[..taken].iter().map(|(class, count)| TargetClass { class: class.clone(), part: part(*count) }).collect()
}

/// Task counts, configured or learned, and turnover.
#[derive(Debug, Clone, Default)]
pub(crate) struct WorkloadEstimate {
    configured: Option<Vec<(TaskClass, u64)>>,
    learned: BTreeMap<TaskClass, TaskClassCounts>,
    arrivals: u64,
    turnover: Turnover,
    /// Grows whenever the counts in force change.
    pub version: u64,
}

/// Departures per arrival, counted over windows of 500 grants and adopted in quarters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turnover {
    granted: u32,
    ended: u32,
    quarters: u8,
}

const TURNOVER_WINDOW: u32 = 500;

#[derive(Debug, Clone, Copy, Default)]
struct TaskClassCounts {
    seen: u64,
    in_force: u64,
}

impl WorkloadEstimate {
    /// Sets configured counts; an empty list returns to learning.
    pub fn configure(&mut self, classes: Vec<(TaskClass, u64)>) {
        self.configured = (!classes.is_empty()).then_some(classes);
        self.version += 1;
    }

    /// Counts an arrival. Passes the changed rows to `rows`; many only when the counts are adopted.
    pub fn record_arrival(&mut self, class: TaskClass, rows: &mut impl FnMut(WorkloadRow)) {
        self.adopt_turnover();
        if self.configured.is_some() {
            return;
        }
        if self.learned.len() >= limits::MAX_WORKLOAD_CLASSES && !self.learned.contains_key(&class) {
            return;
        }
        self.arrivals = self.arrivals.saturating_add(1);
        let seen = self.learned.entry(class.clone()).or_default();
        seen.seen = seen.seen.saturating_add(1);
        rows(WorkloadRow { class, seen: seen.seen, in_force: seen.in_force });
        if is_adoption_step(self.arrivals) {
            for (class, seen) in &mut self.learned {
                seen.in_force = seen.seen;
                rows(WorkloadRow { class: class.clone(), seen: seen.seen, in_force: seen.in_force });
            }
            self.version += 1;
        }
    }

    pub fn record_grant(&mut self) {
        self.turnover.granted += 1;
    }

    /// Adopts the turnover of a window once it is full.
    fn adopt_turnover(&mut self) {
        let Turnover { granted, ended, quarters } = self.turnover;
        if granted >= TURNOVER_WINDOW {
            // A cluster in which half as many tasks leave as arrive is saturated: such a turnover counts as 1.
            let now = ((8 * ended + granted / 2) / granted).min(4) as u8;
            self.turnover = Turnover { granted: 0, ended: 0, quarters: now };
            self.version += u64::from(now != quarters);
        }
    }

    pub fn record_end(&mut self) {
        self.turnover.ended = self.turnover.ended.saturating_add(1).min(4 * TURNOVER_WINDOW);
    }

    /// Returns the departures per arrival: 0 if tasks only arrive, 1 if at least half as many leave as arrive.
    pub fn turnover(&self) -> f64 {
        f64::from(self.turnover.quarters) / 4.0
    }

    /// Returns the counts behind the turnover.
    pub fn turnover_counts(&self) -> Turnover {
        self.turnover
    }

    /// Returns the number of counted arrivals.
    pub fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Returns the counts in force.
    pub fn counts(&self) -> Vec<(TaskClass, u64)> {
        match &self.configured {
            Some(configured) => configured.clone(),
            None => self.learned.iter().map(|(class, seen)| (class.clone(), seen.in_force)).collect(),
        }
    }

    /// Restores the workload from its rows.
    pub fn restore(&mut self, rows: impl Iterator<Item = WorkloadRow>, arrivals: u64, turnover: Turnover) {
        self.turnover = Turnover {
            granted: turnover.granted.min(TURNOVER_WINDOW),
            ended: turnover.ended.min(4 * TURNOVER_WINDOW),
            quarters: turnover.quarters.min(4),
        };
        self.learned = rows
            .map(|row| (row.class, TaskClassCounts { seen: row.seen, in_force: row.in_force.min(row.seen) }))
            .collect();
        let seen = self.learned.values().fold(0_u64, |sum, class| sum.saturating_add(class.seen));
        self.arrivals = arrivals.max(seen);
        self.version += 1;
    }
}

fn is_adoption_step(arrivals: u64) -> bool {
    match arrivals {
        0..=499 => arrivals.is_multiple_of(50) && (arrivals / 50).is_power_of_two(),
        _ => arrivals.is_multiple_of(500),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(cpus: u64) -> TaskClass {
        TaskClass { cpus: MilliCpus(cpus), share: Share::WHOLE, gpus: 1, models: "".into() }
    }

    #[test]
    fn the_class_that_crosses_95_percent_is_in() {
        let target = target_classes(&[(class(1), 1), (class(2), 60), (class(3), 34), (class(4), 5)]);
        let cpus: Vec<u64> = target.iter().map(|t| t.class.cpus.0).collect();
        assert_eq!(cpus, [2, 3, 4]);
        assert!((target.iter().map(|t| t.part).sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn equal_counts_go_by_class_descending() {
        let target = target_classes(&[(class(1), 10), (class(2), 10)]);
        assert_eq!(target[0].class.cpus, MilliCpus(2));
    }

    #[test]
    fn counts_are_adopted_in_growing_steps() {
        let steps: Vec<u64> = (0..2100).filter(|n| is_adoption_step(*n)).collect();
        assert_eq!(steps, [50, 100, 200, 400, 500, 1000, 1500, 2000]);
    }

    #[test]
    fn turnover_is_departures_per_arrival() {
        let mut workload = WorkloadEstimate::default();
        let mut window = |left: u32| {
            (0..TURNOVER_WINDOW).for_each(|_| workload.record_grant());
            (0..left).for_each(|_| workload.record_end());
            workload.record_arrival(class(1), &mut |_| ());
            workload.turnover()
        };
        assert_eq!(window(0), 0.0);
        assert_eq!(window(TURNOVER_WINDOW / 4), 0.5);
        assert_eq!(window(TURNOVER_WINDOW), 1.0);
        assert_eq!(window(0), 0.0);
    }

    #[test]
    fn no_workload_is_adopted_before_the_first_step() {
        let mut workload = WorkloadEstimate::default();
        let mut rows = 0;
        for _ in 0..49 {
            workload.record_arrival(class(1), &mut |_| rows += 1);
        }
        assert!(target_classes(&workload.counts()).is_empty());
        workload.record_arrival(class(1), &mut |_| rows += 1);
        assert_eq!(target_classes(&workload.counts()).len(), 1);
        assert_eq!(rows, 51);
    }
}
