//! Numbers with units, as `nvidia-smi` writes them. A number without its unit may be cut off, so it is none.

use gpupool_core::units::{Bytes, Percent};

use crate::found::Watts;
use crate::told::{Told, words};

/// An amount of memory: `81920 MiB`. All ones is how the driver says that it cannot tell.
pub(crate) fn memory(text: &str) -> Told<Bytes> {
    const NOT_TOLD: u64 = u64::MAX - (1 << 20);
    match Told::from_cell(text, bytes) {
        Told::Value(amount) if amount.0 > NOT_TOLD => Told::Unsupported(words(text)),
        told => told,
    }
}

/// Power: `67.03 W`.
pub(crate) fn watts(text: &str) -> Told<Watts> {
    Told::from_cell(text, |text| {
        let (number, unit) = split(text)?;
        let number: f64 = number.parse().ok()?;
        match unit {
            "W" => Watts::from_number(number),
            "mW" => Watts::from_number(number / 1000.0),
            _ => None,
        }
    })
}

/// A percentage: `37 %`.
pub(crate) fn percent(text: &str) -> Told<Percent> {
    Told::from_cell(text, |text| match split(text)? {
        (number, "%") => Percent::from_number(number.parse().ok()?),
        _ => None,
    })
}

/// A temperature: `27 C`.
pub(crate) fn celsius(text: &str) -> Told<i16> {
    Told::from_cell(text, |text| match split(text)? {
        (number, "C") => {
            let degrees = number.parse::<f64>().ok()?.round();
            (-300.0..=3000.0).contains(&degrees).then_some(degrees as i16)
        }
        _ => None,
    })
}

/// A plain number; `None` for every way to say that there is none.
pub(crate) fn count(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// Yes or no; `None` for every way to say that it is not known.
pub(crate) fn flag(text: &str) -> Option<bool> {
    match text.trim().trim_end_matches('*').to_ascii_lowercase().as_str() {
        "yes" | "enabled" | "on" | "true" => Some(true),
        "no" | "disabled" | "off" | "false" => Some(false),
        number => number.parse::<u64>().ok().map(|number| number > 0),
    }
}

/// A name or an identity, where there is one.
pub(crate) fn name(text: &str) -> Option<std::sync::Arc<str>> {
    match Told::from_cell(text, |text| Some(words(text))) {
        Told::Value(name) => Some(name.as_ref().into()),
        Told::Unsupported(_) | Told::Failed(_) => None,
    }
}

fn bytes(text: &str) -> Option<Bytes> {
    let (number, unit) = split(text)?;
    // Old versions wrote `MB` and `Mb` for what newer ones call `MiB`; the numbers are the same.
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" | "bytes" => 1,
        "kib" | "kb" => 1 << 10,
        "mib" | "mb" => 1 << 20,
        "gib" | "gb" => 1 << 30,
        _ => return None,
    };
    match number.parse::<u64>() {
        Ok(whole) => Some(Bytes(whole.saturating_mul(factor))),
        Err(_) => {
            let amount = number.parse::<f64>().ok()? * factor as f64;
            (0.0..u64::MAX as f64).contains(&amount).then_some(Bytes(amount as u64))
        }
    }
}

fn split(text: &str) -> Option<(&str, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+')))?;
    let (number, unit) = text.split_at_checked(end)?;
    Some((number, unit.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_taken_with_its_unit_only() {
        assert_eq!(memory("81920 MiB"), Told::Value(Bytes(81920 << 20)));
        assert_eq!(memory("2004MB"), Told::Value(Bytes(2004 << 20)));
        assert_eq!(memory("1.5 GiB"), Told::Value(Bytes(3 << 29)));
        assert_eq!(watts("67.03 W"), Told::Value(Watts(67_030)));
        assert_eq!(watts("67030 mW"), Told::Value(Watts(67_030)));
        assert_eq!(percent("37 %"), Told::Value(Percent(37_000)));
        assert_eq!(celsius("-2 C"), Told::Value(-2));
        for cut in ["81920", "81920 M", "", "MiB", "1..2 MiB"] {
            assert_eq!(memory(cut).value(), None, "{cut}");
        }
        assert_eq!(percent("655 %").value(), None);
    }

    #[test]
    fn all_ones_is_no_amount_of_memory() {
        for ones in ["18446744073709551615 B", "17592186044415 MiB", "18446744073709551615 MiB"] {
            assert!(matches!(memory(ones), Told::Unsupported(_)), "{ones}");
        }
    }

    #[test]
    fn a_flag_is_known_in_all_its_spellings() {
        assert_eq!(["Yes", "Enabled*", "1", "2"].map(flag), [Some(true); 4]);
        assert_eq!(["No", "Disabled", "0"].map(flag), [Some(false); 3]);
        assert_eq!(["N/A", "[N/A]", ""].map(flag), [None; 3]);
    }
}
