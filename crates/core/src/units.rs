//! Units as types: a share of a GPU, bytes of memory, host CPUs, time and percentages.
//!
//! No function takes a bare integer, so thousandths cannot be mistaken for percent nor MiB for bytes.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The zero value.
            pub const ZERO: Self = Self(0);

            /// Returns the difference, or zero if `other` is larger.
            pub const fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }

            /// Returns the sum, or the largest value.
            pub const fn saturating_add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }

            /// Whether it is zero.
            pub const fn is_zero(self) -> bool {
                self.0 == 0
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
    };
}

quantity! {
    /// Thousandths of a GPU; [`Share::WHOLE`] is one exclusive GPU.
    Share(u32)
}

quantity! {
    /// Memory in bytes.
    Bytes(u64)
}

quantity! {
    /// Thousandths of a host CPU.
    MilliCpus(u64)
}

quantity! {
    /// Duration in milliseconds.
    Millis(u64)
}

impl Share {
    pub const WHOLE: Self = Self(1000);

    /// Returns the share nearest to a fraction of one GPU, or `None` above 1.0, below 0.0005 or for NaN.
    pub fn from_fraction(fraction: f64) -> Option<Self> {
        let thousandths = (fraction * 1000.0).round();
        (fraction <= 1.0 && thousandths >= 1.0).then_some(Self(thousandths as u32))
    }

    /// Returns the share as a fraction of one GPU.
    pub fn as_fraction(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_fraction())
    }
}

impl Bytes {
    const MIB: u64 = 1024 * 1024;

    /// Converts from MiB; `None` on overflow.
    pub const fn from_mib(mib: u64) -> Option<Self> {
        match mib.checked_mul(Self::MIB) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    /// Returns whole MiB, rounded down.
    pub const fn as_mib(self) -> u64 {
        self.0 / Self::MIB
    }

    /// Returns `share` thousandths of this amount, rounded down.
    pub const fn part(self, share: Share) -> Self {
        Self((self.0 as u128 * share.0 as u128 / 1000) as u64)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.as_mib())
    }
}

impl fmt::Display for MilliCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 as f64 / 1000.0)
    }
}

impl Millis {
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1000))
    }

    pub const fn from_mins(mins: u64) -> Self {
        Self::from_secs(mins.saturating_mul(60))
    }
}

impl fmt::Display for Millis {
    /// Writes one unit, rounded up: `45 s`, `12 min`, `3 h`, `2 d`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secs = self.0.div_ceil(1000);
        match secs {
            0..=90 => write!(f, "{secs} s"),
            91..=5_400 => write!(f, "{} min", secs.div_ceil(60)),
            5_401..=172_800 => write!(f, "{} h", secs.div_ceil(3600)),
            _ => write!(f, "{} d", secs.div_ceil(86_400)),
        }
    }
}

/// Instant on the pool's own clock, in milliseconds.
///
/// The caller chooses zero; the clock must keep growing across restarts that restore the pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PoolTime(pub u64);

impl PoolTime {
    /// Returns the instant `after` later, or the last instant.
    pub const fn after(self, after: Millis) -> Self {
        Self(self.0.saturating_add(after.0))
    }

    /// Returns the time since `earlier`, or zero if it lies ahead.
    pub const fn since(self, earlier: Self) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

/// Percentage in thousandths of a percent, so that comparisons are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Percent(pub u32);

impl Percent {
    pub const FULL: Self = Self(100_000);

    /// Converts from a number; `None` outside 0..=100 and for NaN.
    pub fn from_number(percent: f64) -> Option<Self> {
        (0.0..=100.0).contains(&percent).then(|| Self((percent * 1000.0).round() as u32))
    }

    /// Returns the percentage as a number.
    pub fn as_number(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// Returns the percentage that `part` is of `whole`, rounded up so that it never falls below a threshold; 100 % if
    /// `whole` is zero.
    pub const fn of(part: Bytes, whole: Bytes) -> Self {
        if whole.0 == 0 {
            return Self::FULL;
        }
        let ratio = (part.0 as u128 * 100_000).div_ceil(whole.0 as u128);
        Self(if ratio > u32::MAX as u128 { u32::MAX } else { ratio as u32 })
    }

    /// Returns a share as a percentage of one GPU.
    pub const fn of_share(share: Share) -> Self {
        Self(share.0.saturating_mul(100))
    }

    /// Returns the difference, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.as_number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_is_exactly_a_hundred_thousandths() {
        assert_eq!(Share::from_fraction(0.1), Some(Share(100)));
        assert_eq!(Share::from_fraction(1.0 / 3.0), Some(Share(333)));
        assert_eq!(Share::from_fraction(f64::NAN), None);
        assert_eq!(Share::from_fraction(0.0001), None);
        assert_eq!(Share::from_fraction(1.0001), None);
        assert_eq!(Share::from_fraction(f64::NEG_INFINITY), None);
    }

    #[test]
    fn a_percentage_of_memory_never_rounds_down_to_below_a_threshold() {
        let whole = Bytes(3);
        assert!(Percent::of(Bytes(1), whole) > Percent(33_333));
        assert_eq!(Percent::of(Bytes(0), Bytes(0)), Percent::FULL);
        assert_eq!(Percent::of(Bytes(80), Bytes(100)), Percent(80_000));
    }

    #[test]
    fn durations_are_shown_in_one_unit() {
        assert_eq!(Millis::from_mins(12).to_string(), "12 min");
        assert_eq!(Millis(1).to_string(), "1 s");
        assert_eq!(Millis::from_mins(180).to_string(), "3 h");
    }
}
