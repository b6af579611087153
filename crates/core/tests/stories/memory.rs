//! Promises of device memory, beside shares, on grant and on release, without the driver's reserve.

use crate::support::*;
use gpupool_core::{
    Bytes, CommandDenied, DeviceFacts, DeviceId, DeviceMemory, DevicePromise, ReadingField, Request, RequestedAmount,
    Share, Unsatisfiable,
};

fn both(share: u32, memory: Bytes) -> Request {
    Request { amount: RequestedAmount::Both(Share(share), memory), ..whole() }
}

fn unified() -> DeviceFacts {
    DeviceFacts { memory: None, ..device("spark", "NVIDIA GB10", 0) }
}

#[test]
fn fraction_and_memory_together_are_both_accounted_on_grant_and_on_release() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(both(100, gib(60)));
    assert_eq!((test.device(0).promised, test.device(0).promised_memory), (Share(100), gib(60)));
    let no_memory = test.request(both(100, gib(21)));
    assert!(test.is_queued(no_memory), "share is free, memory is not");
    test.release(lease);
    assert!(test.is_active(no_memory));
    test.release(no_memory);
    assert_eq!((test.device(0).promised, test.device(0).promised_memory), (Share::ZERO, Bytes::ZERO));
}

#[test]
fn shares_run_out_though_memory_is_left() {
    let mut test = PoolFixture::of(1);
    test.request(both(900, gib(1)));
    let lease = test.request(both(200, gib(1)));
    assert!(test.is_queued(lease));
}

#[test]
fn a_fraction_takes_the_same_part_of_the_memory() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(part(250));
    assert_eq!(
        test.lease(lease).promises[..],
        [DevicePromise { device: DeviceId(0), share: Share(250), memory: gib(20) }]
    );
    let rest = test.request(memory(gib(60)));
    assert!(test.is_active(rest));
    assert_eq!(test.device(0).promised_memory, gib(80));
}

#[test]
fn memory_alone_derives_its_share() {
    let mut test = PoolFixture::of(1);
    let lease = test.request(memory(gib(20)));
    assert_eq!(test.lease(lease).promises[0].share, Share(250));
    let lease = test.request(memory(Bytes(1)));
    assert_eq!(test.lease(lease).promises[0].share, Share(1), "never nothing");
}

#[test]
fn equal_parts_by_memory_fill_a_device_though_the_thousandths_do_not_divide() {
    let mut test = PoolFixture::of(1);
    let third = Bytes(gib(80).0 / 3);
    for _ in 0..3 {
        let lease = test.request(memory(third));
        assert!(test.is_active(lease));
    }
    let fourth = test.request(memory(third));
    assert!(test.is_queued(fourth));
}

#[test]
fn memory_reserved_by_the_driver_is_never_promised() {
    let mut test = PoolFixture::empty();
    let memory_kept = DeviceMemory { total: gib(80), reserved: gib(2) };
    test.add_node(node("a"), vec![DeviceFacts { memory: Some(memory_kept), ..device("a", "NVIDIA H100", 80) }]);
    let refused = test.expect_denied(memory(gib(79)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchMemory { wanted: gib(79), most: gib(78) }));
    let lease = test.request(memory(gib(78)));
    assert_eq!(test.lease(lease).promises[0].share, Share::WHOLE, "all there is to sell is all of it");
    test.release(lease);
    let lease = test.request(whole());
    assert_eq!(test.lease(lease).promises[0].memory, gib(78));
}

#[test]
fn unknown_memory_is_schedulable_by_share_only() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![unified()]);
    let refused = test.expect_denied(memory(gib(1)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::MemoryUnknown));
    assert!(refused.to_string().ends_with("ask for a fraction instead"), "{refused}");
    assert!(test.try_request(both(500, gib(1))).is_err());
    let lease = test.request(part(500));
    assert_eq!(test.lease(lease).promises[0].memory, Bytes::ZERO);
    let second = test.request(part(500));
    let third = test.request(part(500));
    assert!(test.is_active(second) && test.is_queued(third));
}

#[test]
fn a_memory_request_skips_devices_with_unknown_memory() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![unified(), device("h", "NVIDIA H100", 80)]);
    assert_eq!(test.place(memory(gib(8))), [1]);
}

#[test]
fn unified_memory_is_assessed_by_utilization_alone() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![unified()]);
    test.report(0, |reading| {
        reading.memory_used = ReadingField::Unsupported;
        reading.utilization = ReadingField::Value(percent(95));
        reading.processes = None;
    });
    let lease = test.request(careful(whole()));
    assert!(test.is_queued(lease));
    test.report(0, |reading| reading.memory_used = ReadingField::Unsupported);
    assert!(test.is_active(lease));
}

#[test]
fn a_whole_gpu_with_memory_is_a_whole_device_that_has_at_least_so_much() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("s", "NVIDIA A100 40GB", 40), device("l", "NVIDIA H100", 80)]);
    let lease = test.request(both(1000, gib(48)));
    assert_eq!(test.devices_of(lease), [1]);
    assert_eq!(test.lease(lease).promises[0].memory, gib(80), "alone means all of it");
    let refused = test.expect_denied(both(1000, gib(81)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchMemory { wanted: gib(81), most: gib(80) }));
}

#[test]
fn memory_used_by_a_foreign_process_is_not_promised() {
    let mut test = PoolFixture::of(1);
    test.report(0, |reading| {
        reading.memory_used = ReadingField::Value(gib(30));
        reading.processes = Some(vec![foreign_process(gib(30))]);
    });
    let too_much = test.request(memory(gib(51)));
    assert!(test.is_queued(too_much));
    test.release(too_much);
    let fits = test.request(memory(gib(50)));
    assert!(test.is_active(fits));
}

#[test]
fn a_device_must_have_the_least_memory_selected() {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), vec![device("s", "NVIDIA A100 40GB", 40), device("l", "NVIDIA H100", 80)]);
    let select = |n| gpupool_core::DeviceSelector { min_memory: Some(gib(n)), ..Default::default() }.into();
    assert_eq!(test.place(Request { select: select(41), ..part(100) }), [1]);
    let refused = test.expect_denied(Request { select: select(81), ..whole() });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::NothingSelected));
}
