//! Rules of the operator: limits and placement per class of requests, quotas, and the order of the queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Labels, labels_match};
use crate::limits;
use crate::request::{FieldError, IsolationLevel, PlacementStrategy, Request, RequestedAmount};
use crate::units::{Bytes, Millis, PoolTime, Share};

/// Size of a request, by which policies can select.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestSize {
    HostOnly,
    /// Parts of one or several GPUs.
    Part,
    Whole,
    Several,
}

impl RequestSize {
    pub fn of(request: &Request) -> Self {
        match (request.gpus, request.amount) {
            (0, _) => Self::HostOnly,
            (
                1,
                RequestedAmount::Whole | RequestedAmount::Share(Share::WHOLE) | RequestedAmount::Both(Share::WHOLE, _),
            ) => Self::Whole,
            (
                _,
                RequestedAmount::Whole | RequestedAmount::Share(Share::WHOLE) | RequestedAmount::Both(Share::WHOLE, _),
            ) => Self::Several,
            _ => Self::Part,
        }
    }
}

/// Requests that a policy applies to; empty matches all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyMatch {
    /// Only requests of these owners.
    pub owners: Vec<Arc<str>>,
    /// Only requests of these sizes.
    pub sizes: Vec<RequestSize>,
    /// Only requests with these labels.
    pub labels: Labels,
}

impl PolicyMatch {
    fn matches(&self, request: &Request) -> bool {
        (self.owners.is_empty() || self.owners.contains(&request.owner))
            && (self.sizes.is_empty() || self.sizes.contains(&RequestSize::of(request)))
            && labels_match(&request.labels, &self.labels)
    }
}

/// Limits and placement for one class of requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestPolicy {
    /// Name in messages and in the decision log.
    pub name: Arc<str>,
    /// Requests that the policy applies to.
    pub applies_to: PolicyMatch,
    /// Strategy for requests that name none.
    pub strategy: Option<PlacementStrategy>,
    /// Smallest share of a GPU.
    pub min_share: Option<Share>,
    /// Largest share of a GPU; a whole GPU exceeds any smaller value.
    pub max_share: Option<Share>,
    /// Largest amount of GPU memory.
    pub max_memory: Option<Bytes>,
    /// Whether parts of GPUs may be requested.
    pub sharing_allowed: bool,
    /// Permitted isolation; empty permits any.
    pub isolation_allowed: Vec<IsolationLevel>,
    /// Highest priority that a request may ask for, unless an administrator makes it.
    pub max_priority: i32,
    /// Added to the request's priority after the check of `max_priority`.
    pub priority_boost: i32,
    /// Longest time a lease may be held; also applies to requests that name none.
    pub max_duration: Option<Millis>,
    /// Only nodes with these labels.
    pub node_selector: Arc<Labels>,
    /// Models that are tried first.
    pub preferred_models: Arc<[Arc<str>]>,
    /// Largest number of leases on one device; `None` for no limit.
    pub max_allocations: Option<u16>,
    /// Whether a request must include a GPU.
    pub gpu_required: bool,
}

impl Default for RequestPolicy {
    /// Returns the default rules of the API: at least one GPU, at least a tenth of it, ten allocations per device, and no
    /// priority above 0.
    fn default() -> Self {
        Self {
            name: Arc::from("default"),
            applies_to: PolicyMatch::default(),
            strategy: None,
            min_share: Some(Share(100)),
            max_share: None,
            max_memory: None,
            sharing_allowed: true,
            isolation_allowed: Vec::new(),
            max_priority: 0,
            priority_boost: 0,
            max_duration: None,
            node_selector: Arc::default(),
            preferred_models: Arc::from([]),
            max_allocations: Some(10),
            gpu_required: true,
        }
    }
}

impl RequestPolicy {
    /// Returns a policy without rules, as in simulations: any share, any priority, host-only requests, no limit on
    /// allocations.
    pub fn unlimited() -> Self {
        Self {
            name: Arc::from("unlimited"),
            min_share: None,
            max_priority: limits::MAX_PRIORITY,
            max_allocations: None,
            gpu_required: false,
            ..Self::default()
        }
    }

    /// Returns the strategy for `request`: its own, else the policy's, else `least-used` for whole GPUs and `best-fit`
    /// for parts.
    pub(crate) fn strategy_for(&self, request: &Request) -> PlacementStrategy {
        let by_size = || match RequestSize::of(request) {
            RequestSize::Part => PlacementStrategy::BestFit,
            RequestSize::HostOnly | RequestSize::Whole | RequestSize::Several => PlacementStrategy::LeastUsed,
        };
        request.strategy.or(self.strategy).unwrap_or_else(by_size)
    }

