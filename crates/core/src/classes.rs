//! Classes of requests that are alike to placement: each distinct shape is assessed once against every kind of device.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use crate::device::{DeviceFacts, DeviceIdentity};
use crate::ids::{DeviceId, Labels, NodeId, labels_match};
use crate::inventory::{DeviceInventory, DeviceKind, DeviceKindId, DeviceSlot, NodeShape, NodeShapeId};
use crate::limits;
use crate::outcome::Unsatisfiable;
use crate::policy::RequestPolicy;
use crate::request::{DeviceSelector, IsolationLevel, LoadThresholds, PlacementStrategy, Request, RequestedAmount};
use crate::units::{Bytes, MilliCpus, Share};
use crate::workload::TaskClass;

/// Number of a class; stays valid while a request of the class waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestClassId(pub u32);

/// A request shape and the devices that can serve it.
#[derive(Debug, Clone)]
pub(crate) struct RequestClass {
    pub shape: RequestShape,
    /// Needs on the device kinds that could serve it, on nodes that could host it, by rising kind.
    pub needs: Vec<DeviceNeed>,
    /// For each node shape, whether such nodes could host it.
    pub host_shapes: Vec<bool>,
    /// Devices that the selector names one by one, if it does.
    pub named_devices: Option<Vec<DeviceId>>,
    /// Reason why it can never be served, if so.
    pub unsatisfiable: Option<Unsatisfiable>,
    /// Largest share that it may hold, over all its GPUs.
    pub max_held: Share,
    /// Number of device models that could serve it.
    pub model_count: usize,
    /// Number of requests that wait in this class.
    pub waiter_count: u32,
    assessed_version: Option<u64>,
}

impl RequestClass {
    /// Returns the need on a device of `kind`.
    pub fn need_on(&self, kind: DeviceKindId) -> Option<&DeviceNeed> {
        self.needs.binary_search_by_key(&kind, |need| need.kind).ok().map(|i| &self.needs[i])
    }

    /// Whether nodes of this shape could host the class.
    pub fn fits_shape(&self, shape: NodeShapeId) -> bool {
        self.host_shapes.get(shape.0 as usize) == Some(&true)
    }

    /// Returns the need on this device of `kind`, if the class could ever use the device.
    pub fn need_on_device(&self, device: DeviceId, kind: DeviceKindId) -> Option<&DeviceNeed> {
        self.need_on(kind).filter(|_| self.named_devices.as_ref().is_none_or(|named| named.contains(&device)))
    }

    /// Whether the class could ever use this device.
    pub fn could_use_device(&self, device: DeviceId, kind: DeviceKindId) -> bool {
        self.need_on_device(device, kind).is_some()
    }

    /// Returns the class as the workload counts it; an amount of memory counts as its largest share.
    pub fn task_class(&self) -> TaskClass {
        let share = self.needs.iter().map(|need| need.share).max().unwrap_or_default();
        let models: Vec<&str> = self.shape.select.models.iter().map(|model| &**model).collect();
        TaskClass {
            cpus: self.shape.cpus,
            share: if self.shape.gpus == 0 { Share::ZERO } else { share },
            gpus: self.shape.gpus,
            models: models.join("|").into(),
        }
    }

    fn assess(&mut self, inventory: &DeviceInventory) {
        self.assessed_version = Some(inventory.version);
        self.named_devices =
            self.shape.select.names_devices().then(|| find_named_devices(&self.shape.select, inventory));
        let assessed = ClassFeasibility::assess(&self.shape, self.named_devices.as_deref(), inventory);
        self.unsatisfiable = assessed.refusal();
        self.needs = assessed.needs;
        self.host_shapes = assessed.host_shapes;
        self.model_count = count_models(&self.needs, inventory);
        self.retain_usable_named(inventory);
        if self.unsatisfiable.is_some() {
            self.needs.clear();
            self.host_shapes.fill(false);
        }
        let share_of_gpu =
            |need: &DeviceNeed| inventory.kinds[need.kind.0 as usize].facts.share_of_gpu().0 * need.share.0 / 1000;
        let most = self.needs.iter().map(share_of_gpu).max().unwrap_or(0);
        self.max_held = Share(most * u32::from(self.shape.gpus));
    }

