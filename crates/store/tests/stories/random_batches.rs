//! Random batches: the last row about each entity is loaded again, and restores the same pool.

use std::collections::BTreeMap;

use crate::common::{clock, open};
use crate::support::{PoolFixture, by, devices, mins, node, owned, part, secs, whole};
use gpupool_core::{LeaseId, OwnerQuota, Policies, Pool, PoolCommand, PoolRow, PoolTime, Request, Token};
use gpupool_store::{LeaseStore, TrailEvent, TrailQuery};
use proptest::prelude::*;
use tempfile::tempdir;

/// Operation that produces rows or uses the store.
#[derive(Debug, Clone)]
enum StoreAct {
    Ask(u8, u32),
    Release(u64),
    Revoke(u64),
    Pass(u64),
    Node(u8),
    Quota(u8),
    Forget(u64),
    /// Flushes the write-ahead buffer.
    Flush,
    /// Reads the trail.
    Read,
    Reopen,
}

fn any_act() -> impl Strategy<Value = StoreAct> {
    prop_oneof![
        6 => (0..4_u8, 1..=1000_u32).prop_map(|(owner, share)| StoreAct::Ask(owner, share)),
        3 => (0..12_u64).prop_map(StoreAct::Release),
        1 => (0..12_u64).prop_map(StoreAct::Revoke),
        2 => (1..40_u64).prop_map(StoreAct::Pass),
        1 => (0..3_u8).prop_map(StoreAct::Node),
        1 => (0..4_u8).prop_map(StoreAct::Quota),
        1 => (0..12_u64).prop_map(StoreAct::Forget),
        1 => Just(StoreAct::Flush),
        1 => Just(StoreAct::Read),
        1 => Just(StoreAct::Reopen),
    ]
}

/// Performs an operation on the fixture; a denial is fine.
fn perform(fixture: &mut PoolFixture, act: &StoreAct) {
    match *act {
        StoreAct::Ask(owner, 1000) => drop(fixture.try_request(owned(&format!("o{owner}"), whole()))),
        StoreAct::Ask(owner, share) => {
            let request = owned(&format!("o{owner}"), Request { ttl: secs(20), ..part(share) });
            let fgd = by(gpupool_core::PlacementStrategy::Fgd, request.clone());
            drop(fixture.try_request(if share % 2 == 0 { request } else { fgd }));
        }
        StoreAct::Release(lease) => drop(fixture.apply(PoolCommand::Release { lease: LeaseId(lease) })),
        StoreAct::Revoke(lease) => {
            drop(fixture.apply(PoolCommand::Revoke { lease: LeaseId(lease), grace: mins(1), revocation: None }))
        }
        StoreAct::Pass(time) => fixture.advance(secs(time)),
        StoreAct::Node(number) => {
            let name = format!("n{number}");
            fixture.add_node(node(&name), devices(&name, 2));
        }
        StoreAct::Quota(owner) => {
            let quota = OwnerQuota { held: None, share_hours: Some(5), weight: 2 };
            let policies = Policies { quotas: [(format!("o{owner}").into(), quota)].into(), ..Policies::unlimited() };
            fixture.apply_ok(PoolCommand::SetPolicies { policies: Box::new(policies) });
        }
        StoreAct::Forget(lease) => fixture.rows.push(PoolRow::Forget(LeaseId(lease))),
        StoreAct::Flush | StoreAct::Read | StoreAct::Reopen => {}
    }
}

/// Entity of a row, computed independently of the store.
fn entity(row: &PoolRow) -> String {
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

fn apply_to_model(model: &mut BTreeMap<String, PoolRow>, row: &PoolRow) {
    match row {
        PoolRow::Forget(_) | PoolRow::ForgetNode(_) | PoolRow::ForgetDevice(_) => drop(model.remove(&entity(row))),
        _ => drop(model.insert(entity(row), row.clone())),
    }
}

/// State of a restored pool, and its unreadable rows.
fn describe_pool(fixture: &PoolFixture, rows: impl IntoIterator<Item = PoolRow>) -> String {
    let (pool, mut bad) = Pool::restore(fixture.settings, Policies::unlimited(), PoolTime(fixture.now.0 + 1), rows);
    bad.sort_by_key(ToString::to_string);
    let leases: Vec<_> = pool.leases().collect();
    let (devices, nodes) = (pool.devices().collect::<Vec<_>>(), pool.nodes().collect::<Vec<_>>());
    let usage: Vec<_> = pool.usage().collect();
    format!("{bad:?} {leases:?} {devices:?} {nodes:?} {usage:?} {:?} {:?}", pool.policies(), pool.next_deadline())
}

/// Granted and ended leases in the trail, without those that were forgotten.
fn events_in_trail(store: &dyn LeaseStore, batches: &[Vec<StoreAct>]) -> BTreeMap<(LeaseId, bool), Option<Token>> {
    let page = store.trail_reader().history(&TrailQuery::default()).unwrap();
    assert_eq!(page.next, None, "a short story has one page");
    let recorded = page.records.into_iter().filter(|record| !is_forgotten(batches, record.lease));
    recorded.map(|record| ((record.lease, record.event == TrailEvent::Ended), record.token)).collect()
}

/// Granted and ended leases in the pool, without those that were forgotten.
fn events_in_pool(fixture: &PoolFixture, batches: &[Vec<StoreAct>]) -> BTreeMap<(LeaseId, bool), Option<Token>> {
    let leases = fixture.pool.leases().filter(|lease| !is_forgotten(batches, lease.id));
    leases
        .flat_map(|lease| [(lease.granted_at, false), (lease.ended_at, true)].map(|(at, ended)| (lease, at, ended)))
        .filter(|(_, at, _)| at.is_some())
        .map(|(lease, _, ended)| ((lease.id, ended), lease.token))
        .collect()
}

fn is_forgotten(batches: &[Vec<StoreAct>], lease: LeaseId) -> bool {
    batches.iter().flatten().any(|act| matches!(act, StoreAct::Forget(id) if *id == lease.0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_last_row_about_each_entity_is_restored(batches in prop::collection::vec(prop::collection::vec(any_act(), 1..6), 1..8)) {
        let dir = tempdir().unwrap();
        let mut fixture = PoolFixture::of(2);
        let mut model = BTreeMap::new();
        let (mut store, _) = open(dir.path());
        let mut committed = 0;
        for batch in &batches {
            for act in batch {
                perform(&mut fixture, act);
            }
            store.commit(&fixture.rows[committed..], clock(fixture.now.0)).unwrap();
            fixture.rows[committed..].iter().for_each(|row| apply_to_model(&mut model, row));
            committed = fixture.rows.len();
            for act in batch {
                match act {
                    StoreAct::Flush => store.flush().unwrap(),
                    StoreAct::Read => {
                        let (recorded, known) = (events_in_trail(&store, &batches), events_in_pool(&fixture, &batches));
                        prop_assert_eq!(recorded, known);
                    }
                    StoreAct::Reopen => {
                        drop(store);
                        store = open(dir.path()).0;
                    }
                    _ => {}
                }
            }
        }
        drop(store);
        let (store, rows) = open(dir.path());
        prop_assert_eq!(events_in_trail(&store, &batches), events_in_pool(&fixture, &batches));
        let found: BTreeMap<String, PoolRow> = rows.iter().map(|row| (entity(row), row.clone())).collect();
        prop_assert_eq!(found.len(), rows.len(), "each thing has one row");
        prop_assert_eq!(&found, &model);
        prop_assert_eq!(describe_pool(&fixture, rows), describe_pool(&fixture, model.into_values()));
    }
}