    /// Returns the longest time a lease may be held, by the request and the policy.
    pub(crate) fn hold_limit(&self, request: &Request) -> Option<Millis> {
        [request.max_duration, self.max_duration].into_iter().flatten().min()
    }

    /// Returns the number of leases that may share a device, for [`RequestedAmount::Shared`].
    pub(crate) fn max_sharers(&self) -> u32 {
        u32::from(self.max_allocations.unwrap_or(10).max(1))
    }

    /// Returns the violation by a request whose priority is above the limit.
    pub(crate) fn find_priority_violation(&self, request: &Request) -> Option<PolicyViolation> {
        let (asked, most) = (request.priority, self.max_priority);
        (asked > most).then_some(PolicyViolation::MaxPriority { asked, most })
    }

    /// Returns the rule that `request` violates, if any, apart from its priority.
    pub(crate) fn find_violation(&self, request: &Request) -> Option<PolicyViolation> {
        if request.gpus == 0 {
            return self.gpu_required.then_some(PolicyViolation::GpuRequired);
        }
        let share = match request.amount {
            RequestedAmount::Whole => Some(Share::WHOLE),
            RequestedAmount::Share(share) | RequestedAmount::Both(share, _) => Some(share),
            RequestedAmount::Shared => Some(Share(Share::WHOLE.0 / self.max_sharers())),
            RequestedAmount::Memory(_) => None,
        };
        if let Some(asked) = share {
            if let Some(least) = self.min_share.filter(|least| asked < *least) {
                return Some(PolicyViolation::MinShare { asked, least });
            }
            if let Some(most) = self.max_share.filter(|most| asked > *most) {
                return Some(PolicyViolation::MaxShare { asked, most });
            }
        }
        if let RequestedAmount::Memory(asked) | RequestedAmount::Both(_, asked) = request.amount
            && let Some(most) = self.max_memory.filter(|most| asked > *most)
        {
            return Some(PolicyViolation::MaxMemory { asked, most });
        }
        if !self.sharing_allowed && RequestSize::of(request) == RequestSize::Part {
            return Some(PolicyViolation::SharingAllowed);
        }
        if !self.isolation_allowed.is_empty() && !self.isolation_allowed.contains(&request.isolation) {
            return Some(PolicyViolation::IsolationAllowed(request.isolation));
        }
        let (asked, most) = request.max_duration.zip(self.max_duration)?;
        (asked > most).then_some(PolicyViolation::MaxDuration { asked, most })
    }
}

/// Rule of a policy that a request violates: the field, its value, and the permitted values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum PolicyViolation {
    #[error("gpus: 0 is not allowed; it must be at least 1")]
    GpuRequired,
    #[error("fraction: {asked} is not allowed; it must be at least {least}")]
    MinShare { asked: Share, least: Share },
    #[error("fraction: {asked} is not allowed; it must be at most {most}")]
    MaxShare { asked: Share, most: Share },
    #[error("memory_mib: {asked} is not allowed; it must be at most {most}")]
    MaxMemory { asked: Bytes, most: Bytes },
    #[error("parts of a GPU are not allowed; leave out fraction, memory_mib and sharing")]
    SharingAllowed,
    #[error("isolation: {0} is not allowed here")]
    IsolationAllowed(IsolationLevel),
    #[error("max_duration_secs: {asked} is not allowed; it must be at most {most}")]
    MaxDuration { asked: Millis, most: Millis },
    #[error("priority: {asked} is not allowed; it must be at most {most}, the policy's max_priority")]
    MaxPriority { asked: i32, most: i32 },
}

/// Quota of one owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OwnerQuota {
    /// Largest share held at once, in thousandths of a GPU over all devices.
    pub held: Option<Share>,
    /// GPU-hours per period, in thousandths; once they are used up, requests wait for the next period.
    pub share_hours: Option<u64>,
    pub weight: u32,
}

impl Default for OwnerQuota {
    fn default() -> Self {
        Self { held: None, share_hours: None, weight: 1 }
    }
}

/// Order in which waiting requests of equal priority are served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueOrder {
    /// Order of arrival.
    #[default]
    Fifo,
    /// The owner with the least held share per weight first, then the least use in this period, then order of arrival.
    FairShare,
}

