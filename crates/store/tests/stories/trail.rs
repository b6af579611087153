//! The audit trail: each grant and each end has one record, with lasting names, and the sums are right.
//!
//! Every story runs on a store whose batches stay in the write-ahead buffer, on one that is flushed after each reading,
//! which must change nothing, and on one in memory.

use crate::all_backends;
use crate::common::{clock, lease_ids, load_rows, wall};
use crate::support::{Stage, gib, gpus, owned, part, secs, whole};
use gpupool_core::{DeviceRow, GpuId, LeaseHolder, LeaseId, Millis, PoolCommand, PoolRow, Request, Share};
use gpupool_store::{
    ClockReading, LeaseStore, TrailEvent, TrailPage, TrailQuery, TrailReader, TrailRecord, UsageDimension, UsageTotal,
};

/// A stage whose rows are committed to a store.
struct RecordedStage {
    stage: Stage,
    store: Box<dyn LeaseStore>,
    reader: Box<dyn TrailReader>,
    committed: usize,
    /// Whether the store is flushed after each reading.
    is_flushed: bool,
    /// Whether small batches stay in a buffer until the store is flushed.
    has_buffer: bool,
}

/// Runs a story on every store. The story begins with its stage.
fn in_every_store(story: impl Fn(&dyn Fn(Stage) -> RecordedStage)) {
    for is_flushed in [false, true] {
        for backend in all_backends() {
            let has_buffer = backend.has_buffer();
            story(&|stage| {
                let store = backend.open();
                let reader = store.trail_reader();
                RecordedStage { stage, store, reader, committed: 0, is_flushed, has_buffer }
            });
        }
    }
}

impl RecordedStage {
    fn clock(&self) -> ClockReading {
        clock(self.stage.now.0)
    }

    fn commit(&mut self) {
        let clock = self.clock();
        self.store.commit(&self.stage.rows[self.committed..], clock).unwrap();
        self.committed = self.stage.rows.len();
    }

    /// Requests a lease, and commits the changes.
    fn ask(&mut self, owner: &str, request: Request) -> LeaseId {
        let lease = self.stage.ask(owned(owner, Request { ttl: secs(3600), ..request }));
        self.commit();
        lease
    }

    /// Releases a lease after that many seconds, and commits the changes.
    fn release_after(&mut self, time: u64, lease: LeaseId) {
        self.stage.pass(secs(time));
        self.stage.release(lease);
        self.commit();
    }

    /// Reads the trail; flushing must change nothing.
    fn read<T: PartialEq + std::fmt::Debug>(&mut self, read: impl Fn(&dyn TrailReader) -> T) -> T {
        let unflushed = read(&*self.reader);
        if self.is_flushed {
            self.store.flush().unwrap();
            assert_eq!(self.store.unflushed_batches(), 0);
            assert_eq!(read(&*self.reader), unflushed);
        }
        unflushed
    }

    fn history(&mut self, query: &TrailQuery) -> TrailPage {
        self.read(|reader| reader.history(query).unwrap())
    }

    fn records(&mut self) -> Vec<TrailRecord> {
        self.history(&TrailQuery::default()).records
    }

    fn usage(&mut self, by: UsageDimension, since: u64) -> Vec<UsageTotal> {
        let now = self.clock().wall;
        self.read(|reader| reader.usage(by, wall(since), now).unwrap())
    }
}

fn events(records: &[TrailRecord]) -> Vec<(u64, TrailEvent)> {
    records.iter().map(|record| (record.lease.0, record.event)).collect()
}

#[test]
fn a_lease_has_a_record_of_its_grant_and_its_end_with_devices() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(2));
        let start = recorded.stage.now.0;
        let lease = recorded.ask("alice", Request { worker_id: Some("w1".into()), ..part(250) });
        recorded.release_after(10, lease);
        let records = recorded.records();
        assert_eq!(events(&records), [(0, TrailEvent::Granted), (0, TrailEvent::Ended)]);
        let [granted, ended] = &records[..] else { panic!("{records:?}") };
        assert_eq!((granted.at, granted.granted_at, granted.ended_at), (wall(start), Some(wall(start)), None));
        assert_eq!((ended.at, ended.granted_at), (wall(start + 10_000), Some(wall(start))));
        assert_eq!((ended.ended_at, ended.cause.as_deref()), (Some(wall(start + 10_000)), Some("by_owner")));
        for record in &records {
            assert_eq!(
                (&*record.owner, record.worker_id.as_deref(), record.token.unwrap().0),
                ("alice", Some("w1"), 0)
            );
            let device = &record.devices[0];
            assert_eq!((&*device.node, device.gpu_id, &*device.uuid), ("a", GpuId(0), "GPU-a-0"));
            assert_eq!((device.share, device.memory), (Share(250), gib(20)));
        }
    });
}

