//! Findings about variables that are probably misspelled, or that say two things.

use std::collections::BTreeMap;

use super::Finding;
use super::Severity::Warning;
use crate::here::CONFIG_VARIABLE;
use crate::setting::Setting;
use crate::settings::all_settings;
use crate::suggest;

/// Variables with our prefix that are read elsewhere, or set for jobs.
const READ_ELSEWHERE: &[&str] = &[
    CONFIG_VARIABLE,
    "GPUPOOL_SYS",
    "GPUPOOL_PROC",
    "GPUPOOL_DEV",
    "GPUPOOL_ETC",
    "GPUPOOL_NVML",
    "GPUPOOL_NVIDIA_SMI",
    "GPUPOOL_AMD_SMI",
    "GPUPOOL_ROCM_SMI",
];
/// What most variables of ours begin with.
const PREFIXES: [&str; 2] = ["GPUPOOL_", "GPU_"];
/// A variable of another program may by chance be near to a short name of ours.
const LONG_ENOUGH: usize = 8;

pub(super) fn findings(env: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut findings: Vec<_> = env.iter().filter_map(|(name, value)| misspelled(name, value)).collect();
    findings.extend(all_settings().iter().filter_map(|setting| said_twice(setting.env, env)));
    findings
}

fn misspelled(name: &str, value: &str) -> Option<Finding> {
    // Kubernetes gives every pod addresses of this form for a service called gpupool.
    if known().any(|each| each == name) || value.starts_with("tcp://") {
        return None;
    }
    let meant = meant_by(name)?;
    Some(Finding {
        severity: Warning,
        code: "variable_misspelled",
        what: format!("{name} is set, but nobody reads it; {meant} is read."),
        place: format!("environment {name}"),
        remedy: format!("Rename it to {meant}, or unset it."),
    })
}

fn known() -> impl Iterator<Item = &'static str> {
    all_settings().iter().flat_map(|setting| setting.env).chain(READ_ELSEWHERE).copied()
}

/// The variable of ours that `name` is near to, judged by what follows the prefix: that alone is somebody's choice.
fn meant_by(name: &str) -> Option<&'static str> {
    let squeezed = |name: &str| name.replace('_', "");
    if let Some(same) = known().find(|each| squeezed(each) == squeezed(name)) {
        return Some(same);
    }
    if let Some(bare) = name.strip_prefix("GPUPOOL_") {
        let same_key = |setting: &&&Setting| setting.name().eq_ignore_ascii_case(bare) || setting.env.contains(&bare);
        if let Some(setting) = all_settings().iter().find(same_key) {
            return setting.env.first().copied();
        }
    }
    let prefix = PREFIXES.into_iter().find(|prefix| name.starts_with(prefix)).unwrap_or_default();
    let rest = &name[prefix.len()..];
    if prefix.is_empty() && rest.len() < LONG_ENOUGH {
        return None;
    }
    let same_prefix = |each: &&str| match prefix {
        "" => each.len() >= LONG_ENOUGH && !PREFIXES.iter().any(|prefix| each.starts_with(prefix)),
        prefix => each.starts_with(prefix),
    };
    let near = suggest::nearest(rest, known().filter(same_prefix).map(|each| &each[prefix.len()..]))?;
    known().filter(same_prefix).find(|each| each[prefix.len()..] == *near)
}

fn said_twice(names: &[&'static str], env: &BTreeMap<String, String>) -> Option<Finding> {
    let mut set =
        names.iter().filter_map(|name| Some((*name, env.get(*name)?.trim()))).filter(|(_, value)| !value.is_empty());
    let ((first, one), (second, other)) = (set.next()?, set.next()?);
    (one != other).then(|| Finding {
        severity: Warning,
        code: "variable_twice",
        what: format!("{first} and {second} mean the same and differ; {first} counts."),
        place: format!("environment {second}"),
        remedy: format!("Unset {second}."),
    })
}
