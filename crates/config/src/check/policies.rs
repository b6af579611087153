//! Findings about policies and quotas that are allowed but cannot do what was meant.

use std::collections::HashSet;

use gpupool_core::policy::{PolicyMatch, QueueOrder, Quota};

use super::Severity::{Notice, Warning};
use super::{Finder, Finding};
use crate::load::Loaded;
use crate::resolve::Resolved;

pub(super) fn findings(loaded: &Loaded) -> Vec<Finding> {
    let mut finder = Finder::new(loaded);
    order_of_policies(&mut finder);
    empty_lists(&mut finder);
    quotas(&mut finder);
    finder.found
}

fn order_of_policies(finder: &mut Finder<'_>) {
    let policies = &finder.loaded.config.policies.policies;
    let mut names = HashSet::new();
    for (index, policy) in policies.iter().enumerate() {
        let key = format!("policy[{index}].name");
        if !names.insert(&policy.name) {
            let what = format!(
                "Two policies are called {:?}; refusals name the policy and would not tell them apart.",
                policy.name
            );
            finder.add(Warning, "policy_name_twice", &key, what, "Give each its own name.");
        }
        let earlier = policies[..index].iter().find(|earlier| covers(&earlier.applies_to, &policy.applies_to));
        if let Some(earlier) = earlier {
            let what = format!(
                "{:?} is never reached: {:?} stands before it and takes all its requests.",
                policy.name, earlier.name
            );
            finder.add(Warning, "policy_unreachable", &key, what, "Put the narrower policy first.");
        }
    }
}

/// A list that is there and empty covers everything, which is seldom meant.
fn empty_lists(finder: &mut Finder<'_>) {
    let empty = |resolved: &&Resolved| resolved.value.as_array().is_some_and(Vec::is_empty);
    for resolved in finder.loaded.resolved.iter().filter(|resolved| resolved.key.starts_with("policy[")).filter(empty) {
        let what = format!("{} is an empty list, which means any.", resolved.key);
        finder.add(Warning, "policy_empty_list", &resolved.key, what, "Remove it, or name somebody.");
    }
}

/// Whether every request that `inner` is for is taken by `outer`.
fn covers(outer: &PolicyMatch, inner: &PolicyMatch) -> bool {
    fn within<T: PartialEq>(outer: &[T], inner: &[T]) -> bool {
        outer.is_empty() || (!inner.is_empty() && inner.iter().all(|each| outer.contains(each)))
    }
    within(&outer.owners, &inner.owners)
        && within(&outer.sizes, &inner.sizes)
        && outer.labels.iter().all(|(key, value)| inner.labels.get(key) == Some(value))
}

fn quotas(finder: &mut Finder<'_>) {
    let policies = &finder.loaded.config.policies;
    for (owner, quota) in &policies.quotas {
        let key = format!("quota.owners.{owner}");
        if *quota == Quota::default() {
            let what = format!("The quota of {owner} says nothing: no gpus, no gpu_hours, weight 1.");
            finder.add(Notice, "quota_says_nothing", &key, what, "Remove it, or set gpus, gpu_hours or weight.");
        }
        for (limit, name) in
            [(quota.held.is_some_and(|held| held.is_zero()), "gpus"), (quota.share_hours == Some(0), "gpu_hours")]
        {
            if limit {
                let what = format!("{owner} may have no GPU at all ({name} is 0).");
                finder.add(Notice, "quota_zero", &format!("{key}.{name}"), what, "Where that is meant, all is well.");
            }
        }
        if quota.weight != 1 && policies.queue == QueueOrder::Fifo {
            let what = format!("The weight of {owner} does nothing while the queue is first come, first served.");
            finder.add(Notice, "weight_unused", &format!("{key}.weight"), what, "Set queue.order to \"fair-share\".");
        }
    }
}