/// All policies and quotas of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policies {
    /// Policies in order: the first that matches a request applies.
    pub policies: Vec<RequestPolicy>,
    /// Policy for requests that no other policy matches.
    pub fallback: RequestPolicy,
    pub quotas: BTreeMap<Arc<str>, OwnerQuota>,
    /// Quota of owners without an entry of their own.
    pub default_quota: OwnerQuota,
    pub queue: QueueOrder,
    /// Period over which GPU-hours are counted.
    pub period: Millis,
    /// Waiting time that raises the priority of a request by 1; 0 for never.
    pub ageing_step: Millis,
}

/// Priority of a waiting request in the queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct QueuePriority {
    /// Priority of the request with the policy's boost and the gain by waiting.
    pub priority: i32,
    /// Gain by waiting.
    pub gained: i32,
    /// Time of the next rise.
    pub rises_at: Option<PoolTime>,
}

impl Default for Policies {
    fn default() -> Self {
        Self {
            policies: Vec::new(),
            fallback: RequestPolicy::default(),
            quotas: BTreeMap::new(),
            default_quota: OwnerQuota::default(),
            queue: QueueOrder::Fifo,
            period: Millis::from_mins(7 * 24 * 60),
            ageing_step: Millis::from_mins(60),
        }
    }
}

impl Policies {
    /// Returns policies without any rule and without ageing; see [`RequestPolicy::unlimited`].
    pub fn unlimited() -> Self {
        Self { fallback: RequestPolicy::unlimited(), ageing_step: Millis::ZERO, ..Self::default() }
    }

    pub fn policy_for(&self, request: &Request) -> &RequestPolicy {
        self.policies.iter().find(|policy| policy.applies_to.matches(request)).unwrap_or(&self.fallback)
    }

    /// Returns the priority in the queue of a request that has waited since `created_at`.
    ///
    /// Each `ageing_step` raises it by 1, up to the highest `max_priority` of all policies. So requests that users may
    /// make overtake it for a limited time only, and boosts of policies stay above it.
    pub(crate) fn queue_priority(&self, request: &Request, created_at: PoolTime, now: PoolTime) -> QueuePriority {
        let base = request.priority.saturating_add(self.policy_for(request).priority_boost);
        let highest = self.policies.iter().chain([&self.fallback]).map(|policy| policy.max_priority).max();
        let most_gain = highest.map_or(0, |highest| highest.saturating_sub(base).max(0));
        if most_gain == 0 || self.ageing_step.is_zero() {
            return QueuePriority { priority: base, gained: 0, rises_at: None };
        }
        let steps = now.since(created_at).0 / self.ageing_step.0;
        let gained = i32::try_from(steps).unwrap_or(i32::MAX).min(most_gain);
        let next_rise = || created_at.0.checked_add((steps + 1).checked_mul(self.ageing_step.0)?).map(PoolTime);
        let rises_at = if gained < most_gain { next_rise() } else { None };
        QueuePriority { priority: base.saturating_add(gained), gained, rises_at }
    }

    pub fn quota_of(&self, owner: &str) -> &OwnerQuota {
        self.quotas.get(owner).unwrap_or(&self.default_quota)
    }

    /// Checks that the rules are consistent; the error names the first that is not.
    pub fn validate(&self) -> Result<(), FieldError> {
        for policy in self.policies.iter().chain([&self.fallback]) {
            if policy.name.is_empty() || policy.name.len() > limits::MAX_NAME_BYTES {
                return Err(FieldError::new("policy.name", &policy.name, "1..=253 bytes"));
            }
            let bounds = policy.min_share.zip(policy.max_share);
            if let Some((least, _)) = bounds.filter(|(least, most)| least > most) {
                return Err(FieldError::new("policy.min_share", least, "at most max_share"));
            }
            if policy.max_duration.is_some_and(Millis::is_zero) {
                return Err(FieldError::new("policy.max_duration", 0, "above 0"));
            }
            if !(0..=limits::MAX_PRIORITY).contains(&policy.max_priority) {
                return Err(FieldError::new("policy.max_priority", policy.max_priority, "0..=1000000"));
            }
            if policy.max_allocations == Some(0) {
                return Err(FieldError::new("policy.max_allocations", 0, "at least 1"));
            }
        }
        if self.quotas.values().chain([&self.default_quota]).any(|quota| quota.weight == 0) {
            return Err(FieldError::new("quota.weight", 0, "at least 1"));
        }
        if self.period.is_zero() {
            return Err(FieldError::new("period", 0, "above 0"));
        }
        Ok(())
    }
}
