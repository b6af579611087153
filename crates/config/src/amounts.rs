//! Values that are an amount of something: numbers, times, percentages, parts of GPUs and memory.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use gpupool_core::{Bytes, Percent, Share};
use serde_json::Value as Json;

use crate::raw::Raw;
use crate::units;
use crate::value::Value;

macro_rules! whole_numbers {
    ($($type:ty),+) => {$(
        impl Value for $type {
            type Bounds = RangeInclusive<$type>;

            fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self> {
                raw.words()?.parse().ok().filter(|number| bounds.contains(number))
            }

            fn allowed(bounds: &Self::Bounds) -> String {
                whole_number_from(bounds.start(), bounds.end())
            }

            fn shown(&self) -> Json {
                (*self).into()
            }
        }
    )+};
}

whole_numbers!(u16, u32, u64, i32);

fn whole_number_from(least: &dyn Display, most: &dyn Display) -> String {
    format!("a whole number from {least} to {most}")
}

/// A number from one to another, in seconds or as a length of time; shown in seconds.
impl Value for Duration {
    type Bounds = RangeInclusive<f64>;

    fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self> {
        units::duration(raw.words()?).filter(|time| bounds.contains(&time.as_secs_f64()))
    }

    fn allowed(bounds: &Self::Bounds) -> String {
        format!("seconds from {} to {}, or a time such as \"90s\" or \"2h\"", bounds.start(), bounds.end())
    }

    fn shown(&self) -> Json {
        number(self.as_secs_f64())
    }
}

impl Value for Percent {
    type Bounds = ();

    fn read(raw: &Raw, (): &()) -> Option<Self> {
        let words = raw.words()?;
        Self::from_number(words.strip_suffix('%').unwrap_or(words).trim().parse().ok()?)
    }

    fn allowed((): &()) -> String {
        "a number from 0 to 100".to_owned()
    }

    fn shown(&self) -> Json {
        number(self.as_number())
    }
}

impl Value for Share {
    type Bounds = ();

    fn read(raw: &Raw, (): &()) -> Option<Self> {
        units::fraction(raw.words()?)
    }

    fn allowed((): &()) -> String {
        "a part of a GPU from 0.001 to 1.0, or \"50%\"".to_owned()
    }

    fn shown(&self) -> Json {
        number(self.as_fraction())
    }
}

impl Value for Bytes {
    type Bounds = ();

    fn read(raw: &Raw, (): &()) -> Option<Self> {
        units::memory(raw.text()?).filter(|bytes| !bytes.is_zero())
    }

    fn allowed((): &()) -> String {
        "an amount of memory with its unit, such as \"512MiB\" or \"24GiB\"".to_owned()
    }

    fn shown(&self) -> Json {
        self.to_string().into()
    }
}

/// A number that may be a fraction.
impl Value for f64 {
    type Bounds = RangeInclusive<f64>;

    fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self> {
        raw.words()?.parse().ok().filter(|number| bounds.contains(number))
    }

    fn allowed(bounds: &Self::Bounds) -> String {
        format!("a number from {} to {}", bounds.start(), bounds.end())
    }

    fn shown(&self) -> Json {
        number(*self)
    }
}

/// A number without a needless fraction.
fn number(number: f64) -> Json {
    if number.fract() == 0.0 && number.abs() < 1e15 { (number as i64).into() } else { number.into() }
}
