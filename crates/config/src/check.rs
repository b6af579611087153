//! `config check`: everything that is wrong or probably not meant, where it was written, and what to do.
//!
//! The rules are pure. Files, directories and the port come as [`MachineFacts`]; without them only what was written is judged.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use gpupool_core::{OwnerQuota, PolicyMatch, QueueOrder};
use serde::Serialize;
use serde_json::{Value as Json, json};

use ConfigSeverity::{Error, Notice, Warning};

use crate::load::{ConfigInputs, LoadedConfig, ResolvedSetting, load_config};
use crate::machine::{CONFIG_VARIABLE, FileFact, MachineFacts, PortFact};
use crate::problem::{ConfigProblem, ConfigProblems, SettingOrigin, nearest};
use crate::settings::{Setting, all_settings};
use crate::value::{shortened, split_port};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfigSeverity {
    /// The agent will not start, or the setting cannot work.
    Error,
    /// It works, but probably not as it was meant.
    Warning,
    /// Good to know.
    Notice,
}

/// One thing that is wrong or probably not meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfigFinding {
    pub severity: ConfigSeverity,
    /// A short name that never changes.
    pub code: &'static str,
    pub what: String,
    /// The place it was written.
    pub place: String,
    pub remedy: String,
}

/// All findings about what `inputs` make, the worst first. Facts are judged only where the configuration can be loaded.
pub fn check_config(inputs: &ConfigInputs, look: impl FnOnce(&LoadedConfig) -> MachineFacts) -> Vec<ConfigFinding> {
    let mut found = findings_about_variables(&inputs.env);
    match load_config(inputs) {
        Err(ConfigProblems(problems)) => found.extend(problems.iter().map(ConfigFinding::from)),
        Ok(loaded) => {
            found.extend(loaded.warnings.iter().map(|warning| ConfigFinding {
                severity: Warning,
                what: warning.to_string(),
                ..ConfigFinding::from(&warning.problem)
            }));
            let mut finder = Finder { loaded: &loaded, found };
            finder.listening();
            finder.asking();
            finder.refresh();
            finder.visible_devices();
            finder.without_effect();
            finder.order_of_policies();
            finder.empty_lists();
            finder.quotas();
            let facts = look(&loaded);
            finder.port(&facts.port);
            finder.files(&facts);
            finder.state_directory(&facts);
            found = finder.found;
        }
    }
    found.sort_by_key(|finding| finding.severity);
    found
}

/// A paragraph for each finding; a sentence where there is none.
pub fn findings_as_text(findings: &[ConfigFinding]) -> String {
    if findings.is_empty() {
        return "Nothing wrong was found.\n".to_owned();
    }
    let mut text = String::new();
    for ConfigFinding { severity, code, what, place, remedy } in findings {
        // Writing to a text cannot fail.
        let _ = writeln!(text, "{}: {what} [{code}]\n  where: {place}\n  to do: {remedy}", severity.name());
    }
    text
}

/// `{findings: [{severity, code, what, place, remedy}]}`.
pub fn findings_as_json(findings: &[ConfigFinding]) -> Json {
    json!({ "findings": findings })
}

impl ConfigSeverity {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

impl From<&ConfigProblem> for ConfigFinding {
    fn from(problem: &ConfigProblem) -> Self {
        let ConfigProblem { code, place, remedy, .. } = problem.clone();
        Self { severity: Error, code, what: problem.to_string(), place, remedy }
    }
}

/// Makes findings about the values of one configuration.
struct Finder<'l> {
    loaded: &'l LoadedConfig,
    found: Vec<ConfigFinding>,
}

impl Finder<'_> {
    /// Notes a finding about the value of `key`.
    fn add(
        &mut self,
        severity: ConfigSeverity,
        code: &'static str,
        key: &str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let place = format!("{key} ({})", self.loaded.origin_of(key));
        self.found.push(ConfigFinding { severity, code, what: what.into(), place, remedy: remedy.into() });
    }
}

// Who can reach the agent, and which servers a client asks.

