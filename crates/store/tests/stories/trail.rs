//! The audit trail: what was granted and what ended is told once, by names that last, and adds up.
//!
//! Every story is told to a store whose batches stay in the write-ahead buffer, to one that is flushed whenever the trail
//! is read, which must change nothing, and to one in memory.

use crate::backends;
use crate::common::{clock, leases, rows, wall};
use crate::support::{Stage, gib, gpus, owned, part, secs, whole};
use gpupool_core::{DeviceRow, GpuId, LeaseHolder, LeaseId, Millis, PoolCommand, PoolRow, Request, Share};
use gpupool_store::{
    ClockReading, LeaseStore, TrailEvent, TrailPage, TrailQuery, TrailReader, TrailRecord, UsageDimension, UsageTotal,
};

/// A stage whose rows are kept.
struct Kept {
    stage: Stage,
    store: Box<dyn LeaseStore>,
    reader: Box<dyn TrailReader>,
    kept: usize,
    /// Whether the store is flushed after each reading.
    is_flushed: bool,
    /// Whether small batches stay in a buffer until the store is flushed.
    has_buffer: bool,
}

/// Tells a story to every store. The story begins by naming the stage whose rows are kept.
fn in_every_store(story: impl Fn(&dyn Fn(Stage) -> Kept)) {
    for is_flushed in [false, true] {
        for backend in backends() {
            let has_buffer = backend.has_buffer();
            story(&|stage| {
                let store = backend.open();
                let reader = store.trail_reader();
                Kept { stage, store, reader, kept: 0, is_flushed, has_buffer }
            });
        }
    }
}

impl Kept {
    fn clock(&self) -> ClockReading {
        clock(self.stage.now.0)
    }

    fn keep(&mut self) {
        let clock = self.clock();
        self.store.commit(&self.stage.rows[self.kept..], clock).unwrap();
        self.kept = self.stage.rows.len();
    }

    /// Asks, and keeps what that changed.
    fn ask(&mut self, owner: &str, request: Request) -> LeaseId {
        let lease = self.stage.ask(owned(owner, Request { ttl: secs(3600), ..request }));
        self.keep();
        lease
    }

    /// Releases after so many seconds.
    fn release_after(&mut self, time: u64, lease: LeaseId) {
        self.stage.pass(secs(time));
        self.stage.release(lease);
        self.keep();
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

fn told(records: &[TrailRecord]) -> Vec<(u64, TrailEvent)> {
    records.iter().map(|record| (record.lease.0, record.event)).collect()
}

#[test]
fn a_lease_is_told_when_granted_and_when_ended_with_what_it_held() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(2));
        let start = kept.stage.now.0;
        let lease = kept.ask("alice", Request { worker_id: Some("w1".into()), ..part(250) });
        kept.release_after(10, lease);
        let records = kept.records();
        assert_eq!(told(&records), [(0, TrailEvent::Granted), (0, TrailEvent::Ended)]);
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
fn who_waits_is_told_only_when_it_gives_up() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(1));
        kept.ask("alice", whole());
        let waits = kept.ask("bob", whole());
        assert_eq!(told(&kept.records()), [(0, TrailEvent::Granted)]);
        kept.stage.pass(secs(15));
        kept.keep();
        let records = kept.records();
        assert_eq!(told(&records), [(0, TrailEvent::Granted), (waits.0, TrailEvent::Ended)]);
        assert_eq!((records[1].cause.as_deref(), records[1].granted_at), (Some("abandoned"), None));
    });
}

#[test]
fn keeping_a_batch_again_adds_nothing() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::draining(2, secs(30)));
        let lease = kept.ask("alice", whole());
        let token = kept.stage.token(lease);
        kept.stage.run(PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection });
        kept.release_after(5, lease);
        kept.stage.run(PoolCommand::Drained { lease });
        kept.keep();
        let before = kept.records();
        assert_eq!(before.len(), 2);
        kept.store.commit(&kept.stage.rows, clock(kept.stage.now.0 + 60_000)).unwrap();
        assert_eq!(kept.records(), before);
    });
}

#[test]
fn a_lease_granted_and_ended_in_one_batch_is_told_twice_with_its_devices() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(2));
        let lease = kept.stage.ask(gpus(2));
        kept.stage.release(lease);
        kept.keep();
        let records = kept.records();
        assert_eq!(told(&records), [(0, TrailEvent::Granted), (0, TrailEvent::Ended)]);
        assert!(records.iter().all(|record| record.devices.len() == 2));
    });
}

#[test]
fn a_grant_is_told_by_the_name_its_device_had_then() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(1));
        kept.keep();
        let first = kept.ask("alice", part(250));
        assert_eq!(kept.store.unflushed_batches() > 0, kept.has_buffer);
        let renamed = |row: &PoolRow| match row {
            PoolRow::Device(device) => Some(PoolRow::Device(DeviceRow { gpu_id: GpuId(7), ..device.clone() })),
            _ => None,
        };
        let renamed: Vec<PoolRow> = kept.stage.rows.iter().filter_map(renamed).collect();
        let clock = kept.clock();
        kept.store.commit(&renamed, clock).unwrap();
        let second = kept.ask("alice", part(250));
        let numbers: Vec<_> = kept.records().iter().map(|record| (record.lease, record.devices[0].gpu_id.0)).collect();
        assert_eq!(numbers, [(first, 0), (second, 7)]);
    });
}