    /// Drops named devices that the class could not use, so that it never claims more than it can use.
    fn retain_usable_named(&mut self, inventory: &DeviceInventory) {
        let (Some(mut named_devices), gpus @ 1..) = (self.named_devices.take(), self.shape.gpus) else { return };
        named_devices.retain(|device| self.need_on(inventory.device(*device).kind).is_some());
        let mut on_node: BTreeMap<NodeId, u32> = BTreeMap::new();
        for device in &named_devices {
            *on_node.entry(inventory.device(*device).node).or_default() += 1;
        }
        let most = on_node.values().copied().max().unwrap_or(0).min(u32::from(u16::MAX)) as u16;
        if self.unsatisfiable.is_none() && most < gpus {
            self.unsatisfiable = Some(Unsatisfiable::TooManyGpus { wanted: gpus, most });
        }
        named_devices.retain(|device| on_node[&inventory.device(*device).node] >= u32::from(gpus));
        self.needs.retain(|need| named_devices.iter().any(|device| inventory.device(*device).kind == need.kind));
        self.named_devices = Some(named_devices);
    }
}

/// All known classes, bounded: classes without waiters are forgotten when there are too many.
#[derive(Debug, Default)]
pub(crate) struct RequestClasses {
    /// Only for lookups: its order has no effect.
    ids_by_shape: HashMap<RequestShape, RequestClassId, BuildHasherDefault<DefaultHasher>>,
    classes: Vec<Option<RequestClass>>,
    free_ids: Vec<RequestClassId>,
    /// Grows when classes are forgotten, so that caches keyed by class can follow.
    pub generation: u64,
}

impl RequestClasses {
    pub fn get(&self, id: RequestClassId) -> &RequestClass {
        match &self.classes[id.0 as usize] {
            Some(class) => class,
            None => unreachable!("class {} exists while it is used", id.0),
        }
    }

    pub fn get_mut(&mut self, id: RequestClassId) -> &mut RequestClass {
        match &mut self.classes[id.0 as usize] {
            Some(class) => class,
            None => unreachable!("class {} exists while it is used", id.0),
        }
    }

    /// Returns the class of a shape, assessed against the current inventory.
    pub fn intern(&mut self, shape: RequestShape, inventory: &DeviceInventory) -> RequestClassId {
        let id = match self.ids_by_shape.get(&shape) {
            Some(&id) => id,
            None => self.insert(shape),
        };
        self.refresh(id, inventory);
        id
    }

    /// Assesses a class again if facts have changed since.
    pub fn refresh(&mut self, id: RequestClassId, inventory: &DeviceInventory) {
        let class = self.get_mut(id);
        if class.assessed_version != Some(inventory.version) {
            class.assess(inventory);
        }
    }

    /// Returns a class as the current inventory has it, without storing the result.
    pub fn get_fresh(&self, id: RequestClassId, inventory: &DeviceInventory) -> Cow<'_, RequestClass> {
        let class = self.get(id);
        if class.assessed_version == Some(inventory.version) {
            return Cow::Borrowed(class);
        }
        let mut class = class.clone();
        class.assess(inventory);
        Cow::Owned(class)
    }

    /// Returns the class of a shape, if it is known.
    pub fn find(&self, shape: &RequestShape) -> Option<RequestClassId> {
        self.ids_by_shape.get(shape).copied()
    }

    /// Resets the waiter counts after the queue was emptied.
    pub fn clear_waiters(&mut self) {
        for class in self.classes.iter_mut().flatten() {
            class.waiter_count = 0;
        }
    }

    fn insert(&mut self, shape: RequestShape) -> RequestClassId {
        if self.ids_by_shape.len() >= limits::MAX_CLASSES {
            self.forget_unused();
        }
        let class = RequestClass {
            shape: shape.clone(),
            needs: Vec::new(),
            host_shapes: Vec::new(),
            named_devices: None,
            unsatisfiable: None,
            max_held: Share::ZERO,
            model_count: 0,
            waiter_count: 0,
            assessed_version: None,
        };
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.classes.push(None);
            RequestClassId(self.classes.len() as u32 - 1)
        });
        self.classes[id.0 as usize] = Some(class);
        self.ids_by_shape.insert(shape, id);
        id
    }

    fn forget_unused(&mut self) {
        self.generation += 1;
        for (number, slot) in self.classes.iter_mut().enumerate() {
            if let Some(class) = slot.take_if(|class| class.waiter_count == 0) {
                self.ids_by_shape.remove(&class.shape);
                self.free_ids.push(RequestClassId(number as u32));
            }
        }
    }
}

