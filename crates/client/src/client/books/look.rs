//! A look at the server becomes facts for the pool: which GPUs there are, whether each can be given, and what it read.

use gpupool_api::SelectBody;
use gpupool_api::stats::{Stats, Summary};
use gpupool_core::device::{Health, NodeFacts};
use gpupool_core::ids::Labels;
use gpupool_core::{Answer, Bytes, Command, GpuId, MilliCpus};

use super::{State, told};

impl State {
    pub(super) fn take_in(&mut self, summary: &Summary, stats: Option<&Stats>) {
        self.tick();
        if summary.stale || summary.error.is_some() {
            return;
        }
        // Closed while facts change one by one: nobody is granted what is new beside what is not true any more.
        self.close();
        told::take_summary(&mut self.told, summary);
        if let Some(stats) = stats {
            told::take_stats(&mut self.told, stats);
        }
        let is_held = |number| {
            let view = self.devices.get(&number).and_then(|device| self.pool.device(*device));
            view.is_some_and(|view| !view.leases.is_empty())
        };
        told::settle(&mut self.told, is_held);

        let (known, new): (Vec<u32>, Vec<u32>) =
            self.told.keys().partition(|number| self.devices.contains_key(*number));
        known.into_iter().for_each(|number| self.observe(number));
        self.open();
        // A GPU that was never read is nobody's yet.
        new.into_iter().for_each(|number| self.observe(number));
    }

    /// Takes no new work from now on.
    pub(super) fn close(&mut self) {
        match self.node_id {
            Some(node) => self.tell(Command::NodeLost { node }),
            None => self.tick(),
        }
    }

    fn observe(&mut self, number: u32) {
        let (Some(&device), Some(told)) = (self.devices.get(&number), self.told.get(&number)) else { return };
        let (health, reading) = (told.health(), told.reading(self.now()));
        let is_readable = health == Health::Healthy;
        if self.pool.device(device).is_none_or(|view| view.health != health) {
            self.tell(Command::SetHealth { device, health });
        }
        if is_readable {
            self.tell(Command::Observe { device, reading });
        }
    }

    /// Takes new work again, on every GPU that is listed and well.
    fn open(&mut self) {
        let listed: Vec<(&u32, &told::Told)> = self.told.iter().filter(|(_, told)| told.is_listed()).collect();
        let numbers: Vec<u32> = listed.iter().map(|(number, _)| **number).collect();
        let command = Command::NodeSeen {
            // Such a server tells nothing of CPUs and memory of its host, so none can be promised.
            facts: NodeFacts {
                name: self.node.clone(),
                cpus: MilliCpus::ZERO,
                memory: Bytes::ZERO,
                labels: Labels::new(),
            },
            devices: listed.iter().map(|(number, told)| told.facts(&self.node, **number)).collect(),
            numbers: numbers.iter().map(|number| GpuId(*number)).collect(),
        };
        if let Ok(Answer::Node(node, devices)) = self.apply(command) {
            self.node_id = Some(node);
            self.devices.extend(numbers.into_iter().zip(devices));
        }
    }

    /// The pool knows GPUs by number only; here is known which have the UUIDs that are asked for. Where none has, the pool
    /// is left to say so.
    pub(super) fn select_by_number(&self, select: &mut SelectBody) {
        let is_asked_for = |number: u32, told: &told::Told| {
            let uuid = told.uuid.clone().unwrap_or_else(|| told::name_of(&self.node, number));
            let by_number = select.gpu_ids.is_empty() || select.gpu_ids.contains(&GpuId(number));
            by_number && select.uuids.contains(&uuid)
        };
        let found: Vec<GpuId> =
            self.told.iter().filter(|(number, told)| is_asked_for(**number, told)).map(|(n, _)| GpuId(*n)).collect();
        if !found.is_empty() {
            select.gpu_ids = found;
            select.uuids.clear();
        }
    }
}
