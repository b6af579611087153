//! `gpupool usage`: reports GPU usage by owner or by GPU.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gpupool_api::history::UsageBody;
use gpupool_client::UsageGrouping;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use crate::endpoint_args::{EndpointArgs, call_agent};
use crate::output::print_output;
use crate::sim::named_value;
use crate::terminal::{TableColumn, TextStyle, TextTable, sanitize};
use crate::units;

/// Options of `gpupool usage`.
#[derive(Args)]
pub(crate) struct UsageArgs {
    /// Group usage by owner or by GPU.
    #[arg(long, default_value = "owner", value_parser = named_value(GROUPINGS))]
    by: UsageGrouping,
    /// Start of the period: an age (7d, 12h), a day (2026-01-01, from midnight UTC) or a time (2026-01-01T08:00+01:00).
    #[arg(long, value_name = "WHEN", default_value = "7d", value_parser = parse_since)]
    since: Timestamp,
    /// Output format.
    #[arg(long, value_enum, default_value_t = UsageFormat::Table)]
    format: UsageFormat,
    /// Print JSON, as --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
}

const GROUPINGS: [(&str, UsageGrouping); 2] = [("owner", UsageGrouping::Owner), ("gpu", UsageGrouping::Gpu)];

/// Value of `--format`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum UsageFormat {
    Table,
    Csv,
    Json,
}

pub(crate) fn run(arguments: &UsageArgs) -> anyhow::Result<ExitCode> {
    let client = arguments.endpoint_args.client()?;
    let usage = call_agent(client.usage(arguments.by, Some(&arguments.since.to_string())))?;
    let is_json = arguments.json || arguments.format == UsageFormat::Json;
    print_output(is_json, &usage, || {
        if arguments.format == UsageFormat::Csv { usage_csv(&usage) } else { usage_table(&usage) }
    })
}

fn parse_since(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    if let Ok(day) = text.parse::<Date>() {
        return day.to_zoned(TimeZone::UTC).map(|midnight| midnight.timestamp()).map_err(|error| error.to_string());
    }
    let ago =
        units::parse_duration(text).and_then(|ago| SignedDuration::try_from(ago).map_err(|error| error.to_string()));
    let time = ago.ok().and_then(|ago| Timestamp::now().checked_sub(ago).ok());
    time.ok_or_else(|| "expected a time such as 7d, 12h, 2026-01-01 or 2026-01-01T08:00+01:00".into())
}

fn usage_table(usage: &UsageBody) -> String {
    let heading = if usage.by == "gpu" { "GPU" } else { "OWNER" };
    let mut table = TextTable::new([
        TableColumn::text(heading).min_width(12),
        TableColumn::number("LEASES").drop_priority(1),
        TableColumn::number("GPU HOURS"),
        TableColumn::number("MEMORY GiB HOURS").drop_priority(2),
    ]);
    for line in &usage.lines {
        let cells = [
            line.name.clone(),
            line.leases.to_string(),
            format!("{:.2}", line.gpu_hours),
            format!("{:.2}", line.memory_gib_hours),
        ];
        table.add_row(cells, TextStyle::Plain);
    }
    table.render_or(&format!("no usage since {}\n", sanitize(&usage.since)))
}

/// Formats CSV as in RFC 4180, with a header.
fn usage_csv(usage: &UsageBody) -> String {
    let mut text = format!("{},leases,gpu_hours,memory_gib_hours\r\n", csv_field(&usage.by));
    for line in &usage.lines {
        let (name, leases) = (csv_field(&line.name), line.leases);
        text.push_str(&format!("{name},{leases},{:.6},{:.6}\r\n", line.gpu_hours, line.memory_gib_hours));
    }
    text
}

fn csv_field(text: &str) -> String {
    if text.contains([',', '"', '\r', '\n']) || text.trim() != text {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_the_period_is_parsed() {
        let read = |text: &str| parse_since(text).map(|time| time.to_string());
        assert_eq!(read("2026-01-01").unwrap(), "2026-01-01T00:00:00Z");
        assert_eq!(read("2026-01-01T08:00+01:00").unwrap(), "2026-01-01T07:00:00Z");
        let week = parse_since("7d").unwrap();
        let ago = Timestamp::now().duration_since(week).as_secs();
        assert!((604_800..604_900).contains(&ago), "{ago}");
        for bad in ["yesterday", "2026-13-01", "", "99999999999d", "-1d"] {
            assert!(read(bad).unwrap_err().contains("7d"), "{bad:?}");
        }
    }

    #[test]
    fn a_name_cannot_leave_its_csv_field() {
        assert_eq!(csv_field("alice"), "alice");
        assert_eq!(csv_field("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
    }
}
