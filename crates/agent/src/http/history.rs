//! The audit trail: the devices of each lease, its times, its owner, and the cause of its end.

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

use super::SharedState;
use super::extract::QueryParameters;
use super::pool::check_node;
use super::problem::Problem;

/// The audit trail
#[utoipa::path(
    get, path = "/v1/history", operation_id = "lease_history", tag = "history",
    params(
        ("owner" = Option<String>, Query, description = "Only records of this owner"),
        ("node" = Option<String>, Query, description = "Only records with devices of the node with this name"),
        ("gpu_id" = Option<u32>, Query, description = "Only records with the device of this number; with `node`, on that node"),
        ("since" = Option<String>, Query, description = "From this time on, ISO 8601 with an offset"),
        ("until" = Option<String>, Query, description = "Before this time"),
        ("after" = Option<String>, Query, description = "`next` of the previous response"),
        ("limit" = Option<usize>, Query, description = "The largest number of records, 1..=1000"),
    ),
    responses(
        (status = 200, description = "Records, in the order of their commits", body = HistoryBody),
        (status = "default", description = "A parameter is wrong, the node is unknown, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn history(
    State(app): State<SharedState>,
    QueryParameters(query): QueryParameters<HistoryParameters>,
) -> Result<axum::Json<HistoryBody>, Problem> {
    let limit = query.limit.unwrap_or(RECORDS_AT_ONCE);
    if !(1..=RECORDS_AT_ONCE).contains(&limit) {
        return Err(Problem::field("limit", limit, format!("1..={RECORDS_AT_ONCE}")));
    }
    check_node(query.node.as_deref(), &app, &app.authority.snapshot())?;
    let query = gpupool_store::TrailQuery {
        owner: query.owner,
        node: query.node,
        gpu_id: query.gpu_id.map(GpuId),
        since: parse_time("since", query.since.as_deref())?,
        until: parse_time("until", query.until.as_deref())?,
        limit: Some(limit),
        after: query.after.as_deref().map(parse_cursor).transpose()?,
    };
    let page = app.authority.trail().query(move |trail| trail.history(&query)).await?.map_err(store_problem)?;
    let next = page.next.map(|cursor| cursor.0.to_string());
    Ok(axum::Json(HistoryBody { records: page.records.into_iter().map(record_body).collect(), next }))
}

#[derive(Deserialize)]
pub(super) struct HistoryParameters {
    owner: Option<String>,
    node: Option<String>,
    gpu_id: Option<u32>,
    since: Option<String>,
    until: Option<String>,
    after: Option<String>,
    limit: Option<usize>,
}

/// Usage by owner or device
#[utoipa::path(
    get, path = "/v1/usage", tag = "history",
    params(
        ("by" = Option<String>, Query, description = "`owner` (the default) or `gpu`"),
        ("since" = Option<String>, Query, description = "From this time on, ISO 8601 with an offset; 7 days ago by default"),
    ),
    responses(
        (status = 200, description = "Usage, largest first", body = UsageBody),
        (status = "default", description = "A parameter is wrong, or not possible now", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
pub(super) async fn usage(
    State(app): State<SharedState>,
    QueryParameters(query): QueryParameters<UsageParameters>,
) -> Result<axum::Json<UsageBody>, Problem> {
    let by = match query.by.as_deref() {
        None | Some("owner") => UsageDimension::Owner,
        Some("gpu") => UsageDimension::Gpu,
        Some(other) => return Err(Problem::field("by", format!("{other:?}"), "owner or gpu")),
    };
    let until = SystemTime::now();
    let week_ago = until.checked_sub(Duration::from_secs(7 * 86_400)).unwrap_or(UNIX_EPOCH);
    let since = parse_time("since", query.since.as_deref())?.unwrap_or(week_ago);
    let lines =
        app.authority.trail().query(move |trail| trail.usage(by, since, until)).await?.map_err(store_problem)?;
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
pub(super) struct UsageParameters {
    by: Option<String>,
    since: Option<String>,
}

fn parse_time(field: &str, text: Option<&str>) -> Result<Option<SystemTime>, Problem> {
    let Some(text) = text else { return Ok(None) };
    // A plus sign in a URL means a blank unless it is escaped as %2B, which clients often omit.
    let parsed: Result<Timestamp, _> = text.replace(' ', "+").parse();
    match parsed {
        Ok(time) => Ok(Some(SystemTime::from(time).max(UNIX_EPOCH))),
        Err(_) => {
            Err(Problem::field(field, format!("{text:?}"), "ISO 8601 with an offset, as in 2026-01-31T08:00:00Z"))
        }
    }
}

fn parse_cursor(text: &str) -> Result<TrailCursor, Problem> {
    // Positions are signed numbers in the database.
    let position = text.parse::<u64>().ok().filter(|position| i64::try_from(*position).is_ok());
    let wrong = || Problem::field("after", format!("{text:?}"), "`next` of the previous response");
    position.map(TrailCursor).ok_or_else(wrong)
}

fn record_body(record: gpupool_store::TrailRecord) -> HistoryRecord {
    let device = |device: gpupool_store::HeldDevice| HistoryDevice {
        node: device.node,
        gpu_id: device.gpu_id.0,
        uuid: device.uuid,
        fraction: device.share.as_fraction(),
        memory_mib: device.memory.as_mib(),
    };
    let (cause, reason) = split_cause(record.cause);
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
        cause,
        reason,
        granted_at: record.granted_at.map(iso),
        ended_at: record.ended_at.map(iso),
    }
}

/// Splits the author and reason of a revocation off its cause.
fn split_cause(cause: Option<String>) -> (Option<String>, Option<String>) {
    match cause.as_deref().and_then(|cause| cause.split_once(": ")) {
        Some(("revoked", reason)) => (Some("revoked".into()), Some(reason.into())),
        _ => (cause, None),
    }
}

pub(super) fn store_problem(error: ReadError) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_durable", error.to_string())
}
