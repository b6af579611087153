//! Legal grants: the request waits, it fits, and it delays no earlier request.

use std::collections::BTreeSet;

use gpupool_core::{DeviceId, DevicePromise, LeaseId, LeaseState, NodeId, PoolTime, Request, Token};

use super::claims::{CapacityClaims, needs_no_host};
use super::model::{OFFER_LIFETIME, PoolModel, ensure};

impl PoolModel {
    /// Checks that a new request waits or is denied only if it would delay an earlier one.
    pub(super) fn check_no_place(&self, id: LeaseId, request: &Request) -> Result<(), String> {
        let sound = self.nodes.iter().all(|(id, node)| {
            let (cpus, memory) = self.host_promised(*id);
            cpus <= node.facts.cpus.0 && memory <= node.facts.memory.0
        });
        // Free room on a host that shrank below its promises is uncertain.
        let claims = if sound { self.claims_in_the_way(id, request) } else { self.claims_before(id, request) };
        let place = self.node_outside(request, &claims).filter(|_| !self.over_quota(request));
        ensure!(place.is_none(), "rule 4: lease {id} ({request:?}) could go at once on node {place:?}");
        Ok(())
    }

    /// Checks that a granted request waits, fits, and delays no earlier one.
    pub(super) fn check_grant(
        &mut self,
        id: LeaseId,
        token: Token,
        node: NodeId,
        promises: &[DevicePromise],
        offered: Option<PoolTime>,
    ) -> Result<(), String> {
        let entry = self.leases.get(&id).ok_or(format!("lease {id} is granted and was never asked for"))?;
        let request = entry.request.clone();
        ensure!(entry.state == LeaseState::Queued, "rule 5: lease {id} is granted and does not wait: {entry:?}");
        ensure!(self.last_token.is_none_or(|last| token > last), "rule 3: token {token} after {:?}", self.last_token);
        ensure!(offered.is_some() == request.hedged, "lease {id} is offered, not granted, or the other way round");
        self.check_fit(&request, node, promises)?;
        ensure!(!self.over_quota(&request), "lease {id} is granted beyond the quota of {}", request.owner);

        let hard_end = self.held_at_most(&request).map(|most| self.now.after(most));
        let until = [Some(self.now.after(OFFER_LIFETIME)), hard_end].into_iter().flatten().min();
        ensure!(offered.is_none() || offered == until, "lease {id} is offered until {offered:?}, not {until:?}");
        let taken = CapacityClaims {
            devices: promises.iter().map(|promise| promise.device).collect(),
            hosts: if needs_no_host(&request) { BTreeSet::new() } else { [node].into() },
        };
        let passed = self.passed_by(id, &request);
        for (waiter, start) in &passed {
            let earlier = &self.leases[waiter].request;
            let claimed = self.claims_of_request(earlier);
            let on_device = !claimed.devices.is_disjoint(&taken.devices);
            let on_host = !claimed.hosts.is_disjoint(&taken.hosts);
            let ends_before = hard_end.is_some_and(|end| start.is_some_and(|start| end <= start));
            ensure!(
                !(on_device || on_host) || ends_before,
                "rule 4: lease {id} ({request:?} on {promises:?} until {hard_end:?}) passes lease {waiter} ({earlier:?}), \
                 which could use that and starts {start:?}"
            );
        }
        let now = self.now;
        let entry = self.leases.get_mut(&id).expect("known");
        entry.state = if offered.is_some() { LeaseState::Offered } else { LeaseState::Active };
        entry.token = Some(token);
        entry.node = Some(node);
        entry.promises = promises.to_vec();
        entry.granted_share = promises.iter().map(|promise| u64::from(promise.share.0)).sum();
        entry.granted_at = Some(now);
        entry.hard_end = hard_end;
        entry.expires_at = offered.is_none().then(|| now.after(request.ttl));
        self.last_token = Some(token);
        for promise in promises {
            self.devices.get_mut(&promise.device).expect("known").leases_changed_at = Some(now);
        }
        for (waiter, before) in passed {
            let after = self.certain_start(&self.leases[&waiter].request);
            let later = before.is_some_and(|before| after.is_none_or(|after| after > before));
            ensure!(!later, "rule 4: lease {id} puts off lease {waiter} from {before:?} to {after:?}");
        }
        Ok(())
    }

    fn check_fit(&self, request: &Request, node: NodeId, promises: &[DevicePromise]) -> Result<(), String> {
        let places = self.eligible_nodes(request);
        let parts = places.get(&node).ok_or(format!("{request:?} is put on node {node}, which it cannot use"))?;
        let distinct: BTreeSet<DeviceId> = promises.iter().map(|promise| promise.device).collect();
        ensure!(distinct.len() == promises.len(), "a device is promised twice: {promises:?}");
        ensure!(promises.len() == usize::from(request.gpus), "{request:?} got {promises:?}");
        ensure!(self.nodes[&node].up, "{request:?} is put on node {node}, which is lost");
        ensure!(self.host_fits(request, node), "rule 1: the host of node {node} has no room for {request:?}");
        for promise in promises {
            let part = parts.get(&promise.device).ok_or(format!("{request:?} cannot use device {}", promise.device))?;
            let as_asked = (u64::from(promise.share.0), promise.memory.0) == (part.share, part.memory);
            ensure!(as_asked, "{request:?} is promised {promise:?}, not {part:?}");
            let misfit = self.misfit(request, promise.device, *part);
            ensure!(misfit.is_none(), "rule 1: {request:?} does not fit device {}: {misfit:?}", promise.device);
        }
        Ok(())
    }

    /// Returns the earlier waiters that no quota holds back, with their certain starts.
    fn passed_by(&self, id: LeaseId, request: &Request) -> Vec<(LeaseId, Option<PoolTime>)> {
        let earlier = self.waiting().filter(|entry| self.is_before((entry.id, &entry.request), (id, request)));
        let kept_off = earlier.filter(|entry| entry.id != id && !self.over_quota(&entry.request));
        kept_off.map(|entry| (entry.id, self.certain_start(&entry.request))).collect()
    }
}