/// Every property of a request that decides about its placement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RequestShape {
    pub gpus: u16,
    pub amount: RequestedAmount,
    pub isolation: IsolationLevel,
    pub strategy: PlacementStrategy,
    pub thresholds: Option<LoadThresholds>,
    pub select: Arc<DeviceSelector>,
    pub cpus: MilliCpus,
    pub host_memory: Bytes,
    pub node_selector: Arc<Labels>,
    pub preferred: Arc<[Arc<str>]>,
    pub max_allocations: Option<u16>,
    max_sharers: u32,
}

impl RequestShape {
    pub fn of(request: &Request, policy: &RequestPolicy) -> Self {
        Self {
            gpus: request.gpus,
            amount: request.amount,
            isolation: request.isolation,
            strategy: policy.strategy_for(request),
            thresholds: request.thresholds,
            select: request.select.clone(),
            cpus: request.cpus,
            host_memory: request.host_memory,
            node_selector: policy.node_selector.clone(),
            preferred: policy.preferred_models.clone(),
            max_allocations: policy.max_allocations,
            max_sharers: policy.max_sharers(),
        }
    }

    /// Whether it needs host CPUs or host memory.
    pub fn needs_host(&self) -> bool {
        !self.cpus.is_zero() || !self.host_memory.is_zero()
    }

    /// Whether it names an amount of device memory.
    pub fn names_memory(&self) -> bool {
        matches!(self.amount, RequestedAmount::Memory(_) | RequestedAmount::Both(..))
    }

    /// Returns the smallest share that it takes of any device.
    pub fn least_share(&self) -> Share {
        match self.amount {
            RequestedAmount::Whole => Share::WHOLE,
            RequestedAmount::Share(share) | RequestedAmount::Both(share, _) => share,
            RequestedAmount::Memory(_) => Share(1),
            RequestedAmount::Shared => self.equal_share(),
        }
    }

    fn equal_share(&self) -> Share {
        Share((Share::WHOLE.0 / self.max_sharers).max(1))
    }

    /// Returns the need on a device of this kind, or `None` if such a device can never satisfy it.
    fn need_on(&self, kind: DeviceKindId, facts: &DeviceFacts) -> Option<DeviceNeed> {
        let capacity = facts.memory_capacity();
        let preferred = self.preferred.iter().any(|model| facts.is_model(model));
        if !facts.is_divisible() {
            let taken = self.whole_partition_memory(facts)?;
            return Some(DeviceNeed { kind, share: Share::WHOLE, memory: taken, preferred });
        }
        let (share, memory) = match self.amount {
            RequestedAmount::Whole | RequestedAmount::Share(Share::WHOLE) => (Share::WHOLE, capacity),
            RequestedAmount::Share(share) => (share, capacity.map(|all| all.part(share))),
            RequestedAmount::Shared => {
                let share = self.equal_share();
                (share, capacity.map(|all| all.part(share)))
            }
            RequestedAmount::Memory(memory) => {
                let all = capacity.filter(|all| memory <= *all)?;
                let share = (u128::from(memory.0) * 1000 / u128::from(all.0.max(1))) as u32;
                (Share(share.max(1)), Some(memory))
            }
            RequestedAmount::Both(share, memory) => {
                let all = capacity.filter(|all| memory <= *all)?;
                (share, Some(if share == Share::WHOLE { all } else { memory }))
            }
        };
        Some(DeviceNeed { kind, share, memory: memory.unwrap_or_default(), preferred })
    }

