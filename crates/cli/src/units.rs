//! Parses and formats sizes, durations and fractions.

use std::fmt::Write as _;
use std::time::Duration;

use gpupool_config::units;
use gpupool_core::Bytes;

/// Largest number without a unit that is likely meant in GiB.
const MAX_LIKELY_GIB: f64 = 512.0;

/// Parses a size into MiB: `8GiB`, `8G`, `512MiB`. Rounds up. A number without a unit is an error.
pub(crate) fn parse_mebibytes(text: &str) -> Result<u64, String> {
    const ALLOWED_SIZES: &str = "expected a size above zero such as 8GiB, 512MiB, 80GB";
    if let Some(number) = text.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite()) {
        let unit = if number <= MAX_LIKELY_GIB { "GiB" } else { "MiB" };
        return Err(format!("expected a size with a unit such as 8GiB; did you mean {number}{unit}?"));
    }
    match units::parse_memory(text).map(mib_rounded_up) {
        Some(mib) if mib > 0 => Ok(mib),
        _ => Err(ALLOWED_SIZES.into()),
    }
}

/// Parses a duration: `10m`, `2h`, `90s`, `1d`, `1h30m`, or a number of seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    units::parse_duration(text)
        .ok_or_else(|| "expected a duration such as 90s, 10m, 2h, 1d, or a number of seconds".into())
}

/// Parses a duration above zero.
pub(crate) fn parse_nonzero_duration(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("expected a duration above zero such as 90s, 10m, 2h, 1d".into()),
        time => Ok(time),
    }
}

/// Parses a fraction of a GPU: `0.5` or `50%`.
pub(crate) fn parse_fraction(text: &str) -> Result<f64, String> {
    let share =
        units::parse_fraction(text).ok_or("expected a fraction from 0.001 to 1.0, or a percentage such as 50%")?;
    Ok(share.as_fraction())
}

/// Parses `KEY=VALUE`.
pub(crate) fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".into()),
    }
}

/// Formats a duration by its two largest units.
pub(crate) fn format_duration(time: Duration) -> String {
    let secs = time.as_secs();
    let parts = [(secs / 86_400, "d"), (secs / 3_600 % 24, "h"), (secs / 60 % 60, "m"), (secs % 60, "s")];
    let first = parts.iter().position(|(count, _)| *count > 0).unwrap_or(parts.len() - 1);
    let mut text = String::new();
    for (at, (count, unit)) in parts.iter().enumerate().skip(first).take(2) {
        if at == first || *count > 0 {
            // Writing to a string cannot fail.
            let _ = write!(text, "{}{count} {unit}", if at == first { "" } else { " " });
        }
    }
    text
}

/// Formats a duration, in milliseconds below one second.
pub(crate) fn format_short_duration(time: Duration) -> String {
    if time.as_secs() == 0 { format!("{} ms", time.as_millis()) } else { format_duration(time) }
}

/// Converts to MiB, rounded up: a promise must not be smaller than the request.
pub(crate) const fn mib_rounded_up(memory: Bytes) -> u64 {
    memory.0.div_ceil(1 << 20)
}

/// Formats a count, such as `1 GPU` or `2 GPUs`.
pub(crate) fn plural(number: impl Into<usize>, thing: &str) -> String {
    match number.into() {
        1 => format!("1 {thing}"),
        number => format!("{number} {thing}s"),
    }
}

/// Formats memory in a suitable unit: `512 MiB`, `24 GiB`, `1.5 GiB`.
pub(crate) fn format_mib(mib: u64) -> String {
    if mib < 1024 {
        return format!("{mib} MiB");
    }
    let gib = format!("{:.1}", mib as f64 / 1024.0);
    format!("{} GiB", gib.strip_suffix(".0").unwrap_or(&gib))
}

/// Formats a fraction: `0.5`, `0.125`, `1`.
pub(crate) fn format_share(fraction: f64) -> String {
    ((fraction * 1000.0).round() / 1000.0).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, mib) in [("8GiB", 8192), ("8G", 8192), ("512MiB", 512), ("1KiB", 1), ("80GB", 76_294)] {
            assert_eq!(parse_mebibytes(text), Ok(mib), "{text}");
        }
        for text in ["", "0", "0GiB", "-1", "8 apples", "99999999999999999999"] {
            assert!(parse_mebibytes(text).is_err_and(|error| error.contains("8GiB")), "{text:?} was accepted");
        }
        for (text, meant) in [("8", "8GiB"), ("1.5", "1.5GiB"), ("8192", "8192MiB")] {
            assert!(parse_mebibytes(text).is_err_and(|error| error.contains(meant)), "{text:?} was accepted");
        }
    }

    #[test]
    fn durations_and_fractions_are_parsed_and_others_are_refused_with_examples() {
        assert_eq!(parse_duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert_eq!(parse_nonzero_duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert!(parse_nonzero_duration("0s").is_err_and(|error| error.contains("above zero")));
        assert!(parse_duration("soon").is_err_and(|error| error.contains("10m")));
        assert_eq!((parse_fraction("0.5"), parse_fraction("25%")), (Ok(0.5), Ok(0.25)));
        assert!(parse_fraction("2").is_err_and(|error| error.contains("1.0")));
        assert_eq!(parse_label("team=vision=a"), Ok(("team".into(), "vision=a".into())));
        assert!(parse_label("team").is_err() && parse_label("=x").is_err());
    }

    #[test]
    fn a_duration_is_formatted_by_its_two_largest_units() {
        for (secs, text) in [(0, "0 s"), (59, "59 s"), (60, "1 m"), (3_725, "1 h 2 m"), (90_000, "1 d 1 h")] {
            assert_eq!(format_duration(Duration::from_secs(secs)), text);
        }
        assert_eq!(format_short_duration(Duration::from_millis(300)), "300 ms");
    }

    #[test]
    fn memory_and_fractions_are_formatted_in_a_suitable_unit() {
        assert_eq!(
            (format_mib(512), format_mib(1024), format_mib(1536)),
            ("512 MiB".into(), "1 GiB".into(), "1.5 GiB".into())
        );
        assert_eq!((format_share(0.1 + 0.2), format_share(1.0)), ("0.3".into(), "1".into()));
    }
}
