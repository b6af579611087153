//! Responses of a simulated agent or statistics server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gpupool_api::lease::{FencingTokenBody, FollowBody, FollowResponse};
use gpupool_api::pool::{DeviceList, PromisedAmount};
use gpupool_api::problem::{MEDIA_TYPE, ProblemBody};
use gpupool_api::stats::{GpuBody, GpuMemory, GpuPower, GpuSummary, HealthBody, StatsBody, SummaryBody};
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody, view};
use gpupool_client::transport::{HttpRequest, HttpResponse};
use gpupool_core::{CommandDenied, CommandReply, LeaseId, LeaseState, PoolCommand, PoolTime, Request, Token};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::Serialize;
use tokio::time::Instant;

use crate::simulated_server::{MEMORY_MIB, Misreport, ServerKind, SimulatedServer};

/// Interval at which an agent renews followed waiters.
const FOLLOW_REFRESH: Duration = Duration::from_secs(5);

/// Responds to a request of `owner`; `None` if the server crashes meanwhile.
pub async fn respond(
    server: &Arc<SimulatedServer>,
    owner: &str,
    request: &HttpRequest,
    working: Duration,
) -> Option<HttpResponse> {
    let generation = server.generation();
    server.wait_until_awake(generation).await?;
    tokio::time::sleep(working).await;
    server.wait_until_awake(generation).await?;
    if server.kind == ServerKind::Statistics {
        return Some(statistics(server, &request.route));
    }
    let body = request.body.as_deref().unwrap_or_default();
    let path: Vec<&str> = request.route.trim_start_matches('/').split('/').collect();
    let lease = |text: &str| text.parse().map(LeaseId).unwrap();
    let response = match (&request.method, path.as_slice()) {
        (&Method::GET, ["v1", "pool"]) => json(StatusCode::OK, &pool(server)),
        (&Method::GET, ["v1", "devices"]) => json(StatusCode::OK, &devices(server)),
        (&Method::GET, ["health"]) => json(StatusCode::OK, &health()),
        (&Method::POST, ["v1", "leases"]) => create(server, owner, request, body),
        (&Method::POST, ["v1", "leases", "follow"]) => {
            let body: FollowBody = serde_json::from_slice(body).unwrap();
            follow(server, owner, generation, body).await?
        }
        (&Method::GET, ["v1", "leases", id]) => {
            // Only guards use this route, without waiting.
            apply_lease_command(server, owner, PoolCommand::Follow { lease: lease(id) }, lease(id))
        }
        (&Method::POST, ["v1", "leases", id, what]) => {
            let FencingTokenBody { token } = serde_json::from_slice(body).unwrap();
            let (lease, token) = (lease(id), Token(token));
            let command = match *what {
                "renew" => PoolCommand::Renew { lease, token },
                "confirm" => PoolCommand::Confirm { lease, token },
                other => panic!("the client asks for {other}"),
            };
            apply_lease_command(server, owner, command, lease)
        }
        (&Method::DELETE, ["v1", "leases", id]) => {
            apply_lease_command(server, owner, PoolCommand::Release { lease: lease(id) }, lease(id))
        }
        (method, _) => panic!("the client asks {method} {}", request.route),
    };
    Some(response)
}

fn create(server: &SimulatedServer, owner: &str, request: &HttpRequest, body: &[u8]) -> HttpResponse {
    let mut body: RequestBody = serde_json::from_slice(body).unwrap();
    body.owner = Some(owner.into());
    let key = request.headers.get(IDEMPOTENCY_KEY).map(|key| key.to_str().unwrap().into());
    let request = match Request::try_from(body) {
        Ok(request) => Arc::new(request),
        Err(error) => return refusal_response(&error.into()),
    };
    match server.apply(PoolCommand::Request { request, key, by_admin: false }) {
        Ok(CommandReply::Lease(lease)) => {
            let body = lease_body(server, lease).unwrap();
            let status = match body.state {
                gpupool_api::lease::LeaseState::Queued => StatusCode::ACCEPTED,
                state if state.is_ended() => StatusCode::OK,
                _ => StatusCode::CREATED,
            };
            json(status, &body)
        }
        Ok(other) => panic!("{other:?}"),
        Err(denied) => refusal_response(&denied),
    }
}