impl Finder<'_> {
    fn listening(&mut self) {
        let server = &self.loaded.config.server;
        let host = &server.host;
        let (on_network, tls) = (!is_loopback(host), server.tls_cert.is_some());
        if host.parse::<IpAddr>().is_err()
            && host != "localhost"
            && matches!(self.loaded.origin_of("server.host"), SettingOrigin::Environment { .. })
        {
            let what =
                format!("HOST is {host:?}, a name. Some shells and conda set HOST to something that is no address.");
            self.add(Notice, "host_is_a_name", "server.host", what, "Pass --host 127.0.0.1 or another address.");
        }
        if on_network && !tls && !server.allow_plain_http && !server.open {
            let what = format!(
                "The agent answers the network on {host} without TLS: anyone may read statistics, and tokens are refused, \
                 so only users of this machine can take GPUs."
            );
            let remedy = "Set server.tls_cert and server.tls_key; on a trusted network --allow-plain-http or --open.";
            self.add(Warning, "network_without_tls", "server.host", what, remedy);
        }
        if on_network && !tls && server.allow_plain_http && !server.open {
            let what = "Tokens travel over the network without TLS; whoever listens in can use them.";
            let remedy = "Set server.tls_cert and server.tls_key, and remove allow_plain_http.";
            self.add(Warning, "plain_http_tokens", "server.allow_plain_http", what, remedy);
        }
        if server.open && tls {
            let what = "Anyone may take GPUs without a token (open), so TLS keeps readings private but nobody out.";
            self.add(Warning, "open_with_tls", "server.open", what, "Remove open, and give clients tokens.");
        }
        if server.open && !on_network {
            let what = format!("open lets the network in, but the agent listens on {host} only.");
            self.add(Notice, "open_on_loopback", "server.open", what, "Remove open, or set server.host.");
        }
    }

    fn asking(&mut self) {
        let loaded = self.loaded;
        let client = &loaded.config.client;
        let servers = loaded.client_endpoints();
        let plain = |url: &&String| url.strip_prefix("http://").is_some_and(|rest| !is_loopback(host_of(rest)));
        if let (Some(_), Some(url)) = (&client.token, servers.urls.iter().find(plain)) {
            let what = format!("The token would travel to {url} without TLS.");
            let remedy = "Use https://; servers refuse tokens over plain HTTP unless they were told to accept them.";
            self.add(Warning, "token_without_tls", "client.token", what, remedy);
        }
        if client.endpoint.is_some() && !client.endpoints.is_empty() {
            let what =
                format!("Both client.endpoint and client.endpoints are set; asked is {}.", servers.urls.join(", "));
            self.add(Notice, "endpoint_twice", "client.endpoint", what, "Keep one of them.");
        }
        for (key, threshold) in [
            ("client.memory_threshold_percent", client.memory_threshold_percent),
            ("client.utilization_threshold_percent", client.utilization_threshold_percent),
        ] {
            if threshold.0 == 0 {
                let what = "Available means strictly below the threshold, and nothing is below 0 %: no GPU would be available.";
                self.add(Warning, "threshold_zero", key, what, "Set it above 0; 80 and 90 are usual.");
            }
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The host of what follows the scheme in a tidied URL.
fn host_of(rest: &str) -> &str {
    rest.split('/').next().and_then(split_port).map_or(rest, |(host, _)| host)
}

// How GPUs are read, and settings that do nothing.

/// Reading more often than this costs more than it tells.
const OFTEN: Duration = Duration::from_millis(200);
/// Reading more seldom than this hides what happens.
const SELDOM: Duration = Duration::from_secs(60);

impl Finder<'_> {
    fn refresh(&mut self) {
        let interval = self.loaded.config.monitoring.refresh_interval;
        let secs = interval.as_secs_f64();
        let remedy = "One second suits most machines; 0.2 to 60 is sensible.";
        if interval < OFTEN {
            let what =
                format!("GPUs are read every {secs} s; drivers take a good part of that, and the CPU with them.");
            self.add(Warning, "refresh_often", "monitoring.refresh_interval", what, remedy);
        }
        if interval > SELDOM {
            let what = format!("GPUs are read every {secs} s; thresholds are judged by readings that old.");
            self.add(Warning, "refresh_seldom", "monitoring.refresh_interval", what, remedy);
        }
    }

    fn visible_devices(&mut self) {
        let key = "monitoring.cuda_visible_devices";
        let Some(devices) = &self.loaded.config.monitoring.cuda_visible_devices else { return };
        let tokens = || devices.split([',', ' ', '\t']).filter(|token| !token.is_empty());
        if tokens().next().is_none() {
            let what = "CUDA_VISIBLE_DEVICES is empty: the agent shows no GPU at all.";
            self.add(Notice, "no_visible_devices", key, what, "Unset it for all GPUs.");
            return;
        }
        let bad: Vec<_> = tokens().filter(|token| !can_name_a_device(token)).collect();
        if bad.is_empty() {
            return;
        }
        let all_bad = bad.len() == tokens().count();
        let effect = if all_bad { "no other names a GPU, so all of them are shown" } else { "they are skipped" };
        let what = format!("{} cannot name a GPU; {effect}.", shortened(&bad.join(", ")));
        let remedy = "Write indices (0,1) or UUIDs (GPU-5f3c…); `gpupool devices` lists them.";
        self.add(Warning, "bad_visible_devices", key, what, remedy);
    }

    fn without_effect(&mut self) {
        for key in ["server.reload", "server.workers"] {
            if self.loaded.is_set(key) {
                let what = format!("{key} is accepted and reported, and does nothing.");
                self.add(Notice, "no_effect", key, what, "Remove it.");
            }
        }
        let monitoring = &self.loaded.config.monitoring;
        if monitoring.simulate.is_some() && self.loaded.is_set("monitoring.backend") {
            let what = "Devices are simulated, so the backend is not used.";
            let remedy = "Keep one of monitoring.simulate and monitoring.backend.";
            self.add(Notice, "backend_unused", "monitoring.backend", what, remedy);
        }
    }
}

/// An index, or the beginning of a UUID in the form of either vendor.
fn can_name_a_device(token: &str) -> bool {
    if token.bytes().all(|c| c.is_ascii_digit()) {
        return token.parse::<u32>().is_ok();
    }
    let rest = ["GPU-", "MIG-"].into_iter().find_map(|start| {
        token.get(..start.len()).filter(|begin| begin.eq_ignore_ascii_case(start)).map(|_| &token[start.len()..])
    });
    let name = rest.unwrap_or(token);
    // An older name of a MIG instance is that of its GPU with two numbers: MIG-GPU-…/1/0.
    let name = name.strip_prefix("GPU-").unwrap_or(name);
    !name.is_empty()
        && name.chars().all(|c| c.is_ascii_hexdigit() || "-/".contains(c))
        && (rest.is_some() || name.contains('-') || name.len() >= 4)
}

// Policies and quotas that are allowed but cannot do what was meant.

impl Finder<'_> {
    fn order_of_policies(&mut self) {
        let policies = &self.loaded.config.policies.policies;
        let mut names = HashSet::new();
        for (index, policy) in policies.iter().enumerate() {
            let key = format!("policy[{index}].name");
            let name = &policy.name;
            if !names.insert(name) {
                let what = format!(
                    "Two policies are called {name:?}; refusals name the policy and would not tell them apart."
                );
                self.add(Warning, "policy_name_twice", &key, what, "Give each its own name.");
            }
            let earlier = policies[..index].iter().find(|earlier| covers(&earlier.applies_to, &policy.applies_to));
            if let Some(earlier) = earlier {
                let earlier = &earlier.name;
                let what =
                    format!("{name:?} is never reached: {earlier:?} stands before it and takes all its requests.");
                self.add(Warning, "policy_unreachable", &key, what, "Put the narrower policy first.");
            }
        }
    }

    /// A list that is there and empty covers everything, which is seldom meant.
    fn empty_lists(&mut self) {
        let empty = |resolved: &&ResolvedSetting| resolved.value.as_array().is_some_and(Vec::is_empty);
        for resolved in self.loaded.resolved.iter().filter(|resolved| resolved.key.starts_with("policy[")).filter(empty)
        {
            let what = format!("{} is an empty list, which means any.", resolved.key);
            self.add(Warning, "policy_empty_list", &resolved.key, what, "Remove it, or name somebody.");
        }
    }

    fn quotas(&mut self) {
        let policies = &self.loaded.config.policies;
        for (owner, quota) in &policies.quotas {
            let key = format!("quota.owners.{owner}");
            if *quota == OwnerQuota::default() {
                let what = format!("The quota of {owner} says nothing: no gpus, no gpu_hours, weight 1.");
                self.add(Notice, "quota_says_nothing", &key, what, "Remove it, or set gpus, gpu_hours or weight.");
            }
            for (limit, name) in
                [(quota.held.is_some_and(|held| held.is_zero()), "gpus"), (quota.share_hours == Some(0), "gpu_hours")]
            {
                if limit {
                    let what = format!("{owner} may have no GPU at all ({name} is 0).");
                    self.add(Notice, "quota_zero", &format!("{key}.{name}"), what, "Where that is meant, all is well.");
                }
            }
            if quota.weight != 1 && policies.queue == QueueOrder::Fifo {
                let what = format!("The weight of {owner} does nothing while the queue is first come, first served.");
                self.add(Notice, "weight_unused", &format!("{key}.weight"), what, "Set queue.order to \"fair-share\".");
            }
        }
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

// The files, the directory and the port that a configuration names.

impl Finder<'_> {
    fn port(&mut self, fact: &PortFact) {
        let server = &self.loaded.config.server;
        let (host, port) = (&server.host, server.port);
        match fact {
            PortFact::Unknown | PortFact::Free => {}
            PortFact::InUse { by } => {
                let by = by.as_deref().unwrap_or("a process of another user");
                let what = format!("Port {port} of {host} is in use by {by}.");
                let remedy =
                    "Where that is the agent itself, all is well; else stop it or choose another port (0 for any).";
                self.add(Warning, "port_in_use", "server.port", what, remedy);
            }
            PortFact::Refused(why) => {
                let what = format!("Nobody could listen on {host} port {port}: {why}.");
                let remedy =
                    "Choose an address of this machine, and a port from 1024 on unless the agent runs as root.";
                self.add(Error, "cannot_listen", "server.host", what, remedy);
            }
        }
    }

    fn files(&mut self, facts: &MachineFacts) {
        let named = [
            ("server.tls_cert", &facts.tls_cert),
            ("server.tls_key", &facts.tls_key),
            ("client.ca_file", &facts.ca_file),
        ];
        for (key, fact) in named {
            if let FileFact::Unreadable { path, why } = fact {
                let what = format!("{} cannot be read: {why}.", path.display());
                self.add(Error, "file_unreadable", key, what, "Name a file that exists and that this user may read.");
            }
        }
        if let FileFact::Readable { path, others_can_read: true } = &facts.tls_key {
            let what = format!("Every user can read the private key {}.", path.display());
            self.add(Warning, "key_readable", "server.tls_key", what, format!("chmod 600 {}", path.display()));
        }
        let token_in_file = matches!(self.loaded.origin_of("client.token"), SettingOrigin::File { .. });
        if let (FileFact::Readable { path, others_can_read: true }, true) = (&facts.config_file, token_in_file) {
            let what = format!("Every user can read {}, which holds a token.", path.display());
            self.add(Warning, "token_readable", "client.token", what, format!("chmod 600 {}", path.display()));
        }
    }

    fn state_directory(&mut self, facts: &MachineFacts) {
        let path = self.loaded.config.server.state_dir.display().to_string();
        if let Some(why) = &facts.state_dir.not_writable {
            let what = format!("The agent could not write its state to {path}: {why}.");
            let remedy = "Run the agent as a user who may, or set server.state_dir to a directory of this user's.";
            self.add(Error, "state_dir_not_writable", "server.state_dir", what, remedy);
        }
        if let Some(kind) = facts.state_dir.network {
            let what =
                format!("{path} is on a network file system ({kind}), where locks and durable writes are not certain.");
            self.add(Warning, "state_dir_on_network", "server.state_dir", what, "Choose a directory on a local disk.");
        }
    }
}

// Variables that are probably misspelled, or that say two things.

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

fn findings_about_variables(env: &BTreeMap<String, String>) -> Vec<ConfigFinding> {
    let mut findings: Vec<_> = env.iter().filter_map(|(name, value)| misspelled(name, value)).collect();
    findings.extend(all_settings().iter().filter_map(|setting| said_twice(setting.env, env)));
    findings
}

fn misspelled(name: &str, value: &str) -> Option<ConfigFinding> {
    // Kubernetes gives every pod addresses of this form for a service called gpupool.
    if known().any(|each| each == name) || value.starts_with("tcp://") {
        return None;
    }
    let meant = meant_by(name)?;
    Some(ConfigFinding {
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
        let same_key = |setting: &&Setting| setting.name().eq_ignore_ascii_case(bare) || setting.env.contains(&bare);
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
    let near = nearest(rest, known().filter(same_prefix).map(|each| &each[prefix.len()..]))?;
    known().filter(same_prefix).find(|each| each[prefix.len()..] == *near)
}

fn said_twice(names: &[&'static str], env: &BTreeMap<String, String>) -> Option<ConfigFinding> {
    let mut set =
        names.iter().filter_map(|name| Some((*name, env.get(*name)?.trim()))).filter(|(_, value)| !value.is_empty());
    let ((first, one), (second, other)) = (set.next()?, set.next()?);
    (one != other).then(|| ConfigFinding {
        severity: Warning,
        code: "variable_twice",
        what: format!("{first} and {second} mean the same and differ; {first} counts."),
        place: format!("environment {second}"),
        remedy: format!("Unset {second}."),
    })
}
