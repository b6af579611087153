//! Amounts as people write them on the command line, and as they are shown to people.

use std::fmt::Write as _;
use std::time::Duration;

use gpupool_config::units;
use gpupool_core::Bytes;

/// Whole mebibytes: `8GiB`, `8G`, `512MiB`, or a bare number of MiB. Parts of one are rounded up.
pub(crate) fn mebibytes(text: &str) -> Result<u64, String> {
    const ALLOWED: &str = "allowed are sizes above zero such as 8GiB, 512MiB, 80GB, or a number of MiB";
    let bytes = match text.trim().parse::<u64>() {
        Ok(mib) => Bytes::from_mib(mib),
        Err(_) => units::parse_memory(text),
    };
    match bytes.map(mib_up) {
        Some(mib) if mib > 0 => Ok(mib),
        _ => Err(ALLOWED.into()),
    }
}

/// A length of time: `10m`, `2h`, `90s`, `1d`, `1h30m`, or a number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    units::parse_duration(text)
        .ok_or_else(|| "allowed are times such as 90s, 10m, 2h, 1d, or a number of seconds".into())
}

/// The same, and not nothing.
pub(crate) fn some_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("allowed are times above zero such as 90s, 10m, 2h, 1d".into()),
        time => Ok(time),
    }
}

/// A part of each GPU: `0.5` or `50%`.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let share = units::parse_fraction(text).ok_or("allowed are parts of a GPU from 0.001 to 1.0, or such as 50%")?;
    Ok(share.as_fraction())
}

/// `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("allowed are labels of the form KEY=VALUE".into()),
    }
}

/// A length of time for people: its two largest units.
pub(crate) fn shown(time: Duration) -> String {
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

/// The same, in milliseconds where it is less than a second.
pub(crate) fn shown_finely(time: Duration) -> String {
    if time.as_secs() == 0 { format!("{} ms", time.as_millis()) } else { shown(time) }
}

/// Whole MiB, rounded up: a promise must not be smaller than what was asked for.
pub(crate) const fn mib_up(memory: Bytes) -> u64 {
    memory.0.div_ceil(1 << 20)
}

/// A number of things, such as `1 GPU` and `2 GPUs`.
pub(crate) fn count(number: impl Into<usize>, thing: &str) -> String {
    match number.into() {
        1 => format!("1 {thing}"),
        number => format!("{number} {thing}s"),
    }
}

/// An amount of memory in a unit that fits: `512 MiB`, `24 GiB`, `1.5 GiB`.
pub(crate) fn mib(mib: u64) -> String {
    if mib < 1024 {
        return format!("{mib} MiB");
    }
    let gib = format!("{:.1}", mib as f64 / 1024.0);
    format!("{} GiB", gib.strip_suffix(".0").unwrap_or(&gib))
}

/// A part of a GPU: `0.5`, `0.125`, `1`.
pub(crate) fn share(fraction: f64) -> String {
    ((fraction * 1000.0).round() / 1000.0).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, mib) in
            [("8GiB", 8192), ("8G", 8192), ("512MiB", 512), ("8192", 8192), ("1KiB", 1), ("80GB", 76_294)]
        {
            assert_eq!(mebibytes(text), Ok(mib), "{text}");
        }
        for text in ["", "0", "0GiB", "-1", "8 apples", "99999999999999999999"] {
            assert!(mebibytes(text).is_err_and(|error| error.contains("8GiB")), "{text:?} was taken");
        }
    }

    #[test]
    fn times_and_parts_are_read_and_the_rest_is_refused_with_what_is_allowed() {
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(some_time("1h30m"), Ok(Duration::from_secs(5400)));
        assert!(some_time("0s").is_err_and(|error| error.contains("above zero")));
        assert!(duration("soon").is_err_and(|error| error.contains("10m")));
        assert_eq!((fraction("0.5"), fraction("25%")), (Ok(0.5), Ok(0.25)));
        assert!(fraction("2").is_err_and(|error| error.contains("1.0")));
        assert_eq!(label("team=vision=a"), Ok(("team".into(), "vision=a".into())));
        assert!(label("team").is_err() && label("=x").is_err());
    }

    #[test]
    fn a_time_is_shown_by_its_two_largest_units() {
        for (secs, text) in [(0, "0 s"), (59, "59 s"), (60, "1 m"), (3_725, "1 h 2 m"), (90_000, "1 d 1 h")] {
            assert_eq!(shown(Duration::from_secs(secs)), text);
        }
        assert_eq!(shown_finely(Duration::from_millis(300)), "300 ms");
    }

    #[test]
    fn amounts_of_a_gpu_are_shown_in_a_unit_that_fits() {
        assert_eq!((mib(512), mib(1024), mib(1536)), ("512 MiB".into(), "1 GiB".into(), "1.5 GiB".into()));
        assert_eq!((share(0.1 + 0.2), share(1.0)), ("0.3".into(), "1".into()));
    }
}