    /// Returns the memory of an indivisible partition if the partition fits: it is at least the requested share of a
    /// whole GPU, and it is not a whole GPU for a smaller share.
    fn whole_partition_memory(&self, facts: &DeviceFacts) -> Option<Bytes> {
        let (share, memory) = match self.amount {
            RequestedAmount::Whole => (Share::WHOLE, Bytes::ZERO),
            RequestedAmount::Share(share) => (share, Bytes::ZERO),
            RequestedAmount::Both(share, memory) => (share, memory),
            RequestedAmount::Memory(memory) => (Share(1), memory),
            RequestedAmount::Shared => (self.equal_share(), Bytes::ZERO),
        };
        let all = facts.memory_capacity().unwrap_or_default();
        let fits = share <= facts.share_of_gpu()
            && memory <= all
            && (share == Share::WHOLE || facts.share_of_gpu() < Share::WHOLE);
        fits.then_some(all)
    }
}

/// Part of a device of one kind that a class takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceNeed {
    pub kind: DeviceKindId,
    pub share: Share,
    /// Zero if the kind's memory is unknown.
    pub memory: Bytes,
    /// Whether the policy prefers this kind.
    pub preferred: bool,
}

fn find_named_devices(select: &DeviceSelector, inventory: &DeviceInventory) -> Vec<DeviceId> {
    let is_named = |slot: &DeviceSlot| {
        let by_number = select.gpu_ids.is_empty() || select.gpu_ids.contains(&slot.gpu_id);
        let by_uuid = select.uuids.is_empty()
            || matches!(&slot.facts.identity, DeviceIdentity::Uuid(uuid) if select.uuids.contains(uuid));
        by_number && by_uuid
    };
    inventory.devices.iter().filter(|(_, slot)| is_named(slot)).map(|(id, _)| DeviceId(id)).collect()
}

/// Assessment of a shape against every device kind and node shape, for a refusal that names what is missing.
struct ClassFeasibility<'a> {
    shape: &'a RequestShape,
    pub needs: Vec<DeviceNeed>,
    pub host_shapes: Vec<bool>,
    any_device: bool,
    any_selected: bool,
    any_isolating: bool,
    any_memory_known: bool,
    /// Largest indivisible device, as a part of a GPU; 0 if there is none.
    largest_part: Share,
    most_memory: Bytes,
    most_gpus: u16,
    most_cpus: MilliCpus,
    most_host_memory: Bytes,
}

impl<'a> ClassFeasibility<'a> {
    pub fn assess(shape: &'a RequestShape, named: Option<&[DeviceId]>, inventory: &DeviceInventory) -> Self {
        let mut assessed = Self {
            shape,
            needs: Vec::new(),
            host_shapes: vec![false; inventory.shapes.len()],
            any_device: !inventory.devices.is_empty(),
            any_selected: false,
            any_isolating: false,
            any_memory_known: false,
            largest_part: Share::ZERO,
            most_memory: Bytes::ZERO,
            most_gpus: 0,
            most_cpus: MilliCpus::ZERO,
            most_host_memory: Bytes::ZERO,
        };
        let named_kinds = named.map(|named| named.iter().map(|d| inventory.device(*d).kind).collect::<Vec<_>>());
        let is_named = |kind: DeviceKindId| named_kinds.as_ref().is_none_or(|kinds| kinds.contains(&kind));
        for (number, node_shape) in inventory.shapes.iter().enumerate() {
            if !labels_match(&node_shape.labels, &shape.node_selector) {
                continue;
            }
            let fitting: Vec<(DeviceNeed, u32)> = node_shape
                .kinds
                .iter()
                .filter(|(kind, _)| is_named(*kind))
                .filter_map(|&(id, count)| {
                    let kind = &inventory.kinds[id.0 as usize];
                    Some((assessed.assess_kind(id, kind, node_shape)?, count))
                })
                .collect();
            assessed.assess_node_shape(number, node_shape, fitting);
        }
        assessed.needs.sort_unstable_by_key(|need| need.kind);
        assessed
    }

