//! Databases of every released schema are saved as text and must keep opening.
//!
//! With a new schema, save one: `GPUPOOL_SAVE=crates/store/tests/fixtures/vN.sql cargo test -p gpupool-store --test
//! saved -- --ignored` (an absolute path), and add a test that reads it. Never change a saved one.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../core/tests/support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;
use std::{env, fs};

use common::{clock, lease_ids, open, wall};
use gpupool_core::{
    CordonState, DeviceFacts, DeviceId, DeviceIdentity, DeviceLink, DeviceSelector, GpuId, IsolationLevel,
    IsolationSupport, Labels, LeaseHolder, LinkKind, LoadThresholds, Millis, OwnerQuota, PartitionFacts, PciAddress,
    PlacementStrategy, Policies, PolicyMatch, Pool, PoolCommand, PoolRow, PoolTime, QueueOrder, Request, RequestPolicy,
    RequestSize, RequestedAmount, Share, Vendor,
};
use gpupool_store::{LeaseStore, SqliteStore, TokenRole, TrailQuery};
use rusqlite::Connection;
use serde_json::Value as Json;
use support::{PoolFixture, by, owned, part, policies, whole};
use tempfile::tempdir;

#[test]
fn a_saved_database_of_schema_1_opens() {
    let dir = tempdir().unwrap();
    let saved = Connection::open(dir.path().join("pool.db")).unwrap();
    saved.execute_batch(include_str!("fixtures/v1.sql")).unwrap();
    drop(saved);
    let (store, rows) = open(dir.path());
    assert_eq!(lease_ids(&rows), [0, 1, 2]);
    let names: Vec<String> = rows.iter().map(|row| format!("{row:?}")).collect();
    for kind in ["Node", "Device", "Lease", "Counters", "Policies", "Usage", "Workload"] {
        assert!(names.iter().any(|name| name.starts_with(kind)), "a row of kind {kind}");
    }
    let history = store.trail_reader().history(&TrailQuery::default()).unwrap().records;
    assert_eq!(history.iter().map(|record| record.lease.0).collect::<Vec<_>>(), [0, 1, 0, 2]);
    assert!(history.iter().all(|record| record.devices[0].node == "a"));
    let tokens = store.tokens().unwrap();
    assert_eq!((&*tokens[0].token.owner, tokens[0].token.role), ("alice", TokenRole::Admin));
    assert_eq!(store.generation(), 1);
}

