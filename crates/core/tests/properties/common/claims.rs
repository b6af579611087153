//! Eligibility and order of requests, computed by plain scans.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_core::{
    DeviceId, DeviceIdentity, LeaseId, Millis, NodeId, PoolTime, QueueOrder, Request, RequestedAmount, labels_match,
};

use super::model::{ModelDevice, ModelLease, PoolModel};

/// Part of a device that a request takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePart {
    pub share: u64,
    pub memory: u64,
}

/// Capacity that a request must not take.
#[derive(Debug, Default)]
pub struct CapacityClaims {
    pub devices: BTreeSet<DeviceId>,
    pub hosts: BTreeSet<NodeId>,
}

impl PoolModel {
    /// Returns the part of a device that a request takes, if it could ever use it (other devices and the host aside).
    fn device_part(&self, request: &Request, device: &ModelDevice) -> Option<DevicePart> {
        let (select, facts) = (&request.select, &device.facts);
        let node = &self.nodes[&device.node].facts;
        let uuid = match &facts.identity {
            DeviceIdentity::Uuid(uuid) => select.uuids.contains(uuid),
            DeviceIdentity::Pci { .. } => false,
        };
        let has_label = |(key, value)| facts.labels.get(key) == Some(value) || node.labels.get(key) == Some(value);
        let wanted = select.vendor.is_none_or(|vendor| vendor == facts.vendor)
            && (select.models.is_empty() || select.models.iter().any(|model| facts.is_model(model)))
            && (select.gpu_ids.is_empty() || select.gpu_ids.contains(&device.gpu_id))
            && (select.uuids.is_empty() || uuid)
            && select.labels.iter().all(has_label)
            && select.min_memory.is_none_or(|least| facts.memory.is_some() && device.capacity() >= least.0)
            && facts.isolation.supports(request.isolation);
        if !wanted {
            return None;
        }
        let all = device.capacity();
        let of_all = |share: u64| DevicePart { share, memory: (u128::from(all) * u128::from(share) / 1000) as u64 };
        let has = |memory: u64| facts.memory.is_some() && memory <= all;
        match request.amount {
            RequestedAmount::Whole => Some(of_all(1000)),
            RequestedAmount::Share(share) => Some(of_all(share.0.into())),
            RequestedAmount::Shared => {
                let sharers = self.policies.policy_for(request).max_allocations.unwrap_or(10);
                Some(of_all(1000 / u64::from(sharers)))
            }
            RequestedAmount::Memory(memory) if has(memory.0) => {
                let share = u128::from(memory.0) * 1000 / u128::from(all);
                Some(DevicePart { share: (share as u64).max(1), memory: memory.0 })
            }
            RequestedAmount::Both(share, memory) if has(memory.0) => {
                Some(DevicePart { share: share.0.into(), memory: if share.0 == 1000 { all } else { memory.0 } })
            }
            RequestedAmount::Memory(_) | RequestedAmount::Both(..) => None,
        }
    }

    /// Returns the nodes a request could ever run on, with the devices it could use there.
    pub fn eligible_nodes(&self, request: &Request) -> BTreeMap<NodeId, BTreeMap<DeviceId, DevicePart>> {
        let selector = &self.policies.policy_for(request).node_selector;
        let mut places = BTreeMap::new();
        for (&id, node) in &self.nodes {
            let parts: BTreeMap<DeviceId, DevicePart> = match request.gpus {
                0 => BTreeMap::new(),
                _ => self
                    .devices_of(id)
                    .filter_map(|(d, device)| Some((d, self.device_part(request, device)?)))
                    .collect(),
            };
            if labels_match(&node.facts.labels, selector)
                && parts.len() >= usize::from(request.gpus)
                && request.cpus <= node.facts.cpus
                && request.host_memory <= node.facts.memory
            {
                places.insert(id, parts);
            }
        }
        places
    }

