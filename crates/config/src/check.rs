//! `config check`: errors and likely mistakes in a configuration, with place and remedy.
//!
//! The rules are pure. Facts about files, directories and the port are passed in as [`MachineFacts`].

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

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfigSeverity {
    /// The agent does not start, or the setting cannot work.
    Error,
    /// The setting works, but probably not as intended.
    Warning,
    /// Information.
    Notice,
}

/// Error or likely mistake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfigFinding {
    pub severity: ConfigSeverity,
    /// Stable code.
    pub code: &'static str,
    pub what: String,
    /// Setting and its origin.
    pub place: String,
    pub remedy: String,
}

/// Returns all findings about `inputs`, worst first. Machine facts are gathered only if the configuration can be
/// loaded.
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
            let mut collector = FindingCollector { loaded: &loaded, found };
            collector.check_listening();
            collector.check_client();
            collector.check_refresh_interval();
            collector.check_visible_devices();
            collector.check_unused_settings();
            collector.check_policy_order();
            collector.check_empty_lists();
            collector.check_quotas();
            let facts = look(&loaded);
            collector.check_port(&facts.port);
            collector.check_files(&facts);
            collector.check_state_directory(&facts);
            found = collector.found;
        }
    }
    found.sort_by_key(|finding| finding.severity);
    found
}

/// Formats one paragraph per finding, or a sentence if there are none.
pub fn findings_as_text(findings: &[ConfigFinding]) -> String {
    if findings.is_empty() {
        return "No problems found.\n".to_owned();
    }
    let mut text = String::new();
    for ConfigFinding { severity, code, what, place, remedy } in findings {
        // Writing to a text cannot fail.
        let _ = writeln!(text, "{}: {what} [{code}]\n  where: {place}\n  to do: {remedy}", severity.name());
    }
    text
}

/// Formats the findings as `{findings: [{severity, code, what, place, remedy}]}`.
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

/// Collects findings about one configuration.
struct FindingCollector<'l> {
    loaded: &'l LoadedConfig,
    found: Vec<ConfigFinding>,
}

impl FindingCollector<'_> {
    /// Adds a finding about the value of `key`.
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

// Access to the agent, and endpoints of clients.

