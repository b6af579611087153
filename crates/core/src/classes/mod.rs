//! Requests that are alike to placement: each distinct shape of a wish is judged once against every kind of device.

mod judgement;
mod shape;

pub(crate) use shape::{Need, Shape};

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::ids::{DeviceId, NodeId};
use crate::inventory::{Inventory, KindId};
use crate::limits;
use crate::outcome::Unsatisfiable;
use crate::units::Share;
use crate::workload::TaskClass;
use judgement::{Judgement, models_among, named_devices};

/// A class's number; stays valid while anything waits in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClassId(pub u32);

/// A shape, judged against the inventory.
#[derive(Debug)]
pub(crate) struct Class {
    pub shape: Shape,
    /// Kinds that could serve it, on nodes that could, by rising kind.
    pub needs: Vec<Need>,
    /// Whether nodes of each shape could host it.
    pub hosts: Vec<bool>,
    /// The devices it names, where it names any.
    pub named: Option<Vec<DeviceId>>,
    /// Why it can never be served, if so.
    pub never: Option<Unsatisfiable>,
    /// The most it may come to hold, over all its GPUs.
    pub most_held: Share,
    /// How many models of device could serve it.
    pub models: usize,
    /// Requests that wait in this class.
    pub waiting: u32,
    judged_at: Option<u64>,
}

impl Class {
    /// What it takes of a device of `kind`.
    pub fn need(&self, kind: KindId) -> Option<&Need> {
        self.needs.binary_search_by_key(&kind, |need| need.kind).ok().map(|i| &self.needs[i])
    }

    /// Whether it could ever use this device.
    pub fn could_use(&self, device: DeviceId, kind: KindId) -> bool {
        self.need(kind).is_some() && self.named.as_ref().is_none_or(|named| named.contains(&device))
    }

    /// The class as a workload sees it; a memory amount counts as its largest share.
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

    fn judge(&mut self, inventory: &Inventory) {
        self.judged_at = Some(inventory.version);
        self.named = self.shape.select.names_devices().then(|| named_devices(&self.shape.select, inventory));
        let judged = Judgement::of(&self.shape, self.named.as_deref(), inventory);
        self.never = judged.never();
        self.needs = judged.needs;
        self.hosts = judged.hosts;
        self.models = models_among(&self.needs, inventory);
        self.keep_usable_named(inventory);
        if self.never.is_some() {
            self.needs.clear();
            self.hosts.fill(false);
        }
        let of_gpu = |need: &Need| inventory.kinds[need.kind.0 as usize].facts.of_gpu().0 * need.share.0 / 1000;
        let most = self.needs.iter().map(of_gpu).max().unwrap_or(0);
        self.most_held = Share(most * u32::from(self.shape.gpus));
    }

    /// Leaves of the devices it names only those it could use: what it keeps others off must not be more than that.
    fn keep_usable_named(&mut self, inventory: &Inventory) {
        let (Some(mut named), gpus @ 1..) = (self.named.take(), self.shape.gpus) else { return };
        named.retain(|device| self.need(inventory.device(*device).kind).is_some());
        let mut on_node: BTreeMap<NodeId, u16> = BTreeMap::new();
        for device in &named {
            *on_node.entry(inventory.device(*device).node).or_default() += 1;
        }
        let most = on_node.values().copied().max().unwrap_or(0);
        if self.never.is_none() && most < gpus {
            self.never = Some(Unsatisfiable::TooManyGpus { wanted: gpus, most });
        }
        named.retain(|device| on_node[&inventory.device(*device).node] >= gpus);
        self.needs.retain(|need| named.iter().any(|device| inventory.device(*device).kind == need.kind));
        self.named = Some(named);
    }
}

/// All shapes seen, bounded: those nobody waits in are forgotten when there are too many.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    /// Looked up only, never walked: its order decides nothing.
    known: HashMap<Shape, ClassId, BuildHasherDefault<DefaultHasher>>,
    classes: Vec<Option<Class>>,
    free: Vec<ClassId>,
    /// Grows when classes are forgotten, so that what is kept per class elsewhere can follow.
    pub generation: u64,
}

impl Classes {
    pub fn get(&self, id: ClassId) -> &Class {
        match &self.classes[id.0 as usize] {
            Some(class) => class,
            None => unreachable!("class {} is kept while it is used", id.0),
        }
    }

    pub fn get_mut(&mut self, id: ClassId) -> &mut Class {
        match &mut self.classes[id.0 as usize] {
            Some(class) => class,
            None => unreachable!("class {} is kept while it is used", id.0),
        }
    }

    /// The class of a shape, judged against the current inventory.
    pub fn intern(&mut self, shape: Shape, inventory: &Inventory) -> ClassId {
        let id = match self.known.get(&shape) {
            Some(&id) => id,
            None => self.insert(shape),
        };
        self.judge(id, inventory);
        id
    }

    /// Judges a class anew where facts changed since.
    pub fn judge(&mut self, id: ClassId, inventory: &Inventory) {
        let class = self.get_mut(id);
        if class.judged_at != Some(inventory.version) {
            class.judge(inventory);
        }
    }

    /// The class of a shape, where it is known.
    pub fn find(&self, shape: &Shape) -> Option<ClassId> {
        self.known.get(shape).copied()
    }

    /// The queue was emptied.
    pub fn nobody_waits(&mut self) {
        for class in self.classes.iter_mut().flatten() {
            class.waiting = 0;
        }
    }

    fn insert(&mut self, shape: Shape) -> ClassId {
        if self.known.len() >= limits::CLASSES {
            self.forget_unused();
        }
        let class = Class {
            shape: shape.clone(),
            needs: Vec::new(),
            hosts: Vec::new(),
            named: None,
            never: None,
            most_held: Share::ZERO,
            models: 0,
            waiting: 0,
            judged_at: None,
        };
        let id = self.free.pop().unwrap_or_else(|| {
            self.classes.push(None);
            ClassId(self.classes.len() as u32 - 1)
        });
        self.classes[id.0 as usize] = Some(class);
        self.known.insert(shape, id);
        id
    }

    fn forget_unused(&mut self) {
        self.generation += 1;
        for (number, slot) in self.classes.iter_mut().enumerate() {
            if let Some(class) = slot.take_if(|class| class.waiting == 0) {
                self.known.remove(&class.shape);
                self.free.push(ClassId(number as u32));
            }
        }
    }
}
