//! The pool restores from any rows and works on, and rows of earlier versions can still be read.

use std::sync::Arc;

use crate::support::*;
use gpupool_core::{
    CordonState, DeviceHealth, DeviceId, DeviceLink, DeviceReading, GpuId, LeaseHolder, LeaseId, LinkKind, Millis,
    NodeId, OwnerQuota, PlacementStrategy as Placement, Policies, PoolCommand, PoolRow, PoolTime, QueueOrder, Request,
    RequestPolicy, Share, TaskClass, Token,
};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

/// Rows of a pool with a varied history, and some commands.
fn valid_lines() -> Vec<Value> {
    let mut test = PoolFixture::draining(3, secs(10));
    test.add_node(node("b"), devices("b", 2));
    let quota = OwnerQuota { held: Some(Share(8000)), share_hours: Some(5_000), weight: 2 };
    let rules = Policies {
        policies: vec![RequestPolicy { max_duration: Some(mins(90)), ..policy("all") }],
        quotas: [("alice".into(), quota)].into(),
        ..Policies::unlimited()
    };
    test.apply_ok(PoolCommand::SetPolicies { policies: Box::new(rules) });
    let shared = test.request(owned("alice", Request { cpus: cpus(4), ..part(300) }));
    test.request(by(Placement::Fgd, part(200)));
    let held = test.request(owned("bob", whole()));
    let token = test.token(held);
    test.apply_ok(PoolCommand::Attach { lease: held, token, holder: LeaseHolder::Process { pid: 7, started: 9 } });
    let stuck = test.request(gpus(2));
    test.request(Request { hedged: true, ..whole() });
    for _ in 0..3 {
        test.request(owned("alice", Request { host_memory: gib(1), ..whole() }));
    }
    test.release(stuck);
    test.advance(secs(12));
    test.release(shared);
    let rows = test.rows.iter().map(serde_json::to_value);
    let sample_commands = sample_commands(held, token, stuck);
    let all: Result<_, _> = rows.chain(sample_commands.iter().map(serde_json::to_value)).collect();
    all.expect("rows and commands are JSON")
}

/// Commands of every kind, to be corrupted too.
fn sample_commands(held: LeaseId, token: Token, stuck: LeaseId) -> Vec<PoolCommand> {
    let (device, at, grace) = (DeviceId(0), PoolTime(2_000_000), Millis(5));
    let class = TaskClass { cpus: cpus(1), share: HALF, gpus: 1, models: "H100|V100".into() };
    let link = DeviceLink { a: GpuId(0), b: GpuId(2), kind: LinkKind::NvLink(4) };
    vec![
        PoolCommand::NodeSeen { facts: node("a"), devices: devices("a", 4), numbers: Vec::new() },
        PoolCommand::Links { node: NodeId(0), links: vec![link] },
        PoolCommand::Renew { lease: held, token },
        PoolCommand::Drained { lease: stuck },
        PoolCommand::Release { lease: LeaseId(5) },
        PoolCommand::Request {
            request: Arc::new(by(Placement::LeastFragmentation, careful(part(100)))),
            key: None,
            by_admin: false,
        },
        PoolCommand::Observe { device, reading: DeviceReading { processes: None, ..DeviceReading::idle(at) } },
        PoolCommand::Request { request: Arc::new(gpus(2)), key: Some("k".into()), by_admin: false },
        PoolCommand::SetWorkload { classes: vec![(class, 7)] },
        PoolCommand::Follow { lease: LeaseId(6) },
        PoolCommand::Confirm { lease: LeaseId(4), token },
        PoolCommand::HolderGone { lease: held, grace },
        PoolCommand::SetHealth { device: DeviceId(1), health: DeviceHealth::Unhealthy("Xid 79".into()) },
        PoolCommand::Revoke { lease: held, grace, revocation: None },
        PoolCommand::Fail { lease: LeaseId(1), why: "fault".into() },
        PoolCommand::Cordon { device, cordon: CordonState::Cordoned },
        PoolCommand::Drain { device: DeviceId(3), grace },
        PoolCommand::SetPolicies { policies: Box::new(Policies { queue: QueueOrder::FairShare, ..policies([]) }) },
        PoolCommand::NodeLost { node: NodeId(1) },
        PoolCommand::ForgetDevice { device: DeviceId(4) },
        PoolCommand::ForgetNode { node: NodeId(1) },
        PoolCommand::Tick,
    ]
}

