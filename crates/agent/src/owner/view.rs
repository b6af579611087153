//! Leases and devices of the owner's pool in the words of the API.

use std::collections::BTreeMap;

use gpupool_api::{lease, pool, view};
use gpupool_core::lease::Lease;
use gpupool_core::pool::DeviceView;
use gpupool_devices::JobEnvironment;

use crate::clock;
use crate::identity::Caller;

use super::OwnerThread;

/// A lease, with its token and environment for those who may act for its owner.
pub fn lease_body(owner: &OwnerThread, lease: &Lease, caller: Option<&Caller>) -> lease::Lease {
    let is_owners = caller.is_some_and(|caller| caller.may_act_for(&lease.request.owner));
    let iso = |time| clock::iso_of(time, owner.at);
    view::lease_body(&owner.pool, lease, iso, |given| visible(owner, given), is_owners)
}

/// What lets a job see the devices it was given, and no other.
fn visible(owner: &OwnerThread, given: &[DeviceView]) -> BTreeMap<String, Option<String>> {
    let Some(sample) = &owner.sample else { return BTreeMap::new() };
    let place = |view: &DeviceView| sample.all_ids.iter().position(|gpu_id| *gpu_id == view.gpu_id);
    let given: Vec<usize> = given.iter().filter_map(place).collect();
    let visible = JobEnvironment::new(&*sample.all, &given);
    visible.variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// A device with who holds it; what it reads is filled in from the statistics.
pub fn device_body(owner: &OwnerThread, view: &DeviceView, node: &str) -> pool::Device {
    let row = |id| owner.pool.lease(id).map(Lease::row);
    view::device_body(view, node, row, |time| clock::iso_of(time, owner.at))
}