    fn assess_kind(&mut self, id: DeviceKindId, kind: &DeviceKind, node_shape: &NodeShape) -> Option<DeviceNeed> {
        let (select, facts) = (&self.shape.select, &kind.facts);
        let label = |key, value| facts.labels.get(key) == Some(value) || node_shape.labels.get(key) == Some(value);
        let selected = select.vendor.is_none_or(|vendor| vendor == facts.vendor)
            && (select.models.is_empty() || select.models.iter().any(|model| facts.is_model(model)))
            && select.min_memory.is_none_or(|least| facts.memory_capacity().is_some_and(|all| all >= least))
            && select.labels.iter().all(|(key, value)| label(key, value));
        if !selected {
            return None;
        }
        self.any_selected = true;
        if !facts.isolation.supports(self.shape.isolation) {
            return None;
        }
        self.any_isolating = true;
        if !facts.is_divisible() {
            self.largest_part = self.largest_part.max(facts.share_of_gpu());
        }
        self.any_memory_known |= facts.memory.is_some();
        self.most_memory = self.most_memory.max(facts.memory_capacity().unwrap_or_default());
        self.shape.need_on(id, facts)
    }

    fn assess_node_shape(&mut self, number: usize, node_shape: &NodeShape, fitting: Vec<(DeviceNeed, u32)>) {
        let gpus: u32 = fitting.iter().map(|(_, count)| count).sum();
        let gpus = gpus.min(u32::from(u16::MAX)) as u16;
        self.most_gpus = self.most_gpus.max(gpus);
        if gpus < self.shape.gpus {
            return;
        }
        self.most_cpus = self.most_cpus.max(node_shape.cpus);
        self.most_host_memory = self.most_host_memory.max(node_shape.memory);
        if self.shape.cpus <= node_shape.cpus && self.shape.host_memory <= node_shape.memory {
            self.host_shapes[number] = true;
            if self.shape.gpus > 0 {
                self.needs.extend(fitting.into_iter().map(|(need, _)| need));
            }
        }
    }

    pub fn refusal(&self) -> Option<Unsatisfiable> {
        let shape = self.shape;
        if self.host_shapes.contains(&true) {
            return None;
        }
        if shape.gpus > 0 {
            if !self.any_device {
                return Some(Unsatisfiable::NoDevices);
            }
            if !self.any_selected {
                return Some(Unsatisfiable::NothingSelected);
            }
            if !self.any_isolating {
                return Some(Unsatisfiable::Isolation(shape.isolation));
            }
            if let RequestedAmount::Memory(wanted) | RequestedAmount::Both(_, wanted) = shape.amount {
                if !self.any_memory_known {
                    return Some(Unsatisfiable::MemoryUnknown);
                }
                if wanted > self.most_memory {
                    return Some(Unsatisfiable::TooMuchMemory { wanted, most: self.most_memory });
                }
            }
            if self.most_gpus == 0 && !self.largest_part.is_zero() {
                return Some(Unsatisfiable::Indivisible { part: self.largest_part });
            }
            if shape.gpus > self.most_gpus {
                return Some(Unsatisfiable::TooManyGpus { wanted: shape.gpus, most: self.most_gpus });
            }
        }
        if shape.cpus > self.most_cpus {
            return Some(Unsatisfiable::TooManyCpus { wanted: shape.cpus, most: self.most_cpus });
        }
        if shape.host_memory > self.most_host_memory {
            return Some(Unsatisfiable::TooMuchHostMemory { wanted: shape.host_memory, most: self.most_host_memory });
        }
        Some(Unsatisfiable::NotTogether)
    }
}

fn count_models(needs: &[DeviceNeed], inventory: &DeviceInventory) -> usize {
    let mut models: Vec<&str> = needs.iter().map(|need| &*inventory.kinds[need.kind.0 as usize].facts.model).collect();
    models.sort_unstable();
    models.dedup();
    models.len()
}
