//! What of a request decides where it may go, and what that takes of each kind of device.

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::ids::Labels;
use crate::inventory::KindId;
use crate::policy::Policy;
use crate::request::{Amount, Isolation, Request, Select, Strategy, Thresholds};
use crate::units::{Bytes, MilliCpus, Share};

/// Everything about a request that decides where it may go.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub gpus: u16,
    pub amount: Amount,
    pub isolation: Isolation,
    pub strategy: Strategy,
    pub thresholds: Option<Thresholds>,
    pub select: Arc<Select>,
    pub cpus: MilliCpus,
    pub host_memory: Bytes,
    pub node_selector: Arc<Labels>,
    pub preferred: Arc<[Arc<str>]>,
    pub max_allocations: Option<u16>,
    sharers: u32,
}

impl Shape {
    pub fn of(request: &Request, policy: &Policy) -> Self {
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
            sharers: policy.sharers(),
        }
    }

    /// Whether it takes anything of the host.
    pub fn needs_host(&self) -> bool {
        !self.cpus.is_zero() || !self.host_memory.is_zero()
    }

    /// Whether it names an amount of device memory.
    pub fn names_memory(&self) -> bool {
        matches!(self.amount, Amount::Memory(_) | Amount::Both(..))
    }

    /// What it takes of a device of this kind; `None` where such a device can never give it.
    pub(super) fn need(&self, kind: KindId, facts: &DeviceFacts) -> Option<Need> {
        let capacity = facts.memory_capacity();
        let preferred = self.preferred.iter().any(|model| facts.is_model(model));
        if !facts.is_divisible() {
            let taken = self.takes_whole_partition(facts)?;
            return Some(Need { kind, share: Share::WHOLE, memory: taken, preferred });
        }
        let (share, memory) = match self.amount {
            Amount::Whole | Amount::Share(Share::WHOLE) => (Share::WHOLE, capacity),
            Amount::Share(share) => (share, capacity.map(|all| all.part(share))),
            Amount::Shared => {
                let share = Share((Share::WHOLE.0 / self.sharers).max(1));
                (share, capacity.map(|all| all.part(share)))
            }
            Amount::Memory(memory) => {
                let all = capacity.filter(|all| memory <= *all)?;
                let share = (u128::from(memory.0) * 1000 / u128::from(all.0.max(1))) as u32;
                (Share(share.max(1)), Some(memory))
            }
            Amount::Both(share, memory) => {
                let all = capacity.filter(|all| memory <= *all)?;
                (share, Some(if share == Share::WHOLE { all } else { memory }))
            }
        };
        Some(Need { kind, share, memory: memory.unwrap_or_default(), preferred })
    }

    /// The memory of a partition that is only taken as it is, where it is what was asked for: at least the share of a
    /// whole GPU, and not a whole GPU for less.
    fn takes_whole_partition(&self, facts: &DeviceFacts) -> Option<Bytes> {
        let (share, memory) = match self.amount {
            Amount::Whole => (Share::WHOLE, Bytes::ZERO),
            Amount::Share(share) => (share, Bytes::ZERO),
            Amount::Both(share, memory) => (share, memory),
            Amount::Memory(memory) => (Share(1), memory),
            Amount::Shared => (Share((Share::WHOLE.0 / self.sharers).max(1)), Bytes::ZERO),
        };
        let all = facts.memory_capacity().unwrap_or_default();
        let fits = share <= facts.of_gpu() && memory <= all && (share == Share::WHOLE || facts.of_gpu() < Share::WHOLE);
        fits.then_some(all)
    }
}

/// What a class takes of one device of a kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    pub kind: KindId,
    pub share: Share,
    /// Zero where the kind's memory is unknown.
    pub memory: Bytes,
    /// Whether the policy prefers this kind.
    pub preferred: bool,
}
