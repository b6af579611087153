//! Kubernetes quantities (`500m`, `16Gi`, `1e9`), read exactly.
//!
//! As in Kubernetes a quantity is a multiple of 10⁻⁹, anything finer rounded away from zero, and never beyond ±(2⁶³−1).
//! Stricter than Kubernetes in two things nobody writes: there must be a digit (`Gi` alone is not zero), and no more
//! than 20 of them may count.

use std::ops::Add;
use std::str::FromStr;

use crate::limits::QUANTITY_DIGITS;

const NANOS: i128 = 1_000_000_000;
const CAP: u128 = i64::MAX as u128 * NANOS as u128;

/// An amount of something, exact to a billionth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// The text is not a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a quantity such as 2, 0.5, 500m, 16Gi or 1e9")]
pub struct NotAQuantity;

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0 };

    /// In billionths, exactly.
    pub const fn nanos(self) -> i128 {
        self.nanos
    }

    /// Whether it is below zero.
    pub const fn is_negative(self) -> bool {
        self.nanos < 0
    }

    /// The whole number it is, if it is one.
    pub const fn whole(self) -> Option<i128> {
        if self.nanos % NANOS == 0 { Some(self.nanos / NANOS) } else { None }
    }

    /// Units, rounded up; nothing where it is negative.
    pub fn units_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS.unsigned_abs())
    }

    /// Thousandths, rounded up; nothing where it is negative.
    pub fn thousandths_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS.unsigned_abs() / 1000)
    }
}

impl Add for Quantity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { nanos: self.nanos.saturating_add(other.nanos) }
    }
}

impl FromStr for Quantity {
    type Err = NotAQuantity;

    fn from_str(text: &str) -> Result<Self, NotAQuantity> {
        let text = text.trim();
        let (negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (digits, suffix) =
            rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len()));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(NotAQuantity);
        }
        let scale = Scale::from_suffix(suffix).ok_or(NotAQuantity)?;
        let nanos = nanos(whole, fraction, scale)?.min(CAP) as i128;
        Ok(Self { nanos: if negative { -nanos } else { nanos } })
    }
}

/// What a suffix multiplies by: 2^twos × 10^tens.
#[derive(Clone, Copy)]
struct Scale {
    twos: u32,
    tens: i64,
}

impl Scale {
    fn from_suffix(suffix: &str) -> Option<Self> {
        let binary = |twos| Some(Self { twos, tens: 0 });
        let decimal = |tens| Some(Self { twos: 0, tens });
        match suffix {
            "Ki" => binary(10),
            "Mi" => binary(20),
            "Gi" => binary(30),
            "Ti" => binary(40),
            "Pi" => binary(50),
            "Ei" => binary(60),
            "n" => decimal(-9),
            "u" => decimal(-6),
            "m" => decimal(-3),
            "" => decimal(0),
            "k" => decimal(3),
            "M" => decimal(6),
            "G" => decimal(9),
            "T" => decimal(12),
            "P" => decimal(15),
            "E" => decimal(18),
            _ => decimal(suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
        }
    }
}

/// |value| in billionths, rounded up; anything at all where it is above [`CAP`], as long as it is above.
fn nanos(whole: &str, fraction: &str, scale: Scale) -> Result<u128, NotAQuantity> {
    let all = format!("{whole}{fraction}");
    let counted = all.trim_start_matches('0').trim_end_matches('0');
    if counted.is_empty() {
        return Ok(0);
    }
    if counted.len() > QUANTITY_DIGITS {
        return Err(NotAQuantity);
    }
    let trailing_zeros = all.len() - all.trim_end_matches('0').len();
    let mantissa: u128 = counted.parse().map_err(|_| NotAQuantity)?;
    // 20 digits are below 2^67 and the largest suffix is 2^60: this fits 128 bits.
    let numerator = mantissa << scale.twos;
    let tens = scale.tens.saturating_add(9 + trailing_zeros as i64 - fraction.len() as i64);
    let power = u32::try_from(tens.unsigned_abs()).ok().and_then(|tens| 10_u128.checked_pow(tens));
    Ok(match power {
        Some(power) if tens >= 0 => numerator.saturating_mul(power),
        Some(power) => numerator.div_ceil(power),
        None if tens >= 0 => u128::MAX,
        None => 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(text: &str) -> Option<i128> {
        text.parse::<Quantity>().ok().map(Quantity::nanos)
    }

    #[test]
    fn every_suffix_means_what_kubernetes_means_by_it() {
        for (text, units) in [
            ("2", 2),
            ("+2", 2),
            ("-2", -2),
            ("1.", 1),
            ("1e3", 1_000),
            ("1E3", 1_000),
            ("1E", 1_000_000_000_000_000_000),
            ("1.5e+2", 150),
            ("1500e-2", 15),
            ("2000m", 2),
            ("4k", 4_000),
            ("512M", 512_000_000),
            ("1.5Gi", 1_610_612_736),
            ("16Gi", 17_179_869_184),
            ("128974848", 128_974_848),
            (" 1Ki ", 1_024),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(nanos(text), Some(units * NANOS), "{text}");
        }
        assert_eq!(nanos(".5"), Some(NANOS / 2));
        assert_eq!(nanos("500m"), Some(NANOS / 2));
    }

    #[test]
    fn what_is_finer_than_a_billionth_rounds_up_and_what_is_huge_is_capped() {
        assert_eq!(nanos("1e-12"), Some(1));
        assert_eq!(nanos("0.1n"), Some(1));
        assert_eq!(nanos("-0.1n"), Some(-1));
        assert_eq!(nanos("1e-999999999999"), Some(1));
        assert_eq!(nanos("1.0000000001"), Some(NANOS + 1));
        assert_eq!(nanos("8Ei"), Some(CAP as i128));
        assert_eq!(nanos("1e999999999999"), Some(CAP as i128));
        assert_eq!(nanos("0e999999999999"), Some(0));
        assert_eq!(nanos("99999999999999999999Ei"), Some(CAP as i128));
    }

    #[test]
    fn nonsense_is_not_a_quantity() {
        for text in [
            "", " ", ".", "Gi", "+", "--1", "1 Gi", "1gi", "1K", "1e", "1e1.5", "1.2.3", "nan", "inf", "0x10", "1Gib",
            "1_000", "½", "٣", "e3",
        ] {
            assert_eq!(nanos(text), None, "{text:?}");
        }
    }

    #[test]
    fn units_and_thousandths_round_up() {
        let quantity: Quantity = "0.0001".parse().unwrap();
        assert_eq!((quantity.units_up(), quantity.thousandths_up()), (1, 1));
        let quantity: Quantity = "1.5".parse().unwrap();
        assert_eq!((quantity.units_up(), quantity.thousandths_up(), quantity.whole()), (2, 1500, None));
    }
}
