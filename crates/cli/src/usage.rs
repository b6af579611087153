//! `gpupool usage`: who held how much, or how much of each GPU was held.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gpupool_api::history::UsageBody;
use gpupool_client::UsageGrouping;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use crate::connect::{Connect, ask};
use crate::output::answer;
use crate::sim::one_of;
use crate::terminal::{Column, Paint, Table, clean};
use crate::units;

/// What to sum, since when, and how to answer.
#[derive(Args)]
pub(crate) struct Usage {
    /// Sum by whoever took the leases, or by GPU.
    #[arg(long, default_value = "owner", value_parser = one_of(BY))]
    by: UsageGrouping,
    /// Since so long ago (7d, 12h), or since a day (2026-01-01, from midnight UTC) or time (2026-01-01T08:00+01:00).
    #[arg(long, value_name = "WHEN", default_value = "7d", value_parser = since)]
    since: Timestamp,
    /// How to answer.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

const BY: [(&str, UsageGrouping); 2] = [("owner", UsageGrouping::Owner), ("gpu", UsageGrouping::Gpu)];

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    Table,
    Csv,
    Json,
}

pub(crate) fn run(arguments: &Usage) -> anyhow::Result<ExitCode> {
    let client = arguments.connect.client()?;
    let usage = ask(client.usage(arguments.by, Some(&arguments.since.to_string())))?;
    let is_json = arguments.json || arguments.format == Format::Json;
    answer(is_json, &usage, || if arguments.format == Format::Csv { csv(&usage) } else { table(&usage) })
}

fn since(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    if let Ok(day) = text.parse::<Date>() {
        return day.to_zoned(TimeZone::UTC).map(|midnight| midnight.timestamp()).map_err(|error| error.to_string());
    }
    let ago = units::duration(text).and_then(|ago| SignedDuration::try_from(ago).map_err(|error| error.to_string()));
    let time = ago.ok().and_then(|ago| Timestamp::now().checked_sub(ago).ok());
    time.ok_or_else(|| "allowed are 7d, 12h, 2026-01-01 or 2026-01-01T08:00+01:00".into())
}

fn table(usage: &UsageBody) -> String {
    let heading = if usage.by == "gpu" { "GPU" } else { "OWNER" };
    let mut table = Table::new([
        Column::words(heading).at_least(12),
        Column::number("LEASES").weighs(1),
        Column::number("GPU HOURS"),
        Column::number("MEMORY GiB HOURS").weighs(2),
    ]);
    for line in &usage.lines {
        let cells = [
            line.name.clone(),
            line.leases.to_string(),
            format!("{:.2}", line.gpu_hours),
            format!("{:.2}", line.memory_gib_hours),
        ];
        table.row(cells, Paint::Plain);
    }
    table.or(&format!("nothing was held since {}\n", clean(&usage.since)))
}

/// As RFC 4180 says, with a heading.
fn csv(usage: &UsageBody) -> String {
    let mut text = format!("{},leases,gpu_hours,memory_gib_hours\r\n", field(&usage.by));
    for line in &usage.lines {
        let (name, leases) = (field(&line.name), line.leases);
        text.push_str(&format!("{name},{leases},{:.6},{:.6}\r\n", line.gpu_hours, line.memory_gib_hours));
    }
    text
}

fn field(text: &str) -> String {
    if text.contains([',', '"', '\r', '\n']) || text.trim() != text {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let read = |text: &str| since(text).map(|time| time.to_string());
        assert_eq!(read("2026-01-01").unwrap(), "2026-01-01T00:00:00Z");
        assert_eq!(read("2026-01-01T08:00+01:00").unwrap(), "2026-01-01T07:00:00Z");
        let week = since("7d").unwrap();
        let ago = Timestamp::now().duration_since(week).as_secs();
        assert!((604_800..604_900).contains(&ago), "{ago}");
        for bad in ["yesterday", "2026-13-01", "", "99999999999d", "-1d"] {
            assert!(read(bad).unwrap_err().contains("7d"), "{bad:?}");
        }
    }

    #[test]
    fn a_name_cannot_break_out_of_its_field() {
        assert_eq!(field("alice"), "alice");
        assert_eq!(field("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
    }
}
