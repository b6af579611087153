//! Reads `[[policy]]`, `[default_policy]` and `[quota]` of the file as rules of the pool.
//!
//! The file uses fractions of a GPU, memory with a unit, durations and GPU-hours; the pool uses thousandths, bytes and
//! milliseconds. A key that a policy omits has the default of the API: at least a tenth of a GPU, ten leases per
//! device, at least one GPU, and no priority above 0.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{Labels, Millis, OwnerQuota, Policies, PolicyMatch, RequestPolicy, Share, limits::MAX_PRIORITY};
use toml::de::DeTable;

use crate::limits;
use crate::load::Resolver;
use crate::problem::{ConfigProblem, SettingOrigin, nearest};
use crate::settings::QueueSettings;
use crate::value::{self, RawValue, ValueKind, list, shortened};

/// Upper limit of `max_duration`: one year.
const MAX_DURATION_SECS: f64 = 31_536_000.0;
/// Upper limit of GPUs or GPU-hours in a quota.
const MAX_QUOTA_GPUS: f64 = 1_000_000.0;

pub(crate) const QUOTA_KEYS: [&str; 3] = ["gpus", "gpu_hours", "weight"];

/// Reads all rules of the file.
pub(crate) fn read_rules(from: &mut Resolver<'_>, queue: &QueueSettings, period: Duration) -> Policies {
    let policies = read_policies(from);
    let fallback = from.file.remove_entry("default_policy").and_then(|(key, node)| {
        let (path, name) = ("default_policy".to_owned(), "default".to_owned());
        read_policy(from, path, name, PolicyScope::Fallback, key.span().start, node.into_inner())
    });
    let (default_quota, quotas) = read_quotas(from);
    Policies {
        policies,
        fallback: fallback.unwrap_or_default(),
        quotas,
        default_quota,
        queue: queue.order,
        period: Millis(period.as_millis() as u64),
        ageing_step: Millis(queue.ageing_step.as_millis() as u64),
    }
}

fn read_policies(from: &mut Resolver<'_>) -> Vec<RequestPolicy> {
    let Some((key, node)) = from.file.remove_entry("policy") else { return Vec::new() };
    let value = match node.into_inner() {
        RawValue::Array(nodes) if nodes.iter().any(|node| node.get_ref().is_table()) => {
            if nodes.len() <= limits::POLICIES {
                let nodes = nodes.into_iter().enumerate();
                let read = |(index, node): (usize, toml::Spanned<RawValue<'_>>)| {
                    let (path, name) = (format!("policy[{index}]"), format!("policy {index}"));
                    read_policy(from, path, name, PolicyScope::Matching, node.span().start, node.into_inner())
                };
                return nodes.filter_map(read).collect();
            }
            format!("a list of {}", nodes.len())
        }
        _ => "a value".to_owned(),
    };
    let allowed = format!("at most {} tables that each begin with [[policy]]", limits::POLICIES);
    from.add_problem(ConfigProblem::not_allowed("policy", from.written_at(key.span().start), &value, &allowed, None));
    Vec::new()
}

/// Requests that a policy applies to.
#[derive(PartialEq)]
enum PolicyScope {
    Matching,
    Fallback,
}

fn read_policy(
    from: &mut Resolver<'_>,
    path: String,
    default_name: String,
    scope: PolicyScope,
    at: usize,
    node: RawValue<'_>,
) -> Option<RequestPolicy> {
    let mut rules = RuleTable::open(from, path, at, node)?;
    let rules_at_api = RequestPolicy::default();
    let mut applies_to = PolicyMatch::default();
    let mut name = default_name;
    if scope == PolicyScope::Matching {
        name = rules.take("name", &value::owner()).unwrap_or(name);
        applies_to.owners = to_shared(rules.take("owners", &list(value::owner())));
        applies_to.sizes = rules.take("sizes", &list(value::size())).unwrap_or_default();
        applies_to.labels = rules.take_labels("labels");
    }
    let policy = RequestPolicy {
        name: name.into(),
        applies_to,
        strategy: rules.take("strategy", &value::strategy()),
        min_share: rules.take("min_fraction", &value::fraction()).or(rules_at_api.min_share),
        max_share: rules.take("max_fraction", &value::fraction()),
        max_memory: rules.take("max_memory", &value::memory()),
        sharing_allowed: rules.take("sharing", &value::boolean()).unwrap_or(rules_at_api.sharing_allowed),
        isolation_allowed: rules.take("isolation", &list(value::isolation())).unwrap_or_default(),
        max_priority: rules.take("max_priority", &value::whole(0..=MAX_PRIORITY)).unwrap_or(rules_at_api.max_priority),
        priority_boost: rules.take("priority_boost", &value::whole(-MAX_PRIORITY..=MAX_PRIORITY)).unwrap_or(0),
        max_duration: rules
            .take("max_duration", &value::seconds(0.001..=MAX_DURATION_SECS))
            .map(|time| Millis(time.as_millis() as u64)),
        node_selector: Arc::new(rules.take_labels("node_selector")),
        preferred_models: to_shared(rules.take("prefer_models", &list(value::owner()))).into(),
        max_allocations: rules.take("max_allocations", &value::whole(1..=1_000)).or(rules_at_api.max_allocations),
        gpu_required: rules.take("gpu_required", &value::boolean()).unwrap_or(rules_at_api.gpu_required),
    };
    if let Some((least, most)) = policy.min_share.zip(policy.max_share).filter(|(least, most)| least > most) {
        let message =
            format!("min_fraction {least} is above max_fraction {most}, so no request can pass; swap or widen them");
        rules.add_contradiction("min_fraction", message);
    }
    rules.check_unknown_keys();
    Some(policy)
}