#[test]
fn a_lease_forgotten_before_it_ended_is_not_held_for_ever() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(1));
        let lease = kept.ask("alice", whole());
        kept.stage.pass(secs(10));
        let clock = kept.clock();
        kept.store.commit(&[PoolRow::Forget(lease)], clock).unwrap();
        kept.stage.pass(secs(10));
        assert_eq!(kept.records()[1].cause.as_deref(), Some("forgotten"));
        assert_eq!(kept.usage(UsageDimension::Owner, 0)[0].gpu_seconds, 10.0);
    });
}

#[test]
fn a_wall_clock_put_back_does_not_end_a_lease_before_its_grant() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(1));
        let lease = kept.ask("alice", whole());
        let granted = kept.clock().wall;
        kept.stage.release(lease);
        let back = ClockReading { pool: kept.stage.now, wall: wall(0) };
        kept.store.commit(&kept.stage.rows[kept.kept..], back).unwrap();
        assert_eq!(kept.records()[1].ended_at, Some(granted));
    });
}

#[test]
fn pages_follow_on_each_other_and_filters_hold() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(2));
        let start = kept.stage.now.0;
        for number in 0..5 {
            let lease = kept.ask(if number % 2 == 0 { "alice" } else { "bob" }, gpus(1 + number % 2));
            kept.release_after(1, lease);
        }
        let all = kept.records();
        assert_eq!(all.len(), 10);
        let mut query = TrailQuery { limit: Some(3), ..TrailQuery::default() };
        let mut paged = Vec::new();
        loop {
            let TrailPage { records, next } = kept.history(&query);
            assert!(records.len() <= 3);
            paged.extend(records);
            query.after = next;
            if next.is_none() {
                break;
            }
        }
        assert_eq!(paged, all);
        let mut count = |query: TrailQuery| kept.history(&query).records.len();
        assert_eq!(count(TrailQuery { owner: Some("bob".into()), ..TrailQuery::default() }), 4);
        assert_eq!(count(TrailQuery { gpu_id: Some(GpuId(1)), ..TrailQuery::default() }), on(&all, 1));
        assert_eq!(count(TrailQuery { gpu_id: Some(GpuId(7)), ..TrailQuery::default() }), 0);
        let node = all[0].devices[0].node.clone();
        let (here, gpu_id) = (TrailQuery { node: Some(node), ..TrailQuery::default() }, Some(GpuId(1)));
        assert_eq!(count(here.clone()), 10);
        assert_eq!(count(TrailQuery { gpu_id, ..here }), on(&all, 1));
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

fn on(records: &[TrailRecord], gpu_id: u32) -> usize {
    records.iter().filter(|record| record.devices.iter().any(|device| device.gpu_id == GpuId(gpu_id))).count()
}

#[test]
fn usage_counts_what_runs_and_is_cut_to_the_window_exactly() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(2));
        let start = kept.stage.now.0;
        let ended = kept.ask("alice", part(500));
        kept.ask("bob", gpus(1));
        kept.release_after(10, ended);
        kept.stage.pass(Millis(2_500));
        let line = |name: &str, gpu_seconds: f64| UsageTotal {
            name: name.into(),
            leases: 1,
            gpu_seconds,
            memory_mib_seconds: (gpu_seconds * 10_000.0).round() * 80.0 * 1024.0 / 10_000.0,
        };
        assert_eq!(kept.usage(UsageDimension::Owner, start), [line("bob", 12.5), line("alice", 5.0)]);
        assert_eq!(kept.usage(UsageDimension::Gpu, start), [line("a/1", 12.5), line("a/0", 5.0)]);
        assert_eq!(kept.usage(UsageDimension::Owner, start + 9_999), [line("bob", 2.501), line("alice", 0.0005)]);
        assert_eq!(kept.usage(UsageDimension::Owner, start + 10_000), [line("bob", 2.5)]);
        let past = kept.read(|reader| reader.usage(UsageDimension::Owner, wall(start), wall(start + 4_000)).unwrap());
        assert_eq!(past, [line("bob", 4.0), line("alice", 2.0)]);
    });
}

#[test]
fn old_records_are_removed_and_what_is_held_stays() {
    in_every_store(|keep| {
        let mut kept = keep(Stage::of(2));
        let start = kept.stage.now.0;
        let held = kept.ask("bob", whole());
        for _ in 0..3 {
            let lease = kept.ask("alice", whole());
            kept.release_after(10, lease);
        }
        assert_eq!(kept.store.prune_trail(wall(start + 20_001)).unwrap(), 4, "two leases ended before");
        assert_eq!(kept.store.prune_trail(wall(start + 20_001)).unwrap(), 0);
        assert_eq!(
            told(&kept.records()),
            [(held.0, TrailEvent::Granted), (3, TrailEvent::Granted), (3, TrailEvent::Ended)]
        );
        assert_eq!(kept.store.prune_trail(wall(start + 1_000_000)).unwrap(), 2);
        kept.release_after(10, held);
        let records = kept.records();
        assert_eq!((told(&records)[1], records[1].devices.len()), ((held.0, TrailEvent::Ended), 1));
        assert_eq!(leases(&rows(&*kept.store)), [0, 1, 2, 3], "the pool's own rows are not history");
    });
}
