//! Whatever rows are kept, in whatever batches, the last one about each thing comes back, and the same pool with it.

use std::collections::BTreeMap;

use crate::common::{clock, open};
use crate::support::{Stage, by, devices, mins, node, owned, part, secs, whole};
use gpupool_core::{LeaseId, OwnerQuota, Policies, Pool, PoolCommand, PoolRow, PoolTime, Request, Token};
use gpupool_store::{LeaseStore, TrailEvent, TrailQuery};
use proptest::prelude::*;
use tempfile::tempdir;

/// Something that leaves rows.
#[derive(Debug, Clone)]
enum Act {
    Ask(u8, u32),
    Release(u64),
    Revoke(u64),
    Pass(u64),
    Node(u8),
    Quota(u8),
    Forget(u64),
    /// The write-ahead buffer is flushed.
    Flush,
    /// The trail is read.
    Read,
    Reopen,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0..4_u8, 1..=1000_u32).prop_map(|(owner, share)| Act::Ask(owner, share)),
        3 => (0..12_u64).prop_map(Act::Release),
        1 => (0..12_u64).prop_map(Act::Revoke),
        2 => (1..40_u64).prop_map(Act::Pass),
        1 => (0..3_u8).prop_map(Act::Node),
        1 => (0..4_u8).prop_map(Act::Quota),
        1 => (0..12_u64).prop_map(Act::Forget),
        1 => Just(Act::Flush),
        1 => Just(Act::Read),
        1 => Just(Act::Reopen),
    ]
}

/// Does it on the stage; a denial is fine.
fn perform(stage: &mut Stage, act: &Act) {
    match *act {
        Act::Ask(owner, 1000) => drop(stage.try_ask(owned(&format!("o{owner}"), whole()))),
        Act::Ask(owner, share) => {
            let request = owned(&format!("o{owner}"), Request { ttl: secs(20), ..part(share) });
            let fgd = by(gpupool_core::PlacementStrategy::Fgd, request.clone());
            drop(stage.try_ask(if share % 2 == 0 { request } else { fgd }));
        }
        Act::Release(lease) => drop(stage.apply(PoolCommand::Release { lease: LeaseId(lease) })),
        Act::Revoke(lease) => drop(stage.apply(PoolCommand::Revoke { lease: LeaseId(lease), grace: mins(1) })),
        Act::Pass(time) => stage.pass(secs(time)),
        Act::Node(number) => {
            let name = format!("n{number}");
            stage.add(node(&name), devices(&name, 2));
        }
        Act::Quota(owner) => {
            let quota = OwnerQuota { held: None, share_hours: Some(5), weight: 2 };
            let policies = Policies { quotas: [(format!("o{owner}").into(), quota)].into(), ..Policies::unlimited() };
            stage.run(PoolCommand::SetPolicies { policies: Box::new(policies) });
        }
        Act::Forget(lease) => stage.rows.push(PoolRow::Forget(LeaseId(lease))),
        Act::Flush | Act::Read | Act::Reopen => {}
    }
}

/// What a row is about, told another way than the store tells it.
fn subject(row: &PoolRow) -> String {
    match row {
        PoolRow::Node(row) => format!("node {:?}", row.node),
        PoolRow::Device(row) => format!("device {:?}", row.device),
        PoolRow::Lease(row) => format!("lease {:?}", row.id),
        PoolRow::Forget(lease) => format!("lease {lease:?}"),
        PoolRow::ForgetNode(node) => format!("node {node:?}"),
        PoolRow::ForgetDevice(device) => format!("device {device:?}"),
        PoolRow::Counters(_) => "counters".into(),
        PoolRow::Policies(_) => "policies".into(),
        PoolRow::Usage(row) => format!("usage {:?}", row.owner),
        PoolRow::Workload(row) => format!("workload {:?}", row.class),
    }
}

fn remember(model: &mut BTreeMap<String, PoolRow>, row: &PoolRow) {
    match row {
        PoolRow::Forget(_) | PoolRow::ForgetNode(_) | PoolRow::ForgetDevice(_) => drop(model.remove(&subject(row))),
        _ => drop(model.insert(subject(row), row.clone())),
    }
}

/// Everything a restored pool shows, and what it complained of.
fn shown(stage: &Stage, rows: impl IntoIterator<Item = PoolRow>) -> String {
    let (pool, mut bad) = Pool::restore(stage.settings, Policies::unlimited(), PoolTime(stage.now.0 + 1), rows);
    bad.sort_by_key(ToString::to_string);
    let leases: Vec<_> = pool.leases().collect();
    let (devices, nodes) = (pool.devices().collect::<Vec<_>>(), pool.nodes().collect::<Vec<_>>());
    let usage: Vec<_> = pool.usage().collect();
    format!("{bad:?} {leases:?} {devices:?} {nodes:?} {usage:?} {:?} {:?}", pool.policies(), pool.next_deadline())
}

/// Which leases were granted and which ended, by the trail; those that were forgotten on the way aside.
fn trail_of(store: &dyn LeaseStore, batches: &[Vec<Act>]) -> BTreeMap<(LeaseId, bool), Option<Token>> {
    let page = store.trail_reader().history(&TrailQuery::default()).unwrap();
    assert_eq!(page.next, None, "a short story has one page");
    let told = page.records.into_iter().filter(|record| !forgotten(batches, record.lease));
    told.map(|record| ((record.lease, record.event == TrailEvent::Ended), record.token)).collect()
}

/// The same by the pool.
fn trail_told(stage: &Stage, batches: &[Vec<Act>]) -> BTreeMap<(LeaseId, bool), Option<Token>> {
    let leases = stage.pool.leases().filter(|lease| !forgotten(batches, lease.id));
    leases
        .flat_map(|lease| [(lease.granted_at, false), (lease.ended_at, true)].map(|(at, ended)| (lease, at, ended)))
        .filter(|(_, at, _)| at.is_some())
        .map(|(lease, _, ended)| ((lease.id, ended), lease.token))
        .collect()
}

fn forgotten(batches: &[Vec<Act>], lease: LeaseId) -> bool {
    batches.iter().flatten().any(|act| matches!(act, Act::Forget(id) if *id == lease.0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_last_row_about_each_thing_comes_back(batches in prop::collection::vec(prop::collection::vec(act(), 1..6), 1..8)) {
        let dir = tempdir().unwrap();
        let mut stage = Stage::of(2);
        let mut model = BTreeMap::new();
        let (mut store, _) = open(dir.path());
        let mut kept = 0;
        for batch in &batches {
            for act in batch {
                perform(&mut stage, act);
            }
            store.commit(&stage.rows[kept..], clock(stage.now.0)).unwrap();
            stage.rows[kept..].iter().for_each(|row| remember(&mut model, row));
            kept = stage.rows.len();
            for act in batch {
                match act {
                    Act::Flush => store.flush().unwrap(),
                    Act::Read => {
                        let (told, known) = (trail_of(&store, &batches), trail_told(&stage, &batches));
                        prop_assert_eq!(told, known);
                    }
                    Act::Reopen => {
                        drop(store);
                        store = open(dir.path()).0;
                    }
                    _ => {}
                }
            }
        }
        drop(store);
        let (store, rows) = open(dir.path());
        prop_assert_eq!(trail_of(&store, &batches), trail_told(&stage, &batches));
        let found: BTreeMap<String, PoolRow> = rows.iter().map(|row| (subject(row), row.clone())).collect();
        prop_assert_eq!(found.len(), rows.len(), "each thing has one row");
        prop_assert_eq!(&found, &model);
        prop_assert_eq!(shown(&stage, rows), shown(&stage, model.into_values()));
    }
}