impl FindingCollector<'_> {
    fn check_listening(&mut self) {
        let server = &self.loaded.config.server;
        let host = &server.host;
        let (on_network, tls) = (!is_loopback(host), server.tls_cert.is_some());
        if host.parse::<IpAddr>().is_err()
            && host != "localhost"
            && matches!(self.loaded.origin_of("server.host"), SettingOrigin::Environment { .. })
        {
            let what = format!(
                "HOST is the name {host:?}. Some shells and conda set HOST to something that is not an address."
            );
            self.add(Notice, "host_is_a_name", "server.host", what, "Pass --host 127.0.0.1 or another address.");
        }
        if on_network && !tls && !server.allow_plain_http && !server.open {
            let what = format!(
                "The agent serves the network on {host} without TLS. Any client can read statistics; tokens are refused, so only \
                 users of this machine can lease GPUs."
            );
            let remedy = "Set server.tls_cert and server.tls_key. On a trusted network you can use --allow-plain-http or --open instead.";
            self.add(Warning, "network_without_tls", "server.host", what, remedy);
        }
        if on_network && !tls && server.allow_plain_http && !server.open {
            let what = "Tokens are sent over the network without TLS, where others can read and use them.";
            let remedy = "Set server.tls_cert and server.tls_key, and remove allow_plain_http.";
            self.add(Warning, "plain_http_tokens", "server.allow_plain_http", what, remedy);
        }
        if server.open && tls {
            let what = "open lets every client lease GPUs without a token, so TLS encrypts the traffic but restricts no access.";
            self.add(Warning, "open_with_tls", "server.open", what, "Remove open and give clients tokens.");
        }
        if server.open && !on_network {
            let what = format!("open has no effect: the agent listens on {host} only.");
            self.add(Notice, "open_on_loopback", "server.open", what, "Remove open, or set server.host.");
        }
    }

    fn check_client(&mut self) {
        let loaded = self.loaded;
        let client = &loaded.config.client;
        let servers = loaded.client_endpoints();
        let plain = |url: &&String| url.strip_prefix("http://").is_some_and(|rest| !is_loopback(host_of(rest)));
        if let (Some(_), Some(url)) = (&client.token, servers.urls.iter().find(plain)) {
            let what = format!("The token would be sent to {url} without TLS.");
            let remedy = "Use https://. Agents refuse tokens over plain HTTP unless they run with --allow-plain-http.";
            self.add(Warning, "token_without_tls", "client.token", what, remedy);
        }
        if client.endpoint.is_some() && !client.endpoints.is_empty() {
            let what =
                format!("Both client.endpoint and client.endpoints are set; {} is used.", servers.urls.join(", "));
            self.add(Notice, "endpoint_twice", "client.endpoint", what, "Keep one of them.");
        }
        for (key, threshold) in [
            ("client.memory_threshold_percent", client.memory_threshold_percent),
            ("client.utilization_threshold_percent", client.utilization_threshold_percent),
        ] {
            if threshold.0 == 0 {
                let what =
                    "A GPU is available only below the threshold, so with a threshold of 0 % no GPU is ever available.";
                self.add(Warning, "threshold_zero", key, what, "Set it above 0; 80 and 90 are usual.");
            }
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns the host of a tidied URL without its scheme.
fn host_of(rest: &str) -> &str {
    rest.split('/').next().and_then(split_port).map_or(rest, |(host, _)| host)
}

// Reading of GPUs, and settings without effect.

/// Shorter intervals cost more than their readings are worth.
const MIN_SENSIBLE_INTERVAL: Duration = Duration::from_millis(200);
/// Longer intervals hide short changes.
const MAX_SENSIBLE_INTERVAL: Duration = Duration::from_secs(60);

impl FindingCollector<'_> {
    fn check_refresh_interval(&mut self) {
        let interval = self.loaded.config.monitoring.refresh_interval;
        let secs = interval.as_secs_f64();
        let remedy = "Set it to 0.2 to 60 seconds; one second suits most machines.";
        if interval < MIN_SENSIBLE_INTERVAL {
            let what = format!("GPUs are read every {secs} s, which keeps the driver and a CPU busy.");
            self.add(Warning, "refresh_often", "monitoring.refresh_interval", what, remedy);
        }
        if interval > MAX_SENSIBLE_INTERVAL {
            let what = format!("GPUs are read every {secs} s, so thresholds are compared with readings of that age.");
            self.add(Warning, "refresh_seldom", "monitoring.refresh_interval", what, remedy);
        }
    }

    fn check_visible_devices(&mut self) {
        let key = "monitoring.cuda_visible_devices";
        let Some(devices) = &self.loaded.config.monitoring.cuda_visible_devices else { return };
        let tokens = || devices.split([',', ' ', '\t']).filter(|token| !token.is_empty());
        if tokens().next().is_none() {
            let what = "CUDA_VISIBLE_DEVICES is empty, so the agent manages no GPU.";
            self.add(Notice, "no_visible_devices", key, what, "Unset it to manage all GPUs.");
            return;
        }
        let bad: Vec<_> = tokens().filter(|token| !can_name_a_device(token)).collect();
        if bad.is_empty() {
            return;
        }
        let all_bad = bad.len() == tokens().count();
        let effect = if all_bad { "none of the names is a GPU, so all GPUs are used" } else { "they are ignored" };
        let what = format!("{} cannot name a GPU; {effect}.", shortened(&bad.join(", ")));
        let remedy = "Use indices (0,1) or UUIDs (GPU-5f3c…); `gpupool devices` lists them.";
        self.add(Warning, "bad_visible_devices", key, what, remedy);
    }

    fn check_unused_settings(&mut self) {
        for key in ["server.reload", "server.workers"] {
            if self.loaded.is_set(key) {
                let what = format!("{key} is accepted for compatibility and has no effect.");
                self.add(Notice, "no_effect", key, what, "Remove it.");
            }
        }
        let monitoring = &self.loaded.config.monitoring;
        if monitoring.simulate.is_some() && self.loaded.is_set("monitoring.backend") {
            let what = "GPUs are simulated, so the backend is not used.";
            let remedy = "Keep one of monitoring.simulate and monitoring.backend.";
            self.add(Notice, "backend_unused", "monitoring.backend", what, remedy);
        }
    }
}

/// Returns whether the token is an index or the beginning of a UUID of either vendor.
fn can_name_a_device(token: &str) -> bool {
    if token.bytes().all(|c| c.is_ascii_digit()) {
        return token.parse::<u32>().is_ok();
    }
    let rest = ["GPU-", "MIG-"].into_iter().find_map(|start| {
        token.get(..start.len()).filter(|begin| begin.eq_ignore_ascii_case(start)).map(|_| &token[start.len()..])
    });
    let name = rest.unwrap_or(token);
    // An older form of a MIG name is the name of its GPU with two numbers: MIG-GPU-…/1/0.
    let name = name.strip_prefix("GPU-").unwrap_or(name);
    !name.is_empty()
        && name.chars().all(|c| c.is_ascii_hexdigit() || "-/".contains(c))
        && (rest.is_some() || name.contains('-') || name.len() >= 4)
}

// Policies and quotas that cannot have the intended effect.

impl FindingCollector<'_> {
    fn check_policy_order(&mut self) {
        let policies = &self.loaded.config.policies.policies;
        let mut names = HashSet::new();
        for (index, policy) in policies.iter().enumerate() {
            let key = format!("policy[{index}].name");
            let name = &policy.name;
            if !names.insert(name) {
                let what =
                    format!("Two policies are named {name:?}, so a refusal does not show which policy caused it.");
                self.add(Warning, "policy_name_twice", &key, what, "Give each policy its own name.");
            }
            let earlier = policies[..index].iter().find(|earlier| covers_all(&earlier.applies_to, &policy.applies_to));
            if let Some(earlier) = earlier {
                let earlier = &earlier.name;
                let what =
                    format!("Policy {name:?} is never used: {earlier:?} precedes it and matches all its requests.");
                self.add(Warning, "policy_unreachable", &key, what, "Put the narrower policy first.");
            }
        }
    }

    /// Warns about empty lists: an empty list matches everything, which is seldom intended.
    fn check_empty_lists(&mut self) {
        let empty = |resolved: &&ResolvedSetting| resolved.value.as_array().is_some_and(Vec::is_empty);
        for resolved in self.loaded.resolved.iter().filter(|resolved| resolved.key.starts_with("policy[")).filter(empty)
        {
            let what = format!("{} is an empty list, which matches everything.", resolved.key);
            self.add(Warning, "policy_empty_list", &resolved.key, what, "Remove it, or add entries.");
        }
    }

    fn check_quotas(&mut self) {
        let policies = &self.loaded.config.policies;
        for (owner, quota) in &policies.quotas {
            let key = format!("quota.owners.{owner}");
            if *quota == OwnerQuota::default() {
                let what = format!("The quota of {owner} sets nothing: no gpus, no gpu_hours, weight 1.");
                self.add(Notice, "quota_says_nothing", &key, what, "Remove it, or set gpus, gpu_hours or weight.");
            }
            for (limit, name) in
                [(quota.held.is_some_and(|held| held.is_zero()), "gpus"), (quota.share_hours == Some(0), "gpu_hours")]
            {
                if limit {
                    let what = format!("{owner} cannot lease any GPU ({name} is 0).");
                    self.add(Notice, "quota_zero", &format!("{key}.{name}"), what, "Nothing, if this is intended.");
                }
            }
            if quota.weight != 1 && policies.queue == QueueOrder::Fifo {
                let what = format!("The weight of {owner} has no effect while queue.order is \"fifo\".");
                self.add(Notice, "weight_unused", &format!("{key}.weight"), what, "Set queue.order to \"fair-share\".");
            }
        }
    }
}

