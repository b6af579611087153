//! How values spread over fixed ranges, counted without a lock.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{MetricEncoder, NoLabelSet};

/// Most ranges of a scale; one more holds what lies above.
const RANGES: usize = 15;

/// The ranges values are counted in.
#[derive(Debug)]
pub(super) struct Scale {
    /// The largest value of each range, rising.
    pub bounds: &'static [u64],
    /// How many of the values' units make one of the unit that is told.
    pub per_unit: f64,
}

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000 * MICRO;
const SECOND: u64 = 1_000 * MILLI;

/// From what is answered from memory to the longest wait of one answer; in nanoseconds, told in seconds.
pub(super) const ANSWERS: Scale = Scale {
    bounds: &[
        50 * MICRO,
        100 * MICRO,
        250 * MICRO,
        500 * MICRO,
        MILLI,
        2_500 * MICRO,
        5 * MILLI,
        10 * MILLI,
        25 * MILLI,
        100 * MILLI,
        500 * MILLI,
        SECOND,
        5 * SECOND,
        30 * SECOND,
        300 * SECOND,
    ],
    per_unit: SECOND as f64,
};

/// From a fast disk to a hung one; in nanoseconds, told in seconds.
pub(super) const COMMITS: Scale = Scale {
    bounds: &[
        50 * MICRO,
        100 * MICRO,
        250 * MICRO,
        500 * MICRO,
        MILLI,
        2_500 * MICRO,
        5 * MILLI,
        10 * MILLI,
        25 * MILLI,
        50 * MILLI,
        100 * MILLI,
        500 * MILLI,
        SECOND,
        10 * SECOND,
    ],
    per_unit: SECOND as f64,
};

/// Rows of one commit.
pub(super) const ROWS: Scale =
    Scale { bounds: &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096], per_unit: 1.0 };

const MINUTE: u64 = 60_000;
const HOUR: u64 = 60 * MINUTE;

/// From at once to a week; in milliseconds, told in seconds.
pub(super) const LONG: Scale = Scale {
    bounds: &[
        10,
        100,
        1_000,
        5_000,
        15_000,
        MINUTE,
        5 * MINUTE,
        15 * MINUTE,
        HOUR,
        3 * HOUR,
        6 * HOUR,
        12 * HOUR,
        24 * HOUR,
        72 * HOUR,
        168 * HOUR,
    ],
    per_unit: 1_000.0,
};

/// Values counted by range. Any number of threads may count at once.
#[derive(Debug)]
pub(super) struct Distribution {
    scale: &'static Scale,
    counts: [AtomicU64; RANGES + 1],
    sum: AtomicU64,
}

impl Distribution {
    pub fn new(scale: &'static Scale) -> Self {
        debug_assert!(scale.bounds.len() <= RANGES && scale.bounds.is_sorted());
        Self { scale, counts: Default::default(), sum: AtomicU64::new(0) }
    }

    /// Counts a value.
    pub fn add(&self, value: u64) {
        let range = self.scale.bounds.iter().position(|bound| value <= *bound).unwrap_or(self.scale.bounds.len());
        // Nothing is ordered by these: a scrape in between tells one value more or less.
        self.counts[range].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    pub fn encode(&self, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        let bounds = self.scale.bounds.iter().map(|bound| *bound as f64 / self.scale.per_unit);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let ranges: Vec<(f64, u64)> = bounds.chain([f64::INFINITY]).zip(counts).collect();
        let count = ranges.iter().map(|(_, count)| count).sum();
        let sum = self.sum.load(Ordering::Relaxed) as f64 / self.scale.per_unit;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &ranges, None)
    }
}
