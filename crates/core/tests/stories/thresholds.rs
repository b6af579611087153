//! Thresholds apply to foreign load only, by readings after the last change of leases; leases are limited by promises.

use crate::support::*;
use gpupool_core::{
    Bytes, DeviceId, DeviceReading, LoadThresholds, Millis, Percent, PlacementStrategy, PoolCommand, PoolSettings,
    ProcessAttribution, ProcessUsage, ReadingField, Request, RequestBody, RequestedAmount, Share,
};

const MIB: u64 = 1 << 20;

#[test]
fn equal_to_a_threshold_is_unavailable_and_strictly_below_is_available() {
    for (used, busy, free) in [
        (gib(64), Percent(0), false),
        (Bytes(gib(64).0 - MIB), Percent(0), true),
        (gib(0), Percent(90_000), false),
        (gib(0), Percent(89_999), true),
        (Bytes(gib(64).0 - MIB), Percent(89_999), true),
        (gib(80), Percent(100_000), false),
    ] {
        let mut test = PoolFixture::of(1);
        test.report_load(0, used, busy);
        let lease = test.request(careful(whole()));
        assert_eq!(test.is_active(lease), free, "{used} and {busy} in use");
    }
}

#[test]
fn a_request_brings_its_own_thresholds() {
    let mut test = PoolFixture::of(1);
    test.report_load(0, gib(16), percent(30));
    let strict = LoadThresholds { memory: percent(20), utilization: percent(90) };
    let lease = test.request(Request { thresholds: Some(strict), ..whole() });
    assert!(test.is_queued(lease), "20 % is not below 20 %");
    test.release(lease);
    let relaxed = LoadThresholds { memory: percent(21), utilization: percent(31) };
    let lease = test.request(Request { thresholds: Some(relaxed), ..whole() });
    assert!(test.is_active(lease));
}

#[test]
fn without_thresholds_foreign_load_is_ignored() {
    let mut test = PoolFixture::of(1);
    test.report_load(0, gib(80), percent(100));
    let lease = test.request(whole());
    assert!(test.is_active(lease));
}

#[test]
fn a_busy_half_does_not_close_the_other_half() {
    let mut test = PoolFixture::of(1);
    let first = test.request(careful(part(500)));
    test.report(0, |reading| {
        reading.memory_used = ReadingField::Value(gib(40));
        reading.utilization = ReadingField::Value(percent(100));
        reading.processes = Some(vec![process_of(first, gib(40))]);
    });
    let second = test.request(careful(part(500)));
    assert!(test.is_active(second));
}

#[test]
fn a_busy_half_does_not_close_the_other_half_where_processes_cannot_be_listed_either() {
    let mut test = PoolFixture::of(1);
    test.request(careful(part(500)));
    test.report_load(0, gib(40), percent(100));
    let second = test.request(careful(part(500)));
    assert!(test.is_active(second), "100 % − 50 % promised is below 90 %");
}

#[test]
fn a_foreign_process_closes_the_other_half() {
    let mut test = PoolFixture::of(1);
    let first = test.request(careful(part(100)));
    test.report(0, |reading| {
        reading.memory_used = ReadingField::Value(gib(8 + 64));
        reading.processes = Some(vec![process_of(first, gib(8)), foreign_process(gib(64))]);
    });
    assert_eq!(test.device(0).foreign.unwrap().memory, Some(gib(64)));
    let second = test.request(careful(part(100)));
    assert_eq!(
        test.wait_reason(second),
        "position 1; needs 1 GPU with 0.1 free; none is free; 1 matching GPU is in use without a lease"
    );
    test.report(0, |reading| reading.processes = Some(vec![process_of(first, gib(8))]));
    assert!(test.is_active(second), "the foreign process is gone");
}

#[test]
fn a_leases_process_on_a_device_it_does_not_hold_is_foreign() {
    let mut test = PoolFixture::of(2);
    let elsewhere = test.request(Request { select: named(0), ..whole() });
    test.report(1, |reading| {
        reading.memory_used = ReadingField::Value(gib(1));
        reading.utilization = ReadingField::Value(percent(100));
        reading.processes = Some(vec![process_of(elsewhere, gib(1))]);
    });
    assert_eq!(test.device(1).foreign.unwrap().processes, 1);
    let lease = test.request(careful(whole()));
    assert!(test.is_queued(lease), "device 1 is as busy as can be");
}

