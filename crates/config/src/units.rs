//! Parsers of amounts: `90`, `1.5`, `2h`, `1h30m`, `24GiB`, `0.5`, `50%`.

use std::time::Duration;

use gpupool_core::{Bytes, Share};

/// Parses a duration: a number of seconds, or numbers with units (`250ms`, `2h`, `1h30m`, `7 days`).
pub fn parse_duration(text: &str) -> Option<Duration> {
    if let Ok(secs) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(secs).ok();
    }
    let mut rest = text.trim();
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, after) = split_number(rest)?;
        let unit_ends = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_ends);
        let secs = number.parse::<f64>().ok()? * seconds_in(unit)?;
        total = total.checked_add(Duration::try_from_secs_f64(secs).ok()?)?;
        rest = next.trim_start();
    }
    (!text.trim().is_empty()).then_some(total)
}

fn seconds_in(unit: &str) -> Option<f64> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "ms" => 0.001,
        "s" | "sec" | "secs" | "second" | "seconds" => 1.0,
        "m" | "min" | "mins" | "minute" | "minutes" => 60.0,
        "h" | "hour" | "hours" => 3600.0,
        "d" | "day" | "days" => 86_400.0,
        "w" | "week" | "weeks" => 604_800.0,
        _ => return None,
    })
}

/// Parses an amount of memory with its unit: `512MiB`, `24 GiB`, `80GB`. The unit is required.
pub fn parse_memory(text: &str) -> Option<Bytes> {
    let (number, unit) = split_number(text.trim())?;
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" => 1,
        "k" | "ki" | "kib" => 1 << 10,
        "m" | "mi" | "mib" => 1 << 20,
        "g" | "gi" | "gib" => 1 << 30,
        "t" | "ti" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).map(Bytes);
    }
    let bytes = number.parse::<f64>().ok()? * scale as f64;
    (bytes < u64::MAX as f64).then_some(Bytes(bytes as u64))
}

/// Parses a fraction of a GPU: `0.5` or `50%`.
pub fn parse_fraction(text: &str) -> Option<Share> {
    match text.trim().strip_suffix('%') {
        Some(percent) => Share::from_fraction(percent.trim().parse::<f64>().ok()? / 100.0),
        None => Share::from_fraction(text.trim().parse().ok()?),
    }
}

/// Splits leading digits, with at most one point, from the trimmed rest.
fn split_number(text: &str) -> Option<(&str, &str)> {
    let ends = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(ends);
    (!number.is_empty()).then(|| (number, rest.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        let reads = [("90", 90_000), ("1.5", 1_500), ("250ms", 250), ("1h30m", 5_400_000), ("7 days", 604_800_000)];
        for (text, millis) in reads {
            assert_eq!(parse_duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", " ", "h", "1x", "-1", "inf", "nan", "1e400", "2h junk", "1..5s", "5 5"] {
            assert_eq!(parse_duration(text), None, "{text:?}");
        }
    }

    #[test]
    fn memory_needs_a_unit_and_a_fraction_is_at_most_one() {
        assert_eq!(parse_memory("24GiB"), Bytes::from_mib(24 * 1024));
        assert_eq!(parse_memory("1.5 gib"), Bytes::from_mib(1536));
        assert_eq!(parse_memory("80GB"), Some(Bytes(80_000_000_000)));
        for text in ["24", "GiB", "-1GiB", "99999999999999999999TiB", "1.2.3GiB", ""] {
            assert_eq!(parse_memory(text), None, "{text:?}");
        }
        assert_eq!((parse_fraction("0.5"), parse_fraction("50%")), (Some(Share(500)), Some(Share(500))));
        assert_eq!(
            (parse_fraction("0"), parse_fraction("1.5"), parse_fraction("150%"), parse_fraction("half")),
            (None, None, None, None)
        );
    }
}