/// Returns whether `outer` matches every request that `inner` matches.
fn covers_all(outer: &PolicyMatch, inner: &PolicyMatch) -> bool {
    fn within<T: PartialEq>(outer: &[T], inner: &[T]) -> bool {
        outer.is_empty() || (!inner.is_empty() && inner.iter().all(|each| outer.contains(each)))
    }
    within(&outer.owners, &inner.owners)
        && within(&outer.sizes, &inner.sizes)
        && outer.labels.iter().all(|(key, value)| inner.labels.get(key) == Some(value))
}

// Files, directory and port of a configuration.

impl FindingCollector<'_> {
    fn check_port(&mut self, fact: &PortFact) {
        let server = &self.loaded.config.server;
        let (host, port) = (&server.host, server.port);
        match fact {
            PortFact::Unknown | PortFact::Free => {}
            PortFact::InUse { by } => {
                let by = by.as_deref().unwrap_or("a process of another user");
                let what = format!("Port {port} of {host} is in use by {by}.");
                let remedy = "If it is not the agent itself, stop it or choose another port (0 for any).";
                self.add(Warning, "port_in_use", "server.port", what, remedy);
            }
            PortFact::Refused(why) => {
                let what = format!("Cannot listen on {host} port {port}: {why}.");
                let remedy = "Choose an address of this machine, and a port above 1023 unless the agent runs as root.";
                self.add(Error, "cannot_listen", "server.host", what, remedy);
            }
        }
    }

    fn check_files(&mut self, facts: &MachineFacts) {
        let named = [
            ("server.tls_cert", &facts.tls_cert),
            ("server.tls_key", &facts.tls_key),
            ("client.ca_file", &facts.ca_file),
        ];
        for (key, fact) in named {
            if let FileFact::Unreadable { path, why } = fact {
                let what = format!("Cannot read {}: {why}.", path.display());
                self.add(Error, "file_unreadable", key, what, "Name an existing file that this user can read.");
            }
        }
        if let FileFact::Readable { path, others_can_read: true } = &facts.tls_key {
            let what = format!("Every user can read the private key {}.", path.display());
            self.add(Warning, "key_readable", "server.tls_key", what, format!("chmod 600 {}", path.display()));
        }
        let token_in_file = matches!(self.loaded.origin_of("client.token"), SettingOrigin::File { .. });
        if let (FileFact::Readable { path, others_can_read: true }, true) = (&facts.config_file, token_in_file) {
            let what = format!("Every user can read {}, which contains a token.", path.display());
            self.add(Warning, "token_readable", "client.token", what, format!("chmod 600 {}", path.display()));
        }
    }

    fn check_state_directory(&mut self, facts: &MachineFacts) {
        let path = self.loaded.config.server.state_dir.display().to_string();
        if let Some(why) = &facts.state_dir.not_writable {
            let what = format!("The agent cannot write its state to {path}: {why}.");
            let remedy =
                "Run the agent as a user with write permission, or set server.state_dir to a directory of this user.";
            self.add(Error, "state_dir_not_writable", "server.state_dir", what, remedy);
        }
        if let Some(kind) = facts.state_dir.network {
            let what = format!(
                "{path} is on a network file system ({kind}), where locks and durable writes are not reliable."
            );
            self.add(Warning, "state_dir_on_network", "server.state_dir", what, "Choose a directory on a local disk.");
        }
    }
}