#[test]
fn a_counter_stuck_at_full_with_nothing_running_closes_nothing() {
    let mut test = PoolFixture::of(1);
    test.report(0, |reading| reading.utilization = ReadingField::Value(percent(100)));
    let lease = test.request(careful(whole()));
    assert!(test.is_active(lease));
}

#[test]
fn ten_requests_in_one_second_do_not_pile_onto_one_device() {
    for (strategy, request) in [
        (PlacementStrategy::LeastUsed, careful(whole())),
        (PlacementStrategy::LeastUsed, careful(part(100))),
        (PlacementStrategy::LoadBalanced, careful(part(100))),
        (PlacementStrategy::RoundRobin, careful(part(100))),
        (PlacementStrategy::WorstFit, careful(part(100))),
    ] {
        let mut test = PoolFixture::of(10);
        let mut places: Vec<u32> = (0..10).flat_map(|_| test.place(by(strategy, request.clone()))).collect();
        places.sort_unstable();
        assert_eq!(places, (0..10).collect::<Vec<u32>>(), "{strategy}, no reading in between");
    }
}

/// Returns the amount for a fraction in a request's body.
fn fraction(fraction: f64) -> RequestedAmount {
    Request::try_from(RequestBody { fraction: Some(fraction), ..RequestBody::default() }).unwrap().amount
}

#[test]
fn ten_tenths_fill_a_gpu_exactly_and_the_eleventh_waits() {
    let mut test = PoolFixture::of(1);
    let tenth = || careful(Request { amount: fraction(0.1), ..whole() });
    let leases: Vec<_> = (0..10).map(|_| test.request(tenth())).collect();
    assert!(leases.iter().all(|lease| test.is_active(*lease)));
    assert_eq!(test.device(0).promised, Share::WHOLE);
    let eleventh = test.request(tenth());
    assert_eq!(test.wait_reason(eleventh), "position 1; needs 1 GPU with 0.1 free; none is free");
    test.release(leases[3]);
    assert!(test.is_active(eleventh));
}

#[test]
fn three_thirds_fit_and_the_remaining_thousandth_is_not_granted() {
    let mut test = PoolFixture::of(1);
    let third = Request { amount: fraction(0.333), ..whole() };
    for _ in 0..3 {
        let lease = test.request(third.clone());
        assert!(test.is_active(lease));
    }
    assert_eq!(test.device(0).promised, Share(999));
    let fourth = test.request(third);
    assert!(test.is_queued(fourth));
    let crumb = test.try_request(Request { queue: false, ..part(1) });
    assert!(crumb.is_err(), "0.001 is free, and it is the waiting one's turn");
}

#[test]
fn a_reading_from_before_the_last_change_of_leases_is_ignored() {
    let mut test = PoolFixture::of(1);
    test.request(careful(part(500)));
    let loaded = |at| DeviceReading {
        at,
        memory_used: ReadingField::Value(gib(80)),
        utilization: ReadingField::Value(percent(100)),
        temperature_c: ReadingField::Value(50),
        processes: Some(vec![foreign_process(gib(80))]),
        leases_as_of: None,
    };
    let at_the_grant = test.now;
    test.apply_ok(PoolCommand::Observe { device: DeviceId(0), reading: loaded(at_the_grant) });
    let second = test.request(careful(part(100)));
    assert!(test.is_active(second), "the reading shows a mixture of before and after");
    test.advance(secs(1));
    test.apply_ok(PoolCommand::Observe { device: DeviceId(0), reading: loaded(test.now) });
    let third = test.request(careful(part(100)));
    assert!(test.is_queued(third));
}

#[test]
fn a_reading_attributed_before_the_last_change_of_leases_is_ignored() {
    let mut test = PoolFixture::of(1);
    let before_the_grant = test.now;
    test.advance(secs(1));
    test.request(careful(part(500)));
    let at_the_grant = test.now;
    let loaded = |reading: &mut DeviceReading, leases_as_of| {
        reading.memory_used = ReadingField::Value(gib(80));
        reading.processes = Some(vec![foreign_process(gib(80))]);
        reading.leases_as_of = Some(leases_as_of);
    };
    test.report(0, |reading| loaded(reading, before_the_grant));
    let second = test.request(careful(part(100)));
    assert!(test.is_active(second), "the process may be one of the lease that the sampler did not know of");
    let at_the_second_grant = test.now;
    assert!(at_the_second_grant > at_the_grant);
    test.report(0, |reading| loaded(reading, at_the_grant));
    let third = test.request(careful(part(100)));
    assert!(test.is_active(third));
    let now = test.now;
    test.report(0, |reading| loaded(reading, now));
    let fourth = test.request(careful(part(100)));
    assert!(test.is_queued(fourth));
}

