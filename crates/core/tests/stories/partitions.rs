//! AMD partitions are indivisible: SPX is a whole GPU, CPX an eighth. Requests name shares of a whole GPU.

use crate::support::*;
use gpupool_core::{
    CommandDenied, DeviceFacts, DeviceIdentity, OwnerQuota, PartitionFacts, Policies, Request, RequestedAmount, Share,
    Unsatisfiable, Vendor,
};

/// Returns partitions of one MI300X, each `of_parent` of it.
fn partitions(profile: &str, count: usize, of_parent: u32) -> Vec<DeviceFacts> {
    let cut = |number: usize| DeviceFacts {
        vendor: Vendor::Amd,
        partition: Some(PartitionFacts {
            parent: DeviceIdentity::Uuid("mi300x-0".into()),
            profile: profile.into(),
            of_parent: Share(of_parent),
        }),
        ..device(&format!("mi300x-0-{number}"), "AMD Instinct MI300X", 192 / count as u64)
    };
    (0..count).map(cut).collect()
}

fn cpx() -> PoolFixture {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), partitions("CPX", 8, 125));
    test
}

fn spx() -> PoolFixture {
    let mut test = PoolFixture::empty();
    test.add_node(node("a"), partitions("SPX", 1, 1000));
    test
}

#[test]
fn an_eighth_takes_one_cpx_partition_alone() {
    let mut test = cpx();
    let leases: Vec<_> = (0..8).map(|_| test.request(part(125))).collect();
    for lease in &leases {
        let promises = &test.lease(*lease).promises;
        assert_eq!((promises.len(), promises[0].share, promises[0].memory), (1, Share::WHOLE, gib(24)));
    }
    let ninth = test.request(part(125));
    assert!(!test.is_active(ninth), "all eighths are taken");
}

#[test]
fn less_than_an_eighth_still_takes_an_eighth() {
    let mut test = cpx();
    let lease = test.request(part(100));
    assert_eq!(test.lease(lease).promises[0].share, Share::WHOLE);
}

#[test]
fn memory_that_fits_a_partition_takes_it_whole() {
    let mut test = cpx();
    let lease = test.request(memory(gib(10)));
    assert_eq!(test.lease(lease).promises[0].memory, gib(24));
}

#[test]
fn more_than_an_eighth_is_refused_where_there_are_only_eighths() {
    for request in [whole(), part(250)] {
        let denied = cpx().try_request(request).unwrap_err();
        assert_eq!(denied, CommandDenied::Unsatisfiable(Unsatisfiable::Indivisible { part: Share(125) }));
        assert!(denied.to_string().contains("parts of 0.125"), "{denied}");
    }
}

#[test]
fn a_gpu_in_spx_is_taken_whole_or_not_at_all() {
    let mut test = spx();
    let denied = test.try_request(part(500)).unwrap_err();
    assert_eq!(denied, CommandDenied::Unsatisfiable(Unsatisfiable::Indivisible { part: Share::WHOLE }));
    let lease = test.request(whole());
    assert!(test.is_active(lease));
}

#[test]
fn several_eighths_are_several_partitions_of_one_node() {
    let mut test = cpx();
    let lease = test.request(Request { gpus: 4, amount: RequestedAmount::Share(Share(125)), ..whole() });
    assert_eq!(test.lease(lease).promises.len(), 4);
}

#[test]
fn a_quota_counts_eighths_as_eighths() {
    let quota = OwnerQuota { held: Some(Share(250)), ..OwnerQuota::default() };
    let mut test = PoolFixture::with(Default::default(), Policies { default_quota: quota, ..Policies::default() });
    test.add_node(node("a"), partitions("CPX", 8, 125));
    let leases: Vec<_> = (0..3).map(|_| test.request(part(125))).collect();
    let active: Vec<bool> = leases.iter().map(|lease| test.is_active(*lease)).collect();
    assert_eq!(active, [true, true, false]);
}
