//! `[[policy]]`, `[default_policy]` and `[quota]` of the file, as the pool's rules.
//!
//! The file speaks in fractions of a GPU, amounts of memory with a unit, times and GPU-hours; the pool in thousandths,
//! bytes and milliseconds. Where a policy leaves a key out, the rule at the API holds: a tenth of a GPU at least, ten
//! leases on one device, at least one GPU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpupool_core::limits::PRIORITY;
use gpupool_core::policy::{Policies, Policy, PolicyMatch, QueueOrder, Quota};
use gpupool_core::{Bytes, Millis, Share};

use crate::fields::Fields;
use crate::file::{Node, What};
use crate::limits;
use crate::problem::Problem;
use crate::resolve::Resolver;
use crate::rules;

/// A year of seconds: no rule is about longer.
const YEAR: f64 = 31_536_000.0;
/// GPUs or GPU-hours a quota may name.
const MOST_GPUS: f64 = 1_000_000.0;

/// Keys of one quota.
pub(crate) const QUOTA_KEYS: [&str; 3] = ["gpus", "gpu_hours", "weight"];

/// All rules of the file.
pub(crate) fn read(from: &mut Resolver<'_>, queue: QueueOrder, period: Duration) -> Policies {
    let policies = read_policies(from);
    let fallback = match from.file.remove("default_policy") {
        Some(node) => read_policy(from, "default_policy".into(), "default".into(), Kind::Fallback, node),
        None => None,
    };
    let (default_quota, quotas) = read_quotas(from);
    Policies {
        policies,
        fallback: fallback.unwrap_or_default(),
        quotas,
        default_quota,
        queue,
        period: Millis(period.as_millis() as u64),
    }
}

fn read_policies(from: &mut Resolver<'_>) -> Vec<Policy> {
    let Some(Node { line, what }) = from.file.remove("policy") else { return Vec::new() };
    let nodes = match what {
        What::Tables(nodes) if nodes.len() <= limits::POLICIES => nodes,
        what => {
            let value = match what {
                What::Tables(nodes) => format!("a list of {}", nodes.len()),
                What::Value(_) | What::Table(_) => "something else than a list of tables".to_owned(),
            };
            let allowed = format!("at most {} tables that each begin with [[policy]]", limits::POLICIES);
            let origin = from.at_line(line);
            from.complain(Problem::BadValue { key: "policy".into(), origin, value, allowed, hint: None });
            return Vec::new();
        }
    };
    let read =
        |(index, node)| read_policy(from, format!("policy[{index}]"), format!("policy {index}"), Kind::Matched, node);
    nodes.into_iter().enumerate().filter_map(read).collect()
}

/// Whether a policy chooses its requests or takes those no other covers.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Matched,
    Fallback,
}

fn read_policy(from: &mut Resolver<'_>, path: String, unnamed: String, kind: Kind, node: Node) -> Option<Policy> {
    let mut fields = Fields::of(from, path, node)?;
    let rules_at_api = Policy::default();
    let mut applies_to = PolicyMatch::default();
    let mut name = unnamed;
    if kind == Kind::Matched {
        name = fields.get("name", &rules::OWNER).unwrap_or(name);
        applies_to.owners = shared(fields.get("owners", &rules::OWNER));
        applies_to.sizes = fields.get("sizes", &()).unwrap_or_default();
        applies_to.labels = fields.labels("labels");
    }
    let policy = Policy {
        name: name.into(),
        applies_to,
        strategy: fields.get("strategy", &()),
        min_share: fields.get::<Share>("min_fraction", &()).or(rules_at_api.min_share),
        max_share: fields.get("max_fraction", &()),
        max_memory: fields.get::<Bytes>("max_memory", &()),
        sharing_allowed: fields.get("sharing", &()).unwrap_or(rules_at_api.sharing_allowed),
        isolation_allowed: fields.get("isolation", &()).unwrap_or_default(),
        priority_boost: fields.get("priority_boost", &(-PRIORITY..=PRIORITY)).unwrap_or(0),
        max_duration: fields.get("max_duration", &(0.001..=YEAR)).map(|time: Duration| Millis(time.as_millis() as u64)),
        node_selector: Arc::new(fields.labels("node_selector")),
        preferred_models: shared(fields.get("prefer_models", &rules::OWNER)).into(),
        max_allocations: fields.get("max_allocations", &(1..=1_000)).or(rules_at_api.max_allocations),
        gpu_required: fields.get("gpu_required", &()).unwrap_or(rules_at_api.gpu_required),
    };
    if let Some((least, most)) = policy.min_share.zip(policy.max_share).filter(|(least, most)| least > most) {
        let said =
            format!("min_fraction {least} is above max_fraction {most}, so no request could pass; swap or widen them");
        fields.contradiction("min_fraction", said);
    }
    fields.finish();
    Some(policy)
}

fn read_quotas(from: &mut Resolver<'_>) -> (Quota, BTreeMap<Arc<str>, Quota>) {
    let mut quotas = BTreeMap::new();
    let Some(Node { what: What::Table(section), .. }) = from.file.get_mut("quota") else {
        return (Quota::default(), quotas);
    };
    let (default, owners) = (section.remove("default"), section.remove("owners"));
    let default = default.and_then(|node| read_quota(from, "quota.default".into(), node)).unwrap_or_default();
    let Some(Node { line, what }) = owners else { return (default, quotas) };
    let owners = match what {
        What::Table(owners) if owners.len() <= limits::QUOTAS && owners.keys().all(|name| is_owner(name)) => owners,
        _ => {
            from.complain(Problem::BadValue {
                key: "quota.owners".into(),
                origin: from.at_line(line),
                value: "this".into(),
                allowed: format!(
                    "at most {} tables such as [quota.owners.alice], each named as its owner (1 to 253 bytes)",
                    limits::QUOTAS
                ),
                hint: None,
            });
            return (default, quotas);
        }
    };
    for (owner, node) in owners {
        if let Some(quota) = read_quota(from, format!("quota.owners.{owner}"), node) {
            quotas.insert(owner.into(), quota);
        }
    }
    (default, quotas)
}

fn is_owner(name: &str) -> bool {
    (rules::OWNER.read)(name.trim()).is_some_and(|tidy| tidy == name)
}

fn read_quota(from: &mut Resolver<'_>, path: String, node: Node) -> Option<Quota> {
    let mut fields = Fields::of(from, path, node)?;
    let thousandths = |amount: f64| (amount * 1000.0).round() as u64;
    let [gpus, gpu_hours, weight] = QUOTA_KEYS;
    let quota = Quota {
        held: fields.get(gpus, &(0.0..=MOST_GPUS)).map(|gpus| Share(thousandths(gpus) as u32)),
        share_hours: fields.get(gpu_hours, &(0.0..=MOST_GPUS)).map(thousandths),
        weight: fields.get(weight, &(1..=1_000_000)).unwrap_or(1),
    };
    fields.finish();
    Some(quota)
}

fn shared(names: Option<Vec<String>>) -> Vec<Arc<str>> {
    names.unwrap_or_default().into_iter().map(Arc::from).collect()
}