#[test]
fn readings_that_arrive_late_change_nothing() {
    let mut test = PoolFixture::of(1);
    let early = test.now;
    test.advance(secs(1));
    test.report_idle(0);
    let late =
        DeviceReading { utilization: ReadingField::Value(percent(100)), processes: None, ..DeviceReading::idle(early) };
    test.apply_ok(PoolCommand::Observe { device: DeviceId(0), reading: late });
    let lease = test.request(careful(whole()));
    assert!(test.is_active(lease));
}

#[test]
fn a_device_without_utilization_is_assessed_by_memory_and_processes() {
    let silent = |used: Bytes, processes: Vec<ProcessUsage>| {
        let mut test = PoolFixture::of(1);
        test.report(0, |reading| {
            reading.memory_used = ReadingField::Value(used);
            reading.utilization = ReadingField::Unsupported;
            reading.processes = Some(processes);
        });
        let lease = test.request(careful(part(100)));
        test.is_active(lease)
    };
    assert!(silent(gib(0), vec![]));
    assert!(!silent(gib(1), vec![foreign_process(gib(1))]), "the load of the foreign process is unknown");
    assert!(!silent(gib(64), vec![ProcessUsage { attribution: ProcessAttribution::Unknown, memory: None }]));
    assert!(silent(gib(63), vec![ProcessUsage { attribution: ProcessAttribution::Unknown, memory: None }]));
}

#[test]
fn a_device_that_was_never_read_is_not_available_until_it_is() {
    let mut test = PoolFixture::empty();
    test.register_node(node("a"), devices("a", 1));
    let lease = test.request(careful(whole()));
    assert!(test.is_queued(lease));
    test.report_idle(0);
    assert!(test.is_active(lease));
}

#[test]
fn a_device_whose_first_reading_failed_counts_as_never_read() {
    for (memory_failed, utilization_failed) in [(true, true), (true, false), (false, true)] {
        let mut test = PoolFixture::empty();
        test.register_node(node("a"), devices("a", 1));
        test.report(0, |reading| {
            reading.memory_used = if memory_failed { ReadingField::Failed } else { reading.memory_used };
            reading.utilization = if utilization_failed { ReadingField::Failed } else { reading.utilization };
            reading.processes = None;
        });
        let lease = test.request(careful(whole()));
        assert!(test.is_queued(lease), "nothing made up: memory failed {memory_failed}, else utilization");
        test.report_idle(0);
        assert!(test.is_active(lease));
    }
}

#[test]
fn a_failed_field_keeps_the_last_assessment() {
    let fails = |reading: &mut DeviceReading| {
        reading.memory_used = ReadingField::Failed;
        reading.utilization = ReadingField::Failed;
        reading.processes = None;
    };
    let mut test = PoolFixture::of(1);
    test.report_load(0, gib(10), percent(95));
    test.report(0, fails);
    let lease = test.request(careful(whole()));
    assert!(test.is_queued(lease), "it was busy when last heard of");
    test.report_idle(0);
    assert!(test.is_active(lease));

    let mut test = PoolFixture::of(1);
    test.report(0, fails);
    let lease = test.request(careful(whole()));
    assert!(test.is_active(lease), "it was idle when last heard of");
}

#[test]
fn a_stale_reading_is_ignored_until_the_next_one() {
    let settings = PoolSettings { reading_max_age: Some(secs(10)), ..PoolSettings::default() };
    let mut test = PoolFixture::with(settings, gpupool_core::Policies::unlimited());
    test.add_node(node("a"), devices("a", 1));
    test.advance(secs(10));
    let in_time = test.request(careful(part(100)));
    assert!(test.is_active(in_time), "ten seconds are not past ten seconds");
    test.advance(Millis(1));
    let not_judged = test.request(part(100));
    assert!(test.is_active(not_judged));
    let too_late = test.request(careful(part(100)));
    assert!(test.is_queued(too_late));
    test.report_idle(0);
    assert!(test.is_active(too_late));
}

#[test]
fn an_absurd_utilization_counts_as_busy() {
    let mut test = PoolFixture::of(1);
    test.report_load(0, gib(0), Percent(u32::MAX));
    let lease = test.request(by(PlacementStrategy::LeastUsed, part(500)));
    assert!(test.is_active(lease));
    assert_eq!(test.device(0).utilization_percent, Percent::FULL);
    let lease = test.request(careful(part(100)));
    assert!(test.is_queued(lease));
}
