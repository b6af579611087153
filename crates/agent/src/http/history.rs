//! The audit trail: who held what, when, and how it ended.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::StatusCode;
use gpupool_api::history::{HistoryBody, HistoryDevice, HistoryRecord, UsageBody, UsageLine};
use gpupool_api::problem::ProblemBody;
use gpupool_core::GpuId;
use gpupool_store::{ReadError, TrailCursor, TrailEvent, UsageDimension};
use jiff::Timestamp;
use serde::Deserialize;

use crate::clock::iso;
use crate::limits::RECORDS_AT_ONCE;

use super::Shared;
use super::problem::Problem;
use super::read::Query;

/// The audit trail
#[utoipa::path(
    get, path = "/v1/history", operation_id = "lease_history", tag = "history",
    params(
        ("owner" = Option<String>, Query, description = "Only this owner's"),
        ("gpu_id" = Option<u32>, Query, description = "Only of this device"),
        ("since" = Option<String>, Query, description = "From this time on, ISO 8601 with an offset"),
        ("until" = Option<String>, Query, description = "Before this time"),
        ("after" = Option<String>, Query, description = "What `next` of the answer before was"),
        ("limit" = Option<usize>, Query, description = "At most so many, 1..=1000"),
    ),
    responses(
        (status = 200, description = "Records, in the order they were made", body = HistoryBody),
        (status = "default", description = "A parameter is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn history(
    State(app): State<Shared>,
    Query(query): Query<HistoryQuery>,
) -> Result<axum::Json<HistoryBody>, Problem> {
    let limit = query.limit.unwrap_or(RECORDS_AT_ONCE);
    if !(1..=RECORDS_AT_ONCE).contains(&limit) {
        return Err(Problem::field("limit", limit, format!("1..={RECORDS_AT_ONCE}")));
    }
    let query = gpupool_store::TrailQuery {
        owner: query.owner,
        gpu_id: query.gpu_id.map(GpuId),
        since: time("since", query.since.as_deref())?,
        until: time("until", query.until.as_deref())?,
        limit: Some(limit),
        after: query.after.as_deref().map(cursor).transpose()?,
    };
    let page = app.authority.trail().query(move |trail| trail.history(&query)).await?.map_err(unreadable)?;
    let next = page.next.map(|cursor| cursor.0.to_string());
    Ok(axum::Json(HistoryBody { records: page.records.into_iter().map(record).collect(), next }))
}

#[derive(Deserialize)]
pub(super) struct HistoryQuery {
    owner: Option<String>,
    gpu_id: Option<u32>,
    since: Option<String>,
    until: Option<String>,
    after: Option<String>,
    limit: Option<usize>,
}

/// Who held how much
#[utoipa::path(
    get, path = "/v1/usage", tag = "history",
    params(
        ("by" = Option<String>, Query, description = "`owner` (the default) or `gpu`"),
        ("since" = Option<String>, Query, description = "From this time on, ISO 8601 with an offset; the last 7 days unless said"),
    ),
    responses(
        (status = 200, description = "Most first", body = UsageBody),
        (status = "default", description = "A parameter is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn usage(
    State(app): State<Shared>,
    Query(query): Query<UsageQuery>,
) -> Result<axum::Json<UsageBody>, Problem> {
    let by = match query.by.as_deref() {
        None | Some("owner") => UsageDimension::Owner,
        Some("gpu") => UsageDimension::Gpu,
        Some(other) => return Err(Problem::field("by", format!("{other:?}"), "owner or gpu")),
    };
    let until = SystemTime::now();
    let week_ago = until.checked_sub(Duration::from_secs(7 * 86_400)).unwrap_or(UNIX_EPOCH);
    let since = time("since", query.since.as_deref())?.unwrap_or(week_ago);
    let lines = app.authority.trail().query(move |trail| trail.usage(by, since, until)).await?.map_err(unreadable)?;
    let line = |line: gpupool_store::UsageTotal| UsageLine {
        name: line.name,
        leases: line.leases,
        gpu_hours: line.gpu_seconds / 3600.0,
        memory_gib_hours: line.memory_mib_seconds / (1024.0 * 3600.0),
    };
    let by = if by == UsageDimension::Owner { "owner" } else { "gpu" };
    let lines = lines.into_iter().map(line).collect();
    Ok(axum::Json(UsageBody { by: by.into(), since: iso(since), until: iso(until), lines }))
}

#[derive(Deserialize)]
pub(super) struct UsageQuery {
    by: Option<String>,
    since: Option<String>,
}

fn time(field: &str, text: Option<&str>) -> Result<Option<SystemTime>, Problem> {
    let Some(text) = text else { return Ok(None) };
    // A plus sign in an address means a blank unless it is written as %2B, which people forget.
    let parsed: Result<Timestamp, _> = text.replace(' ', "+").parse();
    match parsed {
        Ok(time) => Ok(Some(SystemTime::from(time).max(UNIX_EPOCH))),
        Err(_) => {
            Err(Problem::field(field, format!("{text:?}"), "ISO 8601 with an offset, as in 2026-01-31T08:00:00Z"))
        }
    }
}

fn cursor(text: &str) -> Result<TrailCursor, Problem> {
    // Places are signed numbers in the database.
    let place = text.parse::<u64>().ok().filter(|place| i64::try_from(*place).is_ok());
    let unknown = || Problem::field("after", format!("{text:?}"), "what `next` of the answer before was");
    place.map(TrailCursor).ok_or_else(unknown)
}

fn record(record: gpupool_store::TrailRecord) -> HistoryRecord {
    let device = |device: gpupool_store::HeldDevice| HistoryDevice {
        node: device.node,
        gpu_id: device.gpu_id.0,
        uuid: device.uuid,
        fraction: device.share.as_fraction(),
        memory_mib: device.memory.as_mib(),
    };
    HistoryRecord {
        lease: record.lease.0,
        event: match record.event {
            TrailEvent::Granted => "granted".into(),
            TrailEvent::Ended => "ended".into(),
        },
        at: iso(record.at),
        owner: record.owner,
        worker_id: record.worker_id,
        devices: record.devices.into_iter().map(device).collect(),
        token: record.token.map(|token| token.0),
        cause: record.cause,
        granted_at: record.granted_at.map(iso),
        ended_at: record.ended_at.map(iso),
    }
}

pub(super) fn unreadable(error: ReadError) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_durable", error.to_string())
}