/// Applies a command about a lease on behalf of an owner.
fn apply_lease_command(server: &SimulatedServer, owner: &str, command: PoolCommand, lease: LeaseId) -> HttpResponse {
    let whose = server.inspect(|pool| pool.lease(lease).map(|lease| lease.request.owner.clone()));
    if whose.is_some_and(|whose| *whose != *owner) {
        return problem(403, "not_allowed", "it is somebody else's".into());
    }
    match server.apply(command) {
        Ok(_) => json(StatusCode::OK, &lease_body(server, lease)),
        Err(denied) => refusal_response(&denied),
    }
}

async fn follow(server: &SimulatedServer, owner: &str, generation: u64, body: FollowBody) -> Option<HttpResponse> {
    let until = Instant::now() + Duration::from_secs_f64(body.wait_secs);
    let mut kept: Option<Instant> = None;
    loop {
        server.wait_until_awake(generation).await?;
        if kept.is_none_or(|at| at.elapsed() >= FOLLOW_REFRESH) {
            kept = Some(Instant::now());
            for lease in &body.leases {
                // Unknown leases are named below.
                let _ = server.apply(PoolCommand::Follow { lease: LeaseId(*lease) });
            }
        }
        let mut followed = FollowResponse::default();
        for lease in &body.leases {
            let state = server.inspect(|pool| {
                let known = pool.lease(LeaseId(*lease)).filter(|known| *known.request.owner == *owner);
                known.map(|known| known.state)
            });
            match state {
                None => followed.unknown.push(*lease),
                Some(LeaseState::Queued) => {}
                Some(_) => followed.changed.extend(lease_body(server, LeaseId(*lease))),
            }
        }
        if !followed.changed.is_empty() || !followed.unknown.is_empty() || Instant::now() >= until {
            return Some(json(StatusCode::OK, &followed));
        }
        let again = until.min(Instant::now() + FOLLOW_REFRESH);
        tokio::select! {
            biased;
            () = server.changed.notified() => {}
            () = tokio::time::sleep_until(again) => {}
        }
    }
}

fn iso(time: PoolTime) -> String {
    format!("{} ms", time.0)
}

fn lease_body(server: &SimulatedServer, lease: LeaseId) -> Option<gpupool_api::lease::LeaseBody> {
    server.inspect(|pool| {
        let explanation = pool.explain(lease);
        Some(view::lease_body(pool, pool.lease(lease)?, explanation.as_ref(), iso, |_| BTreeMap::new(), true))
    })
}

fn pool(server: &SimulatedServer) -> gpupool_api::pool::PoolBody {
    let none = PromisedAmount { promised: 0.0, total: 0.0 };
    gpupool_api::pool::PoolBody {
        authority: "agent".into(),
        api_version: "1".into(),
        version: "1".into(),
        node_id: String::new(),
        node: String::new(),
        run_id: String::new(),
        simulated: true,
        devices: server.gpus as usize,
        open_devices: 0,
        free_devices: 0,
        promised: 0.0,
        active: 0,
        waiting: server.inspect(|pool| pool.waiter_count()),
        next_token: server.inspect(|pool| pool.next_token().0),
        cpus: none,
        host_memory_mib: none,
        confinement: String::new(),
        timestamp: iso(server.now()),
        event_id: None,
        age_secs: 0.0,
    }
}