/// Corruption of one value.
#[derive(Debug, Clone)]
enum Corruption {
    Put(Value),
    CopyFrom(Index, Vec<Index>),
    Remove,
    Repeat,
}

fn corruption() -> impl Strategy<Value = Corruption> {
    let odd = prop::sample::select(vec![
        json!(0),
        json!(1),
        json!(-1),
        json!(7),
        json!(999),
        json!(1001),
        json!(u16::MAX),
        json!(u32::MAX),
        json!(1_u64 << 62),
        json!(u64::MAX),
        json!(u64::MAX - 1),
        json!(i32::MIN),
        json!(null),
        json!(true),
        json!(false),
        json!(""),
        json!([]),
        json!({}),
        json!("queued"),
        json!("active"),
        json!("offered"),
        json!("released"),
        json!("by_owner"),
        json!("fgd"),
    ]);
    prop_oneof![
        6 => odd.prop_map(Corruption::Put),
        2 => (any::<Index>(), path()).prop_map(|(row, path)| Corruption::CopyFrom(row, path)),
        1 => Just(Corruption::Remove),
        1 => Just(Corruption::Repeat),
    ]
}

fn path() -> impl Strategy<Value = Vec<Index>> {
    prop::collection::vec(any::<Index>(), 1..7)
}

/// Returns the value at a path: at each step one of the children, until there are none.
fn value_at<'a>(value: &'a mut Value, path: &[Index]) -> &'a mut Value {
    let children = value.as_array().map_or(0, Vec::len) + value.as_object().map_or(0, serde_json::Map::len);
    let Some((step, rest)) = path.split_first().filter(|_| children > 0) else { return value };
    let child = match value {
        Value::Array(items) => items.get_mut(step.index(children)),
        Value::Object(fields) => fields.values_mut().nth(step.index(children)),
        _ => None,
    };
    value_at(child.expect("a value with children has this one"), rest)
}

fn apply_corruption(rows: &mut Vec<Value>, row: &Index, path: &[Index], corruption: Corruption) {
    if rows.is_empty() {
        return;
    }
    let at = row.index(rows.len());
    match corruption {
        Corruption::Put(value) => *value_at(&mut rows[at], path) = value,
        Corruption::CopyFrom(other, from) => {
            let other = other.index(rows.len());
            let copied = value_at(&mut rows[other], &from).clone();
            *value_at(&mut rows[at], path) = copied;
        }
        Corruption::Remove => drop(rows.remove(at)),
        Corruption::Repeat => rows.push(rows[at].clone()),
    }
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

proptest! {
    // Failures are printed in full, which is enough to write a test.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn corrupted_rows_do_not_stop_the_pool(
        corruptions in prop::collection::vec((any::<Index>(), path(), corruption()), 1..8),
    ) {
        let mut rows = valid_lines();
        for (row, path, corruption) in corruptions {
            apply_corruption(&mut rows, &row, &path, corruption);
        }
        fuzzed::rows(lines(&rows).as_bytes());
    }

    #[test]
    fn any_text_for_rows_does_not_stop_the_pool(text in "(?s).*") {
        fuzzed::rows(text.as_bytes());
    }
}

#[test]
fn the_rows_to_corrupt_are_valid() {
    let valid = valid_lines();
    for line in &valid {
        let row = serde_json::from_value::<PoolRow>(line.clone());
        assert!(row.is_ok() || serde_json::from_value::<PoolCommand>(line.clone()).is_ok(), "{line}");
    }
    fuzzed::rows(lines(&valid).as_bytes());
}

#[test]
fn rows_written_by_the_first_schema_can_still_be_read() {
    let written = include_str!("../fixtures/rows-v1.jsonl");
    for line in written.lines() {
        serde_json::from_str::<PoolRow>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    fuzzed::rows(written.as_bytes());
}

#[test]
#[ignore = "prints the rows and commands above: for a new fixture after a change of the schema, and as seeds"]
fn print_valid_rows() {
    print!("{}", lines(&valid_lines()));
}