    /// Returns the reason why a device cannot take a part now, if any.
    pub fn misfit(&self, request: &Request, id: DeviceId, part: DevicePart) -> Option<&'static str> {
        let device = &self.devices[&id];
        let (share, memory) = self.promised(id);
        let names_memory =
            matches!(request.amount, RequestedAmount::Memory(_) | RequestedAmount::Both(..)) && part.share < 1000;
        let foreign = device.foreign.and_then(|foreign| foreign.memory).filter(|_| names_memory).unwrap_or(0);
        let most = self.policies.policy_for(request).max_allocations;
        if self.closure(id).is_some() {
            return Some("it takes no new work");
        }
        if share + part.share > 1000 {
            return Some("its share is promised");
        }
        if device.facts.memory.is_some()
            && memory.saturating_add(foreign).saturating_add(part.memory) > device.capacity()
        {
            return Some("its memory is promised");
        }
        if most.is_some_and(|most| self.leases_on(id).count() >= usize::from(most)) {
            return Some("too many share it");
        }
        if part.share == 1000 && self.leases_on(id).next().is_some() {
            return Some("whole means alone");
        }
        (request.thresholds.is_some() && !self.below_thresholds(request, device)).then_some("it carries foreign load")
    }

    fn below_thresholds(&self, request: &Request, device: &ModelDevice) -> bool {
        let Some(reading) = &device.reading else { return false };
        let stale = self.settings.reading_max_age.is_some_and(|age| reading.at.after(age) < self.now);
        !stale && is_below_last_thresholds(request, device)
    }

    /// Returns the capacity that a waiting request claims, without devices above its own thresholds.
    pub fn claims_of_request(&self, request: &Request) -> CapacityClaims {
        let mut claims = CapacityClaims::default();
        for (node, parts) in self.eligible_nodes(request) {
            let wanted = |device: &DeviceId| {
                request.thresholds.is_none() || is_below_last_thresholds(request, &self.devices[device])
            };
            let devices: Vec<DeviceId> = parts.into_keys().filter(wanted).collect();
            if !needs_no_host(request) && (request.gpus == 0 || !devices.is_empty()) {
                claims.hosts.insert(node);
            }
            claims.devices.extend(devices);
        }
        claims
    }

    pub fn host_fits(&self, request: &Request, node: NodeId) -> bool {
        let (cpus, memory) = self.host_promised(node);
        let (facts, up) = (&self.nodes[&node].facts, self.nodes[&node].up);
        // A node may return with less than is promised of it; requests without host resources are not affected.
        let fits = |wanted: u64, promised: u64, all: u64| wanted == 0 || promised.saturating_add(wanted) <= all;
        needs_no_host(request)
            || (up && fits(request.cpus.0, cpus, facts.cpus.0) && fits(request.host_memory.0, memory, facts.memory.0))
    }

    /// Returns a node where a request fits now, outside all claims.
    pub fn node_outside(&self, request: &Request, claims: &CapacityClaims) -> Option<NodeId> {
        self.eligible_nodes(request).into_iter().find_map(|(node, parts)| {
            let free = |(device, part): &(&DeviceId, &DevicePart)| {
                !claims.devices.contains(device) && self.misfit(request, **device, **part).is_none()
            };
            let host = (needs_no_host(request) || !claims.hosts.contains(&node)) && self.host_fits(request, node);
            let fits = host && self.nodes[&node].up && parts.iter().filter(free).count() >= usize::from(request.gpus);
            fits.then_some(node)
        })
    }

    pub fn most_held(&self, request: &Request) -> u64 {
        let parts = self.eligible_nodes(request).into_values().flatten().map(|(_, part)| part.share);
        parts.max().unwrap_or(0) * u64::from(request.gpus)
    }

    /// Whether the owner's quota holds a request back.
    pub fn over_quota(&self, request: &Request) -> bool {
        let quota = self.policies.quota_of(&request.owner);
        let more = self.most_held(request);
        let own = || self.leases.values().filter(|entry| entry.request.owner == request.owner);
        let held: u64 = own().filter(|entry| entry.state.is_granted()).map(|entry| entry.granted_share).sum();
        let start = self.now.0 - self.now.0 % self.policies.period.0;
        let used: u64 = own()
            .filter_map(|entry| {
                let (from, to) = (entry.granted_at?.0.max(start), entry.ended_at.unwrap_or(self.now).0);
                Some(entry.granted_share * to.saturating_sub(from))
            })
            .sum();
        more > 0
            && (quota.held.is_some_and(|most| held + more > u64::from(most.0))
                || quota.share_hours.is_some_and(|hours| used >= hours * 3_600_000))
    }

    /// Returns the priority in the queue, by counting the steps of ageing one by one.
    pub fn queue_priority(&self, id: LeaseId, request: &Request) -> i32 {
        let mut priority = request.priority + self.policies.policy_for(request).priority_boost;
        let step = self.policies.ageing_step;
        let limits = self.policies.policies.iter().chain([&self.policies.fallback]).map(|policy| policy.max_priority);
        let highest = limits.max().unwrap_or(0);
        let Some(entry) = self.leases.get(&id).filter(|_| !step.is_zero()) else { return priority };
        let mut next = entry.created_at.after(step);
        while next <= self.now && priority < highest {
            priority += 1;
            next = next.after(step);
        }
        priority
    }

    pub fn held_at_most(&self, request: &Request) -> Option<Millis> {
        [request.max_duration, self.policies.policy_for(request).max_duration].into_iter().flatten().min()
    }

    /// Whether `a` is certainly served before `b`: in fair share only the priority with ageing is certain.
    pub fn is_before(&self, a: (LeaseId, &Request), b: (LeaseId, &Request)) -> bool {
        let (first, second) = (self.queue_priority(a.0, a.1), self.queue_priority(b.0, b.1));
        first > second || (first == second && a.0 < b.0 && self.policies.queue == QueueOrder::Fifo)
    }

    /// Returns the claims of all earlier waiters; in fair share, of all other waiters.
    pub fn claims_before(&self, id: LeaseId, request: &Request) -> CapacityClaims {
        self.collect_claims(id, request, |_| true)
    }

    /// Same as [`PoolModel::claims_before`], without waiters that cannot start before the lease would end.
    pub fn claims_in_the_way(&self, id: LeaseId, request: &Request) -> CapacityClaims {
        let end = self.held_at_most(request).map(|most| self.now.after(most));
        self.collect_claims(id, request, |earlier| {
            let start = self.certain_start(earlier);
            end.is_none_or(|end| start.is_none_or(|start| start < end)) || same_needs(earlier, request)
        })
    }

    fn collect_claims(&self, id: LeaseId, request: &Request, in_the_way: impl Fn(&Request) -> bool) -> CapacityClaims {
        let mut claims = CapacityClaims::default();
        let fifo = self.policies.queue == QueueOrder::Fifo;
        for entry in self.waiting().filter(|entry| entry.id != id) {
            let before = self.is_before((entry.id, &entry.request), (id, request)) || !fifo;
            if before && !self.over_quota(&entry.request) && in_the_way(&entry.request) {
                let claimed = self.claims_of_request(&entry.request);
                if !claimed.hosts.is_empty() {
                    // Hosts are claimed by node shape, which may be more than the node itself.
                    claims.hosts.extend(self.nodes.keys());
                }
                claims.devices.extend(claimed.devices);
            }
        }
        claims
    }

    /// Returns the time at which a request is certain to find a place, by certain ends only: the first such instant at
    /// which it fits if all leases that must have ended by then are gone.
    pub fn certain_start(&self, request: &Request) -> Option<PoolTime> {
        let ends =
            self.leases.values().filter(|entry| entry.holds_capacity()).filter_map(|entry| self.certain_end(entry));
        let instants: BTreeSet<PoolTime> = ends.chain([self.now]).filter(|at| *at >= self.now).collect();
        let places = self.eligible_nodes(request);
        instants.into_iter().find(|&at| places.iter().any(|(node, parts)| self.fits_at(at, request, *node, parts)))
    }

    fn fits_at(&self, at: PoolTime, request: &Request, node: NodeId, parts: &BTreeMap<DeviceId, DevicePart>) -> bool {
        let stays = |entry: &ModelLease| entry.holds_capacity() && self.certain_end(entry).is_none_or(|end| end > at);
        let room = |(id, part): &(&DeviceId, &DevicePart)| {
            let (mut share, mut memory) = (part.share, part.memory);
            for (_, promise) in self.leases_on(**id).filter(|(entry, _)| stays(entry)) {
                share += u64::from(promise.share.0);
                memory += promise.memory.0;
            }
            let device = &self.devices[*id];
            let wanted = request.thresholds.is_none() || is_below_last_thresholds(request, device);
            wanted && share <= 1000 && (device.facts.memory.is_none() || memory <= device.capacity())
        };
        let facts = &self.nodes[&node].facts;
        let (mut cpus, mut memory) = (request.cpus.0, request.host_memory.0);
        for entry in self.leases.values().filter(|entry| entry.node == Some(node) && stays(entry)) {
            cpus += entry.request.cpus.0;
            memory += entry.request.host_memory.0;
        }
        let host = needs_no_host(request) || (cpus <= facts.cpus.0 && memory <= facts.memory.0);
        host && parts.iter().filter(room).count() >= usize::from(request.gpus)
    }

    fn certain_end(&self, entry: &ModelLease) -> Option<PoolTime> {
        if entry.draining {
            return Some(self.now);
        }
        [entry.hard_end, entry.revoke_at].into_iter().flatten().min()
    }
}

/// Whether two requests are alike to placement: then the later one has no advantage over the earlier one.
fn same_needs(a: &Request, b: &Request) -> bool {
    let place = |r: &Request| (r.gpus, r.amount, r.isolation, r.thresholds, r.select.clone(), r.cpus, r.host_memory);
    place(a) == place(b)
}

pub fn needs_no_host(request: &Request) -> bool {
    request.cpus.0 == 0 && request.host_memory.0 == 0
}

/// Whether the last assessed foreign load of a device is below a request's thresholds.
fn is_below_last_thresholds(request: &Request, device: &ModelDevice) -> bool {
    let (Some(limits), Some(foreign)) = (request.thresholds, device.foreign) else { return false };
    let memory = match (foreign.memory, device.facts.memory) {
        (Some(used), Some(memory)) => {
            u128::from(used) * 100_000 < u128::from(limits.memory.0) * u128::from(memory.total.0)
        }
        _ => true,
    };
    memory && foreign.utilization.map_or(foreign.processes == 0, |busy| busy < limits.utilization.0)
}