#[test]
fn a_queued_lease_is_recorded_only_when_abandoned() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(1));
        recorded.ask("alice", whole());
        let waits = recorded.ask("bob", whole());
        assert_eq!(events(&recorded.records()), [(0, TrailEvent::Granted)]);
        recorded.stage.pass(secs(15));
        recorded.commit();
        let records = recorded.records();
        assert_eq!(events(&records), [(0, TrailEvent::Granted), (waits.0, TrailEvent::Ended)]);
        assert_eq!((records[1].cause.as_deref(), records[1].granted_at), (Some("abandoned"), None));
    });
}

#[test]
fn committing_a_batch_again_adds_nothing() {
    in_every_store(|record| {
        let mut recorded = record(Stage::draining(2, secs(30)));
        let lease = recorded.ask("alice", whole());
        let token = recorded.stage.token(lease);
        recorded.stage.run(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
        recorded.release_after(5, lease);
        recorded.stage.run(PoolCommand::Drained { lease });
        recorded.commit();
        let before = recorded.records();
        assert_eq!(before.len(), 2);
        recorded.store.commit(&recorded.stage.rows, clock(recorded.stage.now.0 + 60_000)).unwrap();
        assert_eq!(recorded.records(), before);
    });
}

#[test]
fn a_lease_granted_and_ended_in_one_batch_has_two_records() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(2));
        let lease = recorded.stage.ask(gpus(2));
        recorded.stage.release(lease);
        recorded.commit();
        let records = recorded.records();
        assert_eq!(events(&records), [(0, TrailEvent::Granted), (0, TrailEvent::Ended)]);
        assert!(records.iter().all(|record| record.devices.len() == 2));
    });
}

#[test]
fn a_grant_has_the_device_name_of_its_time() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(1));
        recorded.commit();
        let first = recorded.ask("alice", part(250));
        assert_eq!(recorded.store.unflushed_batches() > 0, recorded.has_buffer);
        let renamed = |row: &PoolRow| match row {
            PoolRow::Device(device) => Some(PoolRow::Device(DeviceRow { gpu_id: GpuId(7), ..device.clone() })),
            _ => None,
        };
        let renamed: Vec<PoolRow> = recorded.stage.rows.iter().filter_map(renamed).collect();
        let clock = recorded.clock();
        recorded.store.commit(&renamed, clock).unwrap();
        let second = recorded.ask("alice", part(250));
        let numbers: Vec<_> =
            recorded.records().iter().map(|record| (record.lease, record.devices[0].gpu_id.0)).collect();
        assert_eq!(numbers, [(first, 0), (second, 7)]);
    });
}

#[test]
fn a_lease_forgotten_before_it_ended_is_not_held_for_ever() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(1));
        let lease = recorded.ask("alice", whole());
        recorded.stage.pass(secs(10));
        let clock = recorded.clock();
        recorded.store.commit(&[PoolRow::Forget(lease)], clock).unwrap();
        recorded.stage.pass(secs(10));
        assert_eq!(recorded.records()[1].cause.as_deref(), Some("forgotten"));
        assert_eq!(recorded.usage(UsageDimension::Owner, 0)[0].gpu_seconds, 10.0);
    });
}

#[test]
fn a_wall_clock_put_back_does_not_end_a_lease_before_its_grant() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(1));
        let lease = recorded.ask("alice", whole());
        let granted = recorded.clock().wall;
        recorded.stage.release(lease);
        let back = ClockReading { pool: recorded.stage.now, wall: wall(0) };
        recorded.store.commit(&recorded.stage.rows[recorded.committed..], back).unwrap();
        assert_eq!(recorded.records()[1].ended_at, Some(granted));
    });
}

