//! `[[policy]]`, `[default_policy]` and `[quota]` of the file, as the pool's rules.
//!
//! The file speaks in fractions of a GPU, amounts of memory with a unit, times and GPU-hours; the pool in thousandths,
//! bytes and milliseconds. Where a policy leaves a key out, the rule at the API holds: a tenth of a GPU at least, ten
//! leases on one device, at least one GPU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpupool_core::{
    Labels, Millis, OwnerQuota, Policies, PolicyMatch, QueueOrder, RequestPolicy, Share, limits::MAX_PRIORITY,
};
use toml::de::DeTable;

use crate::limits;
use crate::load::Resolver;
use crate::problem::{ConfigProblem, SettingOrigin, nearest};
use crate::value::{self, Kind, Raw, list, shortened};

/// A year of seconds: no rule is about longer.
const YEAR: f64 = 31_536_000.0;
/// GPUs or GPU-hours a quota may name.
const MOST_GPUS: f64 = 1_000_000.0;

pub(crate) const QUOTA_KEYS: [&str; 3] = ["gpus", "gpu_hours", "weight"];

/// All rules of the file.
pub(crate) fn read(from: &mut Resolver<'_>, queue: QueueOrder, period: Duration) -> Policies {
    let policies = read_policies(from);
    let fallback = from.file.remove_entry("default_policy").and_then(|(key, node)| {
        let (path, name) = ("default_policy".to_owned(), "default".to_owned());
        read_policy(from, path, name, Applies::ToTheRest, key.span().start, node.into_inner())
    });
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

fn read_policies(from: &mut Resolver<'_>) -> Vec<RequestPolicy> {
    let Some((key, node)) = from.file.remove_entry("policy") else { return Vec::new() };
    let value = match node.into_inner() {
        Raw::Array(nodes) if nodes.iter().any(|node| node.get_ref().is_table()) => {
            if nodes.len() <= limits::POLICIES {
                let nodes = nodes.into_iter().enumerate();
                let read = |(index, node): (usize, toml::Spanned<Raw<'_>>)| {
                    let (path, name) = (format!("policy[{index}]"), format!("policy {index}"));
                    read_policy(from, path, name, Applies::ToMatching, node.span().start, node.into_inner())
                };
                return nodes.filter_map(read).collect();
            }
            format!("a list of {}", nodes.len())
        }
        _ => "something else than a list of tables".to_owned(),
    };
    let allowed = format!("at most {} tables that each begin with [[policy]]", limits::POLICIES);
    from.complain(ConfigProblem::not_allowed("policy", from.written_at(key.span().start), &value, &allowed, None));
    Vec::new()
}

/// Whether a policy chooses its requests or takes those that no other covers.
#[derive(PartialEq)]
enum Applies {
    ToMatching,
    ToTheRest,
}

fn read_policy(
    from: &mut Resolver<'_>,
    path: String,
    unnamed: String,
    applies: Applies,
    at: usize,
    node: Raw<'_>,
) -> Option<RequestPolicy> {
    let mut fields = Fields::of(from, path, at, node)?;
    let rules_at_api = RequestPolicy::default();
    let mut applies_to = PolicyMatch::default();
    let mut name = unnamed;
    if applies == Applies::ToMatching {
        name = fields.get("name", &value::owner()).unwrap_or(name);
        applies_to.owners = shared(fields.get("owners", &list(value::owner())));
        applies_to.sizes = fields.get("sizes", &list(value::size())).unwrap_or_default();
        applies_to.labels = fields.labels("labels");
    }
    let policy = RequestPolicy {
        name: name.into(),
        applies_to,
        strategy: fields.get("strategy", &value::strategy()),
        min_share: fields.get("min_fraction", &value::fraction()).or(rules_at_api.min_share),
        max_share: fields.get("max_fraction", &value::fraction()),
        max_memory: fields.get("max_memory", &value::memory()),
        sharing_allowed: fields.get("sharing", &value::boolean()).unwrap_or(rules_at_api.sharing_allowed),
        isolation_allowed: fields.get("isolation", &list(value::isolation())).unwrap_or_default(),
        priority_boost: fields.get("priority_boost", &value::whole(-MAX_PRIORITY..=MAX_PRIORITY)).unwrap_or(0),
        max_duration: fields
            .get("max_duration", &value::seconds(0.001..=YEAR))
            .map(|time| Millis(time.as_millis() as u64)),
        node_selector: Arc::new(fields.labels("node_selector")),
        preferred_models: shared(fields.get("prefer_models", &list(value::owner()))).into(),
        max_allocations: fields.get("max_allocations", &value::whole(1..=1_000)).or(rules_at_api.max_allocations),
        gpu_required: fields.get("gpu_required", &value::boolean()).unwrap_or(rules_at_api.gpu_required),
    };
    if let Some((least, most)) = policy.min_share.zip(policy.max_share).filter(|(least, most)| least > most) {
        let said =
            format!("min_fraction {least} is above max_fraction {most}, so no request could pass; swap or widen them");
        fields.contradiction("min_fraction", said);
    }
    fields.finish();
    Some(policy)
}

fn read_quotas(from: &mut Resolver<'_>) -> (OwnerQuota, BTreeMap<Arc<str>, OwnerQuota>) {
    let mut quotas = BTreeMap::new();
    let Some(Raw::Table(section)) = from.file.get_mut("quota").map(|section| section.get_mut()) else {
        return (OwnerQuota::default(), quotas);
    };
    let (default, owners) = (section.remove_entry("default"), section.remove_entry("owners"));
    let default = default.and_then(|(key, node)| read_quota(from, "quota.default".into(), key.span().start, node));
    let default = default.unwrap_or_default();
    let Some((key, owners)) = owners else { return (default, quotas) };
    let is_owner = |name: &str| value::tidy_short(name.trim()).is_some_and(|tidy| tidy == name);
    match owners.into_inner() {
        Raw::Table(owners) if owners.len() <= limits::QUOTAS && owners.keys().all(|name| is_owner(name.get_ref())) => {
            for (owner, node) in owners {
                let path = format!("quota.owners.{}", owner.get_ref());
                if let Some(quota) = read_quota(from, path, owner.span().start, node) {
                    quotas.insert(owner.into_inner().into(), quota);
                }
            }
        }
        _ => {
            let most = limits::QUOTAS;
            let allowed =
                format!("at most {most} tables such as [quota.owners.alice], each named as its owner (1 to 253 bytes)");
            from.complain(ConfigProblem::not_allowed(
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

fn read_quota(from: &mut Resolver<'_>, path: String, at: usize, node: toml::Spanned<Raw<'_>>) -> Option<OwnerQuota> {
    let mut fields = Fields::of(from, path, at, node.into_inner())?;
    let thousandths = |amount: f64| (amount * 1000.0).round() as u64;
    let [gpus, gpu_hours, weight] = QUOTA_KEYS;
    let amount = value::number(0.0..=MOST_GPUS);
    let quota = OwnerQuota {
        held: fields.get(gpus, &amount).map(|gpus| Share(thousandths(gpus) as u32)),
        share_hours: fields.get(gpu_hours, &amount).map(thousandths),
        weight: fields.get(weight, &value::whole(1..=1_000_000)).unwrap_or(1),
    };
    fields.finish();
    Some(quota)
}

fn shared(names: Option<Vec<String>>) -> Vec<Arc<str>> {
    names.unwrap_or_default().into_iter().map(Arc::from).collect()
}

/// One table of rules that is being read; a key that was not asked for at the end is unknown.
struct Fields<'r, 'i, 't> {
    from: &'r mut Resolver<'i>,
    path: String,
    /// The byte of the file at which it begins.
    at: usize,
    table: DeTable<'t>,
    asked: Vec<&'static str>,
}

impl<'r, 'i, 't> Fields<'r, 'i, 't> {
    /// The table `node`, which is called `path`; a complaint where it is something else.
    fn of(from: &'r mut Resolver<'i>, path: String, at: usize, node: Raw<'t>) -> Option<Self> {
        if let Raw::Table(table) = node {
            return Some(Self { from, path, at, table, asked: Vec::new() });
        }
        let (origin, allowed) = (from.written_at(at), "a table of keys and values");
        from.complain(ConfigProblem::not_allowed(&path, origin, "something else than a table", allowed, None));
        None
    }

    /// The value of `name`, if it is there and allowed.
    fn get<T>(&mut self, name: &'static str, kind: &Kind<T>) -> Option<T> {
        self.asked.push(name);
        let (key, node) = self.table.remove_entry(name)?;
        let origin = self.from.written_at(key.span().start);
        self.from.read_rule(format!("{}.{name}", self.path), origin, node.get_ref(), kind)
    }

    /// Pairs of a table of texts.
    fn labels(&mut self, name: &'static str) -> Labels {
        self.asked.push(name);
        let mut labels = Labels::new();
        let Some((key, node)) = self.table.remove_entry(name) else { return labels };
        let path = format!("{}.{name}", self.path);
        let pairs = Fields::of(self.from, path.clone(), key.span().start, node.into_inner()).map(|inner| inner.table);
        let pairs = pairs.unwrap_or_default();
        if pairs.len() > limits::ENTRIES {
            let said = format!("{} pairs are too many, at most {} are taken", pairs.len(), limits::ENTRIES);
            self.contradiction(name, said);
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

    /// Complains that `name` cannot be together with another key.
    fn contradiction(&mut self, name: &str, said: String) {
        let key = format!("{}.{name}", self.path);
        let origin = match self.from.origin_of(&key) {
            SettingOrigin::Default => self.from.written_at(self.at),
            origin => origin,
        };
        self.from.complain(ConfigProblem::contradiction(&key, &origin, said));
    }

    /// Complains of every key that was not asked for.
    fn finish(self) {
        for (name, _) in self.table {
            let origin = self.from.written_at(name.span().start);
            let hint = nearest(name.get_ref(), self.asked.iter().copied()).map(|name| format!("{}.{name}", self.path));
            let key = format!("{}.{}", self.path, shortened(name.get_ref()));
            self.from.complain(ConfigProblem::unknown_key(&key, &origin, hint));
        }
    }
}
