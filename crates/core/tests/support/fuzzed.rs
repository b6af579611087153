//! Checks that hold for any bytes. The fuzz tests here run them briefly, the targets in `fuzz/` for longer.

use std::sync::Arc;

use gpupool_core::{
    Bytes, DrainMode, FieldError, LeaseState, MilliCpus, Millis, NodeFacts, Policies, Pool, PoolCommand, PoolRow,
    PoolSettings, PoolTime, Request, RequestBody,
};

/// Fields that an error about a request may name.
const FIELDS: &[&str] = &[
    "gpus",
    "fraction",
    "memory_mib",
    "isolation",
    "strategy",
    "memory_threshold",
    "utilization_threshold",
    "select.model",
    "select.min_memory_mib",
    "select.gpu_ids",
    "select.uuids",
    "select.labels",
    "cpus",
    "host_memory_mib",
    "owner",
    "worker_id",
    "priority",
    "wait_limit_secs",
    "ttl_secs",
    "max_duration_secs",
];

/// Checks that a request body becomes a valid request, or an error that names the field.
pub fn request_body(bytes: &[u8]) {
    let Ok(body) = serde_json::from_slice::<RequestBody>(bytes) else { return };
    let request = match Request::try_from(body) {
        Ok(request) => request,
        Err(error) => return assert_names_field(&error),
    };
    assert_eq!(request.validate(), Ok(()), "what comes of a body is valid");
    let written = serde_json::to_string(&request).expect("a request is JSON");
    let read: Request = serde_json::from_str(&written).expect("a request comes back from JSON");
    assert_eq!(read, request, "a request changes on its way through JSON");

    for policies in [Policies::default(), Policies::unlimited()] {
        let mut pool = Pool::new(PoolSettings::default(), policies);
        request_and_release(&mut pool, PoolTime(0), request.clone());
    }
}

fn assert_names_field(error: &FieldError) {
    assert!(FIELDS.contains(&error.field), "{error}: unknown field {:?}", error.field);
    assert!(!error.allowed.is_empty(), "{error}: no allowed values");
}

/// Checks that a pool restores from any rows and commands (one JSON value per line) and works on.
pub fn rows(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut rows = Vec::new();
    let mut commands = Vec::new();
    for line in text.lines() {
        if let Ok(row) = serde_json::from_str::<PoolRow>(line) {
            rows.push(row);
        } else if let Ok(command) = serde_json::from_str::<PoolCommand>(line) {
            commands.push(command);
        }
    }
    for drain in [DrainMode::AtOnce, DrainMode::WhenGone { patience: Millis::from_secs(10) }] {
        let settings = PoolSettings { drain, reading_max_age: Some(Millis::from_secs(60)) };
        apply_and_end(settings, rows.clone(), commands.clone());
    }
}

fn apply_and_end(settings: PoolSettings, rows: Vec<PoolRow>, commands: Vec<PoolCommand>) {
    let mut now = PoolTime(1_000_000);
    let (mut pool, bad) = Pool::restore(settings, Policies::unlimited(), now, rows);
    check(&pool, &format!("the restore, which complained of {bad:?}"));
    let tokens_before = pool.leases().filter_map(|lease| lease.token).max();

    for command in commands {
        now = now.after(Millis::from_secs(1));
        apply(&mut pool, now, command);
    }
    let nodes: Vec<_> = pool.nodes().collect();
    for node in nodes {
        let devices = node.devices.iter().filter_map(|id| pool.device(*id)).map(|view| (*view.facts).clone()).collect();
        apply(&mut pool, now, PoolCommand::NodeSeen { facts: node.facts, devices, numbers: Vec::new() });
    }
    let token = request_and_release(&mut pool, now, Request::default());
    assert!(token.is_none_or(|token| Some(token) > tokens_before), "token {token:?} after {tokens_before:?}");
    for _ in 0..20 {
        let Some(due) = pool.next_deadline() else { break };
        now = now.max(due);
        apply(&mut pool, now, PoolCommand::Tick);
    }
    end_everything(&mut pool, now);
}

/// Requests on a new node, checks the lease, and releases it.
fn request_and_release(pool: &mut Pool, now: PoolTime, request: Request) -> Option<gpupool_core::Token> {
    let own = NodeFacts {
        name: "a node of its own".into(),
        cpus: MilliCpus(64_000),
        memory: Bytes(1 << 39),
        labels: Default::default(),
    };
    let devices = super::devices("own", 2);
    apply(pool, now, PoolCommand::NodeSeen { facts: own, devices, numbers: Vec::new() });
    let (reply, _) = pool.apply(now, PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false });
    check(pool, "a request");
    let Ok(gpupool_core::CommandReply::Lease(lease)) = reply else { return None };
    assert_eq!(pool.explain(lease).is_some(), pool.lease(lease).is_some_and(|l| l.state == LeaseState::Queued));
    let token = pool.lease(lease).and_then(|lease| lease.token);
    apply(pool, now, PoolCommand::Release { lease });
    token
}

fn end_everything(pool: &mut Pool, now: PoolTime) {
    let leases: Vec<_> = pool.leases().map(|lease| lease.id).collect();
    for lease in leases {
        let _for_people = pool.explain(lease).map(|why| why.to_string());
        apply(pool, now, PoolCommand::Release { lease });
        apply(pool, now, PoolCommand::Drained { lease });
    }
    // Waiters were served by the freed devices: end those too.
    let leases: Vec<_> = pool.leases().map(|lease| lease.id).collect();
    for lease in leases {
        apply(pool, now, PoolCommand::Release { lease });
        apply(pool, now, PoolCommand::Drained { lease });
    }
    for device in pool.devices() {
        assert!(device.promised.is_zero() && device.promised_memory.is_zero(), "{device:?} still holds something");
    }
}

fn apply(pool: &mut Pool, now: PoolTime, command: PoolCommand) {
    let text = format!("{command:?}");
    let _denied_or_not = pool.apply(now, command);
    check(pool, &text);
}

fn check(pool: &Pool, after: &str) {
    if let Err(broken) = pool.check_invariants() {
        panic!("after {after}: {broken}");
    }
}