#[test]
fn pages_are_consecutive_and_filters_apply() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(2));
        let start = recorded.stage.now.0;
        for number in 0..5 {
            let lease = recorded.ask(if number % 2 == 0 { "alice" } else { "bob" }, gpus(1 + number % 2));
            recorded.release_after(1, lease);
        }
        let all = recorded.records();
        assert_eq!(all.len(), 10);
        let mut query = TrailQuery { limit: Some(3), ..TrailQuery::default() };
        let mut paged = Vec::new();
        loop {
            let TrailPage { records, next } = recorded.history(&query);
            assert!(records.len() <= 3);
            paged.extend(records);
            query.after = next;
            if next.is_none() {
                break;
            }
        }
        assert_eq!(paged, all);
        let mut count = |query: TrailQuery| recorded.history(&query).records.len();
        assert_eq!(count(TrailQuery { owner: Some("bob".into()), ..TrailQuery::default() }), 4);
        assert_eq!(count(TrailQuery { gpu_id: Some(GpuId(1)), ..TrailQuery::default() }), count_on_gpu(&all, 1));
        assert_eq!(count(TrailQuery { gpu_id: Some(GpuId(7)), ..TrailQuery::default() }), 0);
        let node = all[0].devices[0].node.clone();
        let (here, gpu_id) = (TrailQuery { node: Some(node), ..TrailQuery::default() }, Some(GpuId(1)));
        assert_eq!(count(here.clone()), 10);
        assert_eq!(count(TrailQuery { gpu_id, ..here }), count_on_gpu(&all, 1));
        let elsewhere = TrailQuery { node: Some("elsewhere".into()), ..TrailQuery::default() };
        assert_eq!(count(elsewhere.clone()), 0);
        assert_eq!(count(TrailQuery { gpu_id, ..elsewhere }), 0);
        let (since, until) = (Some(wall(start + 1000)), Some(wall(start + 2000)));
        assert_eq!(
            count(TrailQuery { since, until, ..TrailQuery::default() }),
            2,
            "one end and one grant in the second second"
        );
    });
}

fn count_on_gpu(records: &[TrailRecord], gpu_id: u32) -> usize {
    records.iter().filter(|record| record.devices.iter().any(|device| device.gpu_id == GpuId(gpu_id))).count()
}

#[test]
fn usage_counts_held_leases_exactly_within_the_window() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(2));
        let start = recorded.stage.now.0;
        let ended = recorded.ask("alice", part(500));
        recorded.ask("bob", gpus(1));
        recorded.release_after(10, ended);
        recorded.stage.pass(Millis(2_500));
        let total = |name: &str, gpu_seconds: f64| UsageTotal {
            name: name.into(),
            leases: 1,
            gpu_seconds,
            memory_mib_seconds: (gpu_seconds * 10_000.0).round() * 80.0 * 1024.0 / 10_000.0,
        };
        assert_eq!(recorded.usage(UsageDimension::Owner, start), [total("bob", 12.5), total("alice", 5.0)]);
        assert_eq!(recorded.usage(UsageDimension::Gpu, start), [total("a/1", 12.5), total("a/0", 5.0)]);
        assert_eq!(recorded.usage(UsageDimension::Owner, start + 9_999), [total("bob", 2.501), total("alice", 0.0005)]);
        assert_eq!(recorded.usage(UsageDimension::Owner, start + 10_000), [total("bob", 2.5)]);
        let past =
            recorded.read(|reader| reader.usage(UsageDimension::Owner, wall(start), wall(start + 4_000)).unwrap());
        assert_eq!(past, [total("bob", 4.0), total("alice", 2.0)]);
    });
}

#[test]
fn old_records_are_removed_and_held_leases_stay() {
    in_every_store(|record| {
        let mut recorded = record(Stage::of(2));
        let start = recorded.stage.now.0;
        let held = recorded.ask("bob", whole());
        for _ in 0..3 {
            let lease = recorded.ask("alice", whole());
            recorded.release_after(10, lease);
        }
        assert_eq!(recorded.store.prune_trail(wall(start + 20_001)).unwrap(), 4, "two leases ended before");
        assert_eq!(recorded.store.prune_trail(wall(start + 20_001)).unwrap(), 0);
        assert_eq!(
            events(&recorded.records()),
            [(held.0, TrailEvent::Granted), (3, TrailEvent::Granted), (3, TrailEvent::Ended)]
        );
        assert_eq!(recorded.store.prune_trail(wall(start + 1_000_000)).unwrap(), 2);
        recorded.release_after(10, held);
        let records = recorded.records();
        assert_eq!((events(&records)[1], records[1].devices.len()), ((held.0, TrailEvent::Ended), 1));
        assert_eq!(lease_ids(&load_rows(&*recorded.store)), [0, 1, 2, 3], "the pool's own rows are not history");
    });
}