fn read_quotas(from: &mut Resolver<'_>) -> (OwnerQuota, BTreeMap<Arc<str>, OwnerQuota>) {
    let mut quotas = BTreeMap::new();
    let Some(RawValue::Table(section)) = from.file.get_mut("quota").map(|section| section.get_mut()) else {
        return (OwnerQuota::default(), quotas);
    };
    let (default, owners) = (section.remove_entry("default"), section.remove_entry("owners"));
    let default = default.and_then(|(key, node)| read_quota(from, "quota.default".into(), key.span().start, node));
    let default = default.unwrap_or_default();
    let Some((key, owners)) = owners else { return (default, quotas) };
    let is_owner = |name: &str| value::tidy_short(name.trim()).is_some_and(|tidy| tidy == name);
    match owners.into_inner() {
        RawValue::Table(owners)
            if owners.len() <= limits::QUOTAS && owners.keys().all(|name| is_owner(name.get_ref())) =>
        {
            for (owner, node) in owners {
                let path = format!("quota.owners.{}", owner.get_ref());
                if let Some(quota) = read_quota(from, path, owner.span().start, node) {
                    quotas.insert(owner.into_inner().into(), quota);
                }
            }
        }
        _ => {
            let most = limits::QUOTAS;
            let allowed = format!(
                "at most {most} tables such as [quota.owners.alice], each named after its owner (1 to 253 bytes)"
            );
            from.add_problem(ConfigProblem::not_allowed(
                "quota.owners",
                from.written_at(key.span().start),
                "this",
                &allowed,
                None,
            ));
        }
    }
    (default, quotas)
}

fn read_quota(
    from: &mut Resolver<'_>,
    path: String,
    at: usize,
    node: toml::Spanned<RawValue<'_>>,
) -> Option<OwnerQuota> {
    let mut rules = RuleTable::open(from, path, at, node.into_inner())?;
    let thousandths = |amount: f64| (amount * 1000.0).round() as u64;
    let [gpus, gpu_hours, weight] = QUOTA_KEYS;
    let amount = value::number(0.0..=MAX_QUOTA_GPUS);
    let quota = OwnerQuota {
        held: rules.take(gpus, &amount).map(|gpus| Share(thousandths(gpus) as u32)),
        share_hours: rules.take(gpu_hours, &amount).map(thousandths),
        weight: rules.take(weight, &value::whole(1..=1_000_000)).unwrap_or(1),
    };
    rules.check_unknown_keys();
    Some(quota)
}

fn to_shared(names: Option<Vec<String>>) -> Vec<Arc<str>> {
    names.unwrap_or_default().into_iter().map(Arc::from).collect()
}

/// Table of rules. Keys that were not read are reported as unknown.
struct RuleTable<'r, 'i, 't> {
    from: &'r mut Resolver<'i>,
    path: String,
    /// Byte offset in the file.
    at: usize,
    table: DeTable<'t>,
    known_keys: Vec<&'static str>,
}

impl<'r, 'i, 't> RuleTable<'r, 'i, 't> {
    /// Opens the table at `path`, or reports that the node is not a table.
    fn open(from: &'r mut Resolver<'i>, path: String, at: usize, node: RawValue<'t>) -> Option<Self> {
        if let RawValue::Table(table) = node {
            return Some(Self { from, path, at, table, known_keys: Vec::new() });
        }
        let (origin, allowed) = (from.written_at(at), "a table of keys and values");
        from.add_problem(ConfigProblem::not_allowed(&path, origin, "a value", allowed, None));
        None
    }

    /// Takes the value of a key, if it is present and allowed.
    fn take<T>(&mut self, name: &'static str, kind: &ValueKind<T>) -> Option<T> {
        self.known_keys.push(name);
        let (key, node) = self.table.remove_entry(name)?;
        let origin = self.from.written_at(key.span().start);
        self.from.read_rule(format!("{}.{name}", self.path), origin, node.get_ref(), kind)
    }

    /// Takes a table of texts as labels.
    fn take_labels(&mut self, name: &'static str) -> Labels {
        self.known_keys.push(name);
        let mut labels = Labels::new();
        let Some((key, node)) = self.table.remove_entry(name) else { return labels };
        let path = format!("{}.{name}", self.path);
        let pairs =
            RuleTable::open(self.from, path.clone(), key.span().start, node.into_inner()).map(|inner| inner.table);
        let pairs = pairs.unwrap_or_default();
        if pairs.len() > limits::ENTRIES {
            let message = format!("{} labels exceed the maximum of {}", pairs.len(), limits::ENTRIES);
            self.add_contradiction(name, message);
            return labels;
        }
        for (key, node) in pairs {
            let origin = self.from.written_at(key.span().start);
            let path = format!("{path}.{}", key.get_ref());
            if let Some(text) = self.from.read_rule(path, origin, node.get_ref(), &value::short_text()) {
                labels.insert(key.into_inner().into(), text.into());
            }
        }
        labels
    }

    /// Reports that a key contradicts another one.
    fn add_contradiction(&mut self, name: &str, message: String) {
        let key = format!("{}.{name}", self.path);
        let origin = match self.from.origin_of(&key) {
            SettingOrigin::Default => self.from.written_at(self.at),
            origin => origin,
        };
        self.from.add_problem(ConfigProblem::contradiction(&key, &origin, message));
    }

    /// Reports every key that was not read.
    fn check_unknown_keys(self) {
        for (name, _) in self.table {
            let origin = self.from.written_at(name.span().start);
            let hint =
                nearest(name.get_ref(), self.known_keys.iter().copied()).map(|name| format!("{}.{name}", self.path));
            let key = format!("{}.{}", self.path, shortened(name.get_ref()));
            self.from.add_problem(ConfigProblem::unknown_key(&key, &origin, hint));
        }
    }
}
