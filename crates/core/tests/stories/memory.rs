//! Memory of devices: promised beside shares, on grant and on release, and never what the driver keeps.

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
    let mut stage = Stage::of(1);
    let lease = stage.ask(both(100, gib(60)));
    assert_eq!((stage.device(0).promised, stage.device(0).promised_memory), (Share(100), gib(60)));
    let no_memory = stage.ask(both(100, gib(21)));
    assert!(stage.is_queued(no_memory), "share is free, memory is not");
    stage.release(lease);
    assert!(stage.is_active(no_memory));
    stage.release(no_memory);
    assert_eq!((stage.device(0).promised, stage.device(0).promised_memory), (Share::ZERO, Bytes::ZERO));
}

#[test]
fn shares_run_out_though_memory_is_left() {
    let mut stage = Stage::of(1);
    stage.ask(both(900, gib(1)));
    let lease = stage.ask(both(200, gib(1)));
    assert!(stage.is_queued(lease));
}

#[test]
fn a_fraction_takes_the_same_part_of_the_memory() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(part(250));
    assert_eq!(
        stage.lease(lease).promises[..],
        [DevicePromise { device: DeviceId(0), share: Share(250), memory: gib(20) }]
    );
    let rest = stage.ask(memory(gib(60)));
    assert!(stage.is_active(rest));
    assert_eq!(stage.device(0).promised_memory, gib(80));
}

#[test]
fn memory_alone_derives_its_share() {
    let mut stage = Stage::of(1);
    let lease = stage.ask(memory(gib(20)));
    assert_eq!(stage.lease(lease).promises[0].share, Share(250));
    let lease = stage.ask(memory(Bytes(1)));
    assert_eq!(stage.lease(lease).promises[0].share, Share(1), "never nothing");
}

#[test]
fn equal_parts_by_memory_fill_a_device_though_the_thousandths_do_not_divide() {
    let mut stage = Stage::of(1);
    let third = Bytes(gib(80).0 / 3);
    for _ in 0..3 {
        let lease = stage.ask(memory(third));
        assert!(stage.is_active(lease));
    }
    let fourth = stage.ask(memory(third));
    assert!(stage.is_queued(fourth));
}

#[test]
fn what_the_driver_keeps_is_not_for_sale() {
    let mut stage = Stage::empty();
    let memory_kept = DeviceMemory { total: gib(80), reserved: gib(2) };
    stage.add(node("a"), vec![DeviceFacts { memory: Some(memory_kept), ..device("a", "NVIDIA H100", 80) }]);
    let refused = stage.refused(memory(gib(79)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchMemory { wanted: gib(79), most: gib(78) }));
    let lease = stage.ask(memory(gib(78)));
    assert_eq!(stage.lease(lease).promises[0].share, Share::WHOLE, "all there is to sell is all of it");
    stage.release(lease);
    let lease = stage.ask(whole());
    assert_eq!(stage.lease(lease).promises[0].memory, gib(78));
}

#[test]
fn unknown_memory_is_schedulable_by_share_only() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![unified()]);
    let refused = stage.refused(memory(gib(1)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::MemoryUnknown));
    assert!(refused.to_string().ends_with("ask for a fraction instead"), "{refused}");
    assert!(stage.try_ask(both(500, gib(1))).is_err());
    let lease = stage.ask(part(500));
    assert_eq!(stage.lease(lease).promises[0].memory, Bytes::ZERO);
    let second = stage.ask(part(500));
    let third = stage.ask(part(500));
    assert!(stage.is_active(second) && stage.is_queued(third));
}

#[test]
fn unknown_memory_beside_known_is_passed_by_requests_that_name_an_amount() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![unified(), device("h", "NVIDIA H100", 80)]);
    assert_eq!(stage.place(memory(gib(8))), [1]);
}

#[test]
fn unified_memory_is_judged_by_utilization_alone() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![unified()]);
    stage.read(0, |reading| {
        reading.memory_used = ReadingField::Unsupported;
        reading.utilization = ReadingField::Value(percent(95));
        reading.processes = None;
    });
    let lease = stage.ask(careful(whole()));
    assert!(stage.is_queued(lease));
    stage.read(0, |reading| reading.memory_used = ReadingField::Unsupported);
    assert!(stage.is_active(lease));
}

#[test]
fn a_whole_gpu_with_memory_is_a_whole_device_that_has_at_least_so_much() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("s", "NVIDIA A100 40GB", 40), device("l", "NVIDIA H100", 80)]);
    let lease = stage.ask(both(1000, gib(48)));
    assert_eq!(stage.on(lease), [1]);
    assert_eq!(stage.lease(lease).promises[0].memory, gib(80), "alone means all of it");
    let refused = stage.refused(both(1000, gib(81)));
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::TooMuchMemory { wanted: gib(81), most: gib(80) }));
}

#[test]
fn memory_a_squatter_uses_is_not_promised_to_those_who_name_an_amount() {
    let mut stage = Stage::of(1);
    stage.read(0, |reading| {
        reading.memory_used = ReadingField::Value(gib(30));
        reading.processes = Some(vec![foreign_process(gib(30))]);
    });
    let too_much = stage.ask(memory(gib(51)));
    assert!(stage.is_queued(too_much));
    stage.release(too_much);
    let fits = stage.ask(memory(gib(50)));
    assert!(stage.is_active(fits));
}

#[test]
fn a_device_must_have_the_least_memory_selected() {
    let mut stage = Stage::empty();
    stage.add(node("a"), vec![device("s", "NVIDIA A100 40GB", 40), device("l", "NVIDIA H100", 80)]);
    let select = |n| gpupool_core::DeviceSelector { min_memory: Some(gib(n)), ..Default::default() }.into();
    assert_eq!(stage.place(Request { select: select(41), ..part(100) }), [1]);
    let refused = stage.refused(Request { select: select(81), ..whole() });
    assert_eq!(refused, CommandDenied::Unsatisfiable(Unsatisfiable::NothingSelected));
}