fn devices(server: &SimulatedServer) -> DeviceList {
    let mut devices: Vec<_> = server.inspect(|pool| {
        let row = |id| pool.lease(id).map(gpupool_core::Lease::row);
        pool.devices().map(|view| view::device_body(&view, "node", row, iso)).collect()
    });
    for device in &mut devices {
        match server.misreport() {
            Some(Misreport::AllFree) => {
                device.leases.clear();
                (device.promised, device.promised_memory_mib) = (0.0, 0);
            }
            Some(Misreport::AllTaken) => device.closed = Some("hot".into()),
            Some(Misreport::MoreThanThereAre) | None => {}
        }
    }
    if server.misreport() == Some(Misreport::MoreThanThereAre) {
        let more = devices.iter().cloned().map(|mut device| {
            device.gpu_id += 100;
            device
        });
        devices.extend(more.collect::<Vec<_>>());
    }
    DeviceList { devices, timestamp: iso(server.now()), event_id: None, age_secs: 0.0 }
}

fn health() -> HealthBody {
    HealthBody {
        status: "healthy".into(),
        nvidia_smi_available: true,
        timestamp: String::new(),
        problems: Vec::new(),
        sources: Vec::new(),
        reading_age_secs: None,
        store: "fine".into(),
        pool_age_secs: 0.0,
        open: true,
        version: "1".into(),
        uptime_secs: 1.0,
    }
}

fn statistics(server: &SimulatedServer, route: &str) -> HttpResponse {
    let utilization = |gpu| if server.busy() == Some(gpu) { 95 } else { 0 };
    match route {
        "/gpu/summary" => json(
            StatusCode::OK,
            &SummaryBody {
                gpu_count: server.gpus as usize,
                total_memory_mb: MEMORY_MIB * u64::from(server.gpus),
                total_used_memory_mb: 0,
                total_memory_usage_percent: 0.0,
                average_utilization_percent: 0.0,
                average_over: 0,
                gpus_summary: (0..server.gpus)
                    .map(|gpu| GpuSummary {
                        gpu_id: gpu,
                        name: "NVIDIA H100".into(),
                        memory_usage_percent: 0.0,
                        utilization_percent: utilization(gpu),
                        unsupported: Vec::new(),
                    })
                    .collect(),
                timestamp: String::new(),
                stale: false,
                error: None,
            },
        ),
        "/gpu/stats" => {
            let gpus = (0..server.gpus).map(|gpu| GpuBody {
                gpu_id: gpu,
                name: "NVIDIA H100".into(),
                memory: GpuMemory {
                    total_mb: MEMORY_MIB,
                    used_mb: 0,
                    free_mb: MEMORY_MIB,
                    usage_percent: 0.0,
                    reserved_mb: None,
                    host_total_mb: None,
                    host_used_mb: None,
                },
                utilization_percent: utilization(gpu),
                temperature_c: None,
                power: GpuPower { draw_w: None, limit_w: None },
                uuid: None,
                vendor: String::new(),
                health: String::new(),
                health_reason: None,
                stale: false,
                timestamp: String::new(),
                asleep: false,
                unsupported: Vec::new(),
            });
            let (gpus, timestamp) = (gpus.collect(), String::new());
            json(
                StatusCode::OK,
                &StatsBody { gpu_count: server.gpus as usize, gpus, timestamp, stale: false, error: None },
            )
        }
        "/health" => json(StatusCode::OK, &health()),
        _ => HttpResponse {
            status: StatusCode::NOT_FOUND,
            headers: headers("application/json"),
            body: Bytes::from_static(b"{\"detail\":\"Not Found\"}"),
        },
    }
}

fn refusal_response(denied: &CommandDenied) -> HttpResponse {
    let (status, code) = view::denial_status_and_code(denied);
    problem(status, code, denied.to_string())
}

pub fn problem(status: u16, code: &str, detail: String) -> HttpResponse {
    let kind = "about:blank".into();
    let (title, code) = ("No".into(), code.into());
    let problem = ProblemBody { kind, title, status, code, detail, field: None, value: None, allowed: None };
    let mut response = json(StatusCode::from_u16(status).unwrap(), &problem);
    response.headers = headers(MEDIA_TYPE);
    response
}

fn json(status: StatusCode, body: &impl Serialize) -> HttpResponse {
    let body = serde_json::to_vec(body).unwrap().into();
    HttpResponse { status, headers: headers("application/json"), body }
}

fn headers(kind: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))])
}