/// Stored texts are read and written again unchanged, apart from newer fields, so a renamed type or field cannot change
/// the format.
#[test]
fn a_saved_database_of_schema_4_opens_and_is_written_unchanged() {
    let dir = tempdir().unwrap();
    let saved = Connection::open(dir.path().join("pool.db")).unwrap();
    saved.execute_batch(include_str!("fixtures/v4.sql")).unwrap();
    let texts = |query: &str| -> Vec<String> {
        saved.prepare(query).unwrap().query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    let json = |text: String| serde_json::from_str::<Json>(&text).unwrap();
    let mut stored: Vec<Json> =
        texts("SELECT value FROM rows UNION ALL SELECT value FROM leases").into_iter().map(json).collect();
    let unflushed = "SELECT batch FROM notes WHERE number > coalesce((SELECT number FROM heard), 0)";
    for note in texts(unflushed).into_iter().map(json) {
        stored.extend(note["rows"].as_array().unwrap().iter().cloned());
    }
    assert!(stored.len() > 40, "{} rows are stored", stored.len());
    for value in &stored {
        let row: PoolRow = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"));
        let written = serde_json::to_value(&row).unwrap();
        assert!(has_all_fields(&written, value), "{value} is written as {written}");
    }
    let all: String = stored.iter().map(ToString::to_string).collect();
    for name in VARIANTS {
        assert!(all.contains(&format!("\"{name}\"")), "{name} is not in the saved database");
    }
    drop(saved);

    let (store, rows) = open(dir.path());
    let history = store.trail_reader().history(&TrailQuery::default()).unwrap().records;
    assert!(history.iter().any(|record| record.cause.is_some()));
    let (pool, bad) = Pool::restore(Default::default(), policies([]), PoolTime(0), rows);
    assert_eq!(bad, []);
    pool.check_invariants().unwrap();
    assert_eq!(store.generation(), 1);
    let causes: BTreeSet<String> =
        pool.leases().filter_map(|lease| Some(format!("{:?}", lease.cause.as_ref()?))).collect();
    assert!(causes.len() >= 7, "{causes:?}");
    assert!(pool.leases().any(|lease| matches!(lease.holder, Some(LeaseHolder::Supervisor { pid: 12, started: 3 }))));
}

/// Whether every field of `stored` is in `written` with the same value.
fn has_all_fields(written: &Json, stored: &Json) -> bool {
    match (written, stored) {
        (Json::Object(written), Json::Object(stored)) => {
            stored.iter().all(|(name, value)| written.get(name).is_some_and(|now| has_all_fields(now, value)))
        }
        (Json::Array(written), Json::Array(stored)) => {
            written.len() == stored.len() && written.iter().zip(stored).all(|(now, value)| has_all_fields(now, value))
        }
        _ => written == stored,
    }
}

#[test]
fn tokens_of_schema_4_keep_their_roles_and_schema_5_has_read_only_ones() {
    for (saved, expected) in [
        (include_str!("fixtures/v4.sql"), &[TokenRole::Admin, TokenRole::User][..]),
        (include_str!("fixtures/v5.sql"), &[TokenRole::Admin, TokenRole::User, TokenRole::ReadOnly]),
    ] {
        let dir = tempdir().unwrap();
        Connection::open(dir.path().join("pool.db")).unwrap().execute_batch(saved).unwrap();
        let (mut store, _) = open(dir.path());
        let roles = |store: &SqliteStore| -> Vec<TokenRole> {
            store.tokens().unwrap().iter().map(|token| token.token.role).collect()
        };
        assert_eq!(roles(&store), expected);
        store.create_token("grafana", TokenRole::ReadOnly, wall(9)).unwrap();
        drop(store);
        assert_eq!(roles(&open(dir.path()).0).last(), Some(&TokenRole::ReadOnly));
    }
}

/// Names of all variants in stored rows.
const VARIANTS: [&str; 58] = [
    // Rows.
    "node",
    "device",
    "lease",
    "counters",
    "policies",
    "usage",
    "workload",
    // States, causes, holders, queue turns.
    "queued",
    "offered",
    "active",
    "released",
    "expired",
    "revoked",
    "failed",
    "by_owner",
    "holder_gone",
    "ttl_passed",
    "max_duration_passed",
    "wait_limit_passed",
    "abandoned",
    "offer_lapsed",
    "fault",
    "process",
    "supervisor",
    "cgroup",
    "connection",
    "on_arrival",
    "next",
    "passed_others",
    "ends_before_others_start",
    // Requests.
    "whole",
    "share",
    "memory",
    "both",
    "shared",
    "time-slicing",
    "mps",
    "mig",
    "first-fit",
    "best-fit",
    "worst-fit",
    "round-robin",
    "load-balanced",
    "least-used",
    "paper-best-fit",
    "fgd",
    "least-fragmentation",
    // Devices and rules.
    "nvidia",
    "amd",
    "intel",
    "other",
    "uuid",
    "pci",
    "cordoned",
    "nv_link",
    "cross_numa",
    "fair-share",
    "host_only",
];

/// Saves a database with every kind of row, state, cause and holder as text.
#[test]
#[ignore = "writes a file, named by GPUPOOL_SAVE"]
fn save_database() {
    let dir = tempdir().unwrap();
    let mut fixture = PoolFixture::draining(8, support::HOUR);
    fixture.apply_ok(PoolCommand::SetPolicies { policies: Box::new(every_rule()) });
    let (node, devices) = fixture.register_node(support::node("b"), every_device());
    for device in devices {
        fixture.report_idle(device.0);
    }
    let kinds = [
        LinkKind::NvLink(12),
        LinkKind::Xgmi(1),
        LinkKind::PcieSwitch,
        LinkKind::PcieSwitches,
        LinkKind::HostBridge,
        LinkKind::SameNuma,
        LinkKind::CrossNuma,
    ];
    let links = kinds.iter().map(|kind| DeviceLink { a: GpuId(0), b: GpuId(1), kind: *kind }).collect();
    fixture.apply_ok(PoolCommand::Links { node, links });
    // Queue turns: one request waits for two devices, others pass it, and then it is granted.
    let t4 = |gpus| Request { gpus, select: support::model("T4"), max_duration: Some(support::HOUR), ..whole() };
    let held = fixture.request(t4(1));
    let two = fixture.request(t4(2));
    let short = fixture.request(Request { max_duration: Some(support::secs(5)), ..t4(1) });
    let other = fixture.request(Request { select: support::model("L4"), ..part(10) });
    let waits = fixture.request(Request { select: support::model("L4"), ..whole() });
    for lease in [held, short, other] {
        fixture.release(lease);
        fixture.apply_ok(PoolCommand::Drained { lease });
    }
    assert!(fixture.is_active(two) && fixture.is_active(waits));
    let attach = |fixture: &mut PoolFixture, request: Request, holder: LeaseHolder| {
        let lease = fixture.request(request);
        fixture.apply_ok(PoolCommand::Attach { lease, token: fixture.token(lease), holder });
        lease
    };
    // Leases that ended in every way and are not forgotten, because their processes still run.
    let released = fixture.request(owned("alice", part(100)));
    fixture.release(released);
    let gone = attach(&mut fixture, owned("bob", part(100)), LeaseHolder::Process { pid: 11, started: 2 });
    fixture.apply_ok(PoolCommand::HolderGone { lease: gone, grace: Millis(0) });
    let revoked = fixture.request(part(100));
    fixture.apply_ok(PoolCommand::Revoke { lease: revoked, grace: Millis(0), revocation: None });
    let failed = fixture.request(part(100));
    fixture.apply_ok(PoolCommand::Fail { lease: failed, why: "the node was lost".into() });
    fixture.request(part(100));
    fixture.request(Request { hedged: true, ..part(100) });
    let limited = Request { max_duration: Some(support::secs(30)), ttl: support::HOUR, ..part(100) };
    fixture.request(limited.clone());
    fixture.request(Request { wait_limit: Some(support::secs(10)), ..t4(1) });
    fixture.request(t4(1));
    fixture.advance(support::secs(90));
    // Leases with every kind of holder, strategy, amount and isolation.
    attach(&mut fixture, part(100), LeaseHolder::Process { pid: 10, started: 1 });
    attach(&mut fixture, part(100), LeaseHolder::Supervisor { pid: 12, started: 3 });
    attach(&mut fixture, part(100), LeaseHolder::Cgroup("/gpupool/lease-1".into()));
    attach(&mut fixture, part(100), LeaseHolder::Connection);
    for strategy in PlacementStrategy::ALL {
        fixture.request(by(*strategy, Request { max_duration: Some(support::HOUR), ..part(10) }));
    }
    for isolation in [IsolationLevel::TimeSlicing, IsolationLevel::Mps] {
        fixture.request(Request { isolation, ..part(10) });
    }
    fixture.request(Request {
        isolation: IsolationLevel::Mig,
        select: support::model("NVIDIA A100 MIG 1g.10gb"),
        ..whole()
    });
    fixture.request(support::memory(support::gib(1)));
    fixture.request(Request { amount: RequestedAmount::Both(Share(10), support::gib(1)), ..whole() });
    fixture.request(Request { amount: RequestedAmount::Shared, ..whole() });
    fixture.request(every_field());
    fixture.apply_ok(PoolCommand::Cordon { device: DeviceId(0), cordon: CordonState::Cordoned });
    fixture.request(Request { hedged: true, ..part(10) });
    fixture.request(Request { gpus: 8, ..whole() });

    let rows: Vec<PoolRow> = fixture.rows.iter().filter(|row| !matches!(row, PoolRow::Forget(_))).cloned().collect();
    let (mut store, _) = open(dir.path());
    store.commit(&rows, clock(fixture.now.0)).unwrap();
    store.flush().unwrap();
    store.create_token("alice", TokenRole::Admin, wall(0)).unwrap();
    store.create_token("bob", TokenRole::User, wall(0)).unwrap();
    store.create_token("grafana", TokenRole::ReadOnly, wall(0)).unwrap();
    // Batches that stay in the buffer: a changed lease and a forgotten one.
    let before = fixture.rows.len();
    fixture.apply_ok(PoolCommand::Drained { lease: released });
    let noted = fixture.request(owned("carol", part(10)));
    fixture.advance(Millis(1));
    store.commit(&fixture.rows[before..], clock(fixture.now.0)).unwrap();
    store.commit(&[PoolRow::Forget(gone)], clock(fixture.now.0)).unwrap();
    assert!(store.unflushed_batches() > 0, "lease {noted} is in the buffer");
    drop(store);
    let connection = Connection::open(dir.path().join("pool.db")).unwrap();
    // Batches in the buffer are as long as a page; the spaces at their end have no meaning.
    connection.execute("UPDATE notes SET batch = rtrim(batch)", []).unwrap();
    fs::write(env::var_os("GPUPOOL_SAVE").unwrap(), dump_database(&connection).unwrap()).unwrap();
}

/// Devices of every vendor, identity and kind.
fn every_device() -> Vec<DeviceFacts> {
    let pci =
        DeviceIdentity::Pci { address: PciAddress { domain: 0, bus: 3, device: 0, function: 0 }, partition: Some(1) };
    let parent = DeviceIdentity::Uuid("GPU-parent".into());
    let mut mig = support::device("MIG-1", "NVIDIA A100 MIG 1g.10gb", 10);
    mig.partition = Some(PartitionFacts { parent, profile: "1g.10gb".into(), of_parent: Share(142) });
    mig.isolation = IsolationSupport { mps: true, mig: true };
    let vendor = |uuid: &str, vendor, model: &str| DeviceFacts { vendor, ..support::device(uuid, model, 64) };
    let labels = [("rack".into(), "7".into())].into_iter().collect();
    vec![
        DeviceFacts { identity: pci, labels, ..vendor("", Vendor::Amd, "AMD Instinct MI300X") },
        mig,
        vendor("GPU-intel", Vendor::Intel, "Intel Data Center GPU Max 1550"),
        DeviceFacts { memory: None, ..vendor("GPU-other", Vendor::Other, "Other") },
        DeviceFacts {
            isolation: IsolationSupport { mps: true, mig: false },
            ..support::device("GPU-mps", "NVIDIA A10", 24)
        },
        support::device("GPU-t4-0", "NVIDIA T4", 16),
        support::device("GPU-t4-1", "NVIDIA T4", 16),
        support::device("GPU-l4", "NVIDIA L4", 24),
    ]
}

fn every_field() -> Request {
    let labels: Labels = [("team".into(), "vision".into())].into_iter().collect();
    Request {
        thresholds: Some(LoadThresholds::default()),
        select: Arc::new(DeviceSelector {
            vendor: Some(Vendor::Nvidia),
            models: vec!["H100".into()],
            min_memory: Some(support::gib(8)),
            gpu_ids: vec![GpuId(5)],
            uuids: vec!["GPU-a-5".into()],
            labels: Labels::default(),
        }),
        cpus: support::cpus(2),
        host_memory: support::gib(4),
        worker_id: Some("worker".into()),
        labels: Arc::new(labels),
        priority: 3,
        wait_limit: Some(support::HOUR),
        max_duration: Some(support::HOUR),
        ..owned("dave", part(10))
    }
}

fn every_rule() -> Policies {
    let labels: Labels = [("team".into(), "vision".into())].into_iter().collect();
    let policy = RequestPolicy {
        name: "vision".into(),
        applies_to: PolicyMatch {
            owners: vec!["erin".into()],
            sizes: vec![RequestSize::HostOnly, RequestSize::Part, RequestSize::Whole, RequestSize::Several],
            labels: labels.clone(),
        },
        strategy: Some(PlacementStrategy::Fgd),
        min_share: Some(Share(100)),
        max_share: Some(Share(900)),
        max_memory: Some(support::gib(40)),
        sharing_allowed: false,
        isolation_allowed: vec![IsolationLevel::Mps],
        max_priority: 7,
        priority_boost: 5,
        max_duration: Some(support::HOUR),
        node_selector: Arc::new(labels),
        preferred_models: Arc::from(["H100".into()]),
        max_allocations: Some(4),
        gpu_required: true,
    };
    let quota = OwnerQuota { held: Some(Share(2000)), share_hours: Some(100_000), weight: 2 };
    let quotas = [("erin".into(), quota)].into_iter().collect();
    Policies { queue: QueueOrder::FairShare, quotas, ..policies([policy]) }
}

fn dump_database(connection: &Connection) -> rusqlite::Result<String> {
    let mut text = String::new();
    for name in ["application_id", "user_version"] {
        let number: i64 = connection.pragma_query_value(None, name, |row| row.get(0))?;
        writeln!(text, "PRAGMA {name} = {number};").unwrap();
    }
    let mut tables = connection.prepare("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL")?;
    let mut tables = tables.query([])?;
    while let Some(table) = tables.next()? {
        let (kind, name, sql): (String, String, String) = (table.get(0)?, table.get(1)?, table.get(2)?);
        writeln!(text, "{sql};").unwrap();
        if kind != "table" {
            continue;
        }
        let columns = "SELECT 'SELECT ' || group_concat('quote(' || name || ')', ' || '','' || ') || ' FROM ' || ?1
            FROM pragma_table_info(?1)";
        let select: String = connection.query_row(columns, [&name], |row| row.get(0))?;
        let mut rows = connection.prepare(&select)?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            writeln!(text, "INSERT INTO {name} VALUES ({});", row.get::<_, String>(0)?).unwrap();
        }
    }
    Ok(text)
}