// Misspelled and conflicting variables.

/// Variables with our prefix that other modules read or that jobs receive.
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
    "GPUPOOL_CLAIMS",
];
/// Prefixes of most of our variables.
const PREFIXES: [&str; 2] = ["GPUPOOL_", "GPU_"];
/// Minimum length for suggestions: short names resemble variables of other programs by chance.
const MIN_SUGGESTED_LENGTH: usize = 8;

fn findings_about_variables(env: &BTreeMap<String, String>) -> Vec<ConfigFinding> {
    let mut findings: Vec<_> = env.iter().filter_map(|(name, value)| find_misspelling(name, value)).collect();
    findings.extend(all_settings().iter().filter_map(|setting| find_conflict(setting.env, env)));
    findings
}

fn find_misspelling(name: &str, value: &str) -> Option<ConfigFinding> {
    // Kubernetes sets variables of this form for a service named gpupool in every pod.
    if known_variables().any(|each| each == name) || value.starts_with("tcp://") {
        return None;
    }
    let suggestion = nearest_variable(name)?;
    Some(ConfigFinding {
        severity: Warning,
        code: "variable_misspelled",
        what: format!("{name} is set but not used; the variable is {suggestion}."),
        place: format!("environment {name}"),
        remedy: format!("Rename it to {suggestion}, or unset it."),
    })
}

fn known_variables() -> impl Iterator<Item = &'static str> {
    all_settings().iter().flat_map(|setting| setting.env).chain(READ_ELSEWHERE).copied()
}

/// Returns our variable that `name` resembles. Only the part after the prefix is compared.
fn nearest_variable(name: &str) -> Option<&'static str> {
    let squeezed = |name: &str| name.replace('_', "");
    if let Some(same) = known_variables().find(|each| squeezed(each) == squeezed(name)) {
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
    if prefix.is_empty() && rest.len() < MIN_SUGGESTED_LENGTH {
        return None;
    }
    let same_prefix = |each: &&str| match prefix {
        "" => each.len() >= MIN_SUGGESTED_LENGTH && !PREFIXES.iter().any(|prefix| each.starts_with(prefix)),
        prefix => each.starts_with(prefix),
    };
    let near = nearest(rest, known_variables().filter(same_prefix).map(|each| &each[prefix.len()..]))?;
    known_variables().filter(same_prefix).find(|each| each[prefix.len()..] == *near)
}

fn find_conflict(names: &[&'static str], env: &BTreeMap<String, String>) -> Option<ConfigFinding> {
    let mut set =
        names.iter().filter_map(|name| Some((*name, env.get(*name)?.trim()))).filter(|(_, value)| !value.is_empty());
    let ((first, one), (second, other)) = (set.next()?, set.next()?);
    (one != other).then(|| ConfigFinding {
        severity: Warning,
        code: "variable_twice",
        what: format!("{first} and {second} set the same value and differ; {first} is used."),
        place: format!("environment {second}"),
        remedy: format!("Unset {second}."),
    })
}
