//! Parsing of numbers with units, as tools and the kernel write them: `283 MB`, `67.03 W`, `34.0c`, `37 %`, `0x1f`.

use std::str::FromStr;

use gpupool_core::{Bytes, Percent};

use crate::detected_device::Milliwatts;

/// Parses an amount of memory; `unit` applies if the text has none.
///
/// All units are powers of 1024: amd-smi divides by 1024·1024 and calls it MB (`mem_usage` in
/// amdsmi_cli/amdsmi_commands.py; `vram_size` in src/amd_smi/amd_smi.cc), and shortens process memory by 1024s to KB,
/// MB and GB (`convert_bytes_to_readable` in amdsmi_cli/amdsmi_helpers.py), all of github.com/ROCm/amdsmi.
pub(crate) fn parse_bytes(text: &str, unit: &str) -> Option<Bytes> {
    let (number, written_unit) = split_unit(text);
    let unit = if written_unit.is_empty() { unit } else { written_unit };
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" | "bytes" => 1,
        "kb" | "kib" => 1 << 10,
        "mb" | "mib" => 1 << 20,
        "gb" | "gib" => 1 << 30,
        "tb" | "tib" => 1 << 40,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).map(Bytes);
    }
    let amount = number.parse::<f64>().ok()? * factor as f64;
    (0.0..u64::MAX as f64).contains(&amount).then(|| Bytes(amount.round() as u64))
}

/// Parses power, in watts if the text has no unit.
pub(crate) fn parse_watts(text: &str) -> Option<Milliwatts> {
    let (number, unit) = split_unit(text);
    let number: f64 = number.parse().ok()?;
    match unit {
        "" | "W" | "w" => Milliwatts::from_number(number),
        "mW" => Milliwatts::from_number(number / 1e3),
        "uW" | "µW" | "μW" => Milliwatts::from_number(number / 1e6),
        _ => None,
    }
}

/// Parses a temperature in °C, rounded.
pub(crate) fn parse_celsius(text: &str) -> Option<i16> {
    let (number, unit) = split_unit(text);
    let number: f64 = number.parse().ok()?;
    let degrees = match unit.trim_start_matches('°') {
        "" | "C" | "c" | "℃" => number,
        "mC" => number / 1e3,
        _ => return None,
    };
    (-273.0..1000.0).contains(&degrees).then(|| degrees.round() as i16)
}

/// Parses a percentage, with or without `%`.
pub(crate) fn parse_percent(text: &str) -> Option<Percent> {
    let (number, unit) = split_unit(text);
    if !matches!(unit, "" | "%") {
        return None;
    }
    Percent::from_number(number.parse().ok()?)
}

/// Parses a whole number, decimal or after `0x`.
pub(crate) fn parse_count<T: FromStr + TryFrom<u64>>(text: &str) -> Option<T> {
    match text.trim().strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?.try_into().ok(),
        None => text.trim().parse().ok(),
    }
}

/// Splits a text into its leading number and its unit.
fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && !matches!(c, '.' | '-' | '+')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn megabytes_of_amd_smi_are_mebibytes() {
        assert_eq!(parse_bytes("65520 MB", "B"), Some(Bytes(65520 << 20)));
        assert_eq!(parse_bytes("1.5 GB", "B"), Some(Bytes(3 << 29)));
        assert_eq!(parse_bytes("34342961152", "B"), Some(Bytes(34_342_961_152)));
        assert_eq!(parse_bytes("512", "MB"), Some(Bytes(512 << 20)));
        for wrong in ["-1 MB", "1 GT/s", "MB", "99999999999999999999 GB", "NaN", "18446744073709551615 KB"] {
            assert_eq!(parse_bytes(wrong, "B"), None, "{wrong}");
        }
    }

    #[test]
    fn power_and_temperature_are_read_in_their_units() {
        assert_eq!(parse_watts("133.0W"), Some(Milliwatts(133_000)));
        assert_eq!(parse_watts("4803 mW"), Some(Milliwatts(4803)));
        assert_eq!(parse_watts("768 mV"), None);
        assert_eq!(parse_watts("-5"), None);
        assert_eq!(parse_celsius("43.0°C"), Some(43));
        assert_eq!(parse_celsius("34.6c"), Some(35));
        assert_eq!(parse_celsius("43000 mC"), Some(43));
        assert_eq!(parse_celsius("65535"), None);
        assert_eq!(parse_percent("5.2"), Some(Percent(5200)));
        assert_eq!(parse_percent("655 %"), None);
    }
}
