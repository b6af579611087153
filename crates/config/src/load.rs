//! Resolves a configuration: flags > environment > file > default. Each value keeps its origin, and all mistakes are
//! reported at once. No I/O: [`crate::machine`] collects the inputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value as Json;
use toml::de::DeTable;

use crate::limits;
use crate::machine::{HostContext, SYSTEM_STATE_DIR, socket_path};
use crate::policies::QUOTA_KEYS;
use crate::problem::{ConfigProblem, ConfigProblems, ConfigWarning, SettingOrigin, suggest_key};
use crate::settings::{Config, SECTIONS, Setting, all_settings};
use crate::value::{RawValue, ValueKind, shortened, text_of};

/// Endpoint that is used if none is configured and this machine has no agent socket.
pub const DEFAULT_ENDPOINT: &str = "http://localhost:8000";

/// Values given on the command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FlagValues {
    given: Vec<(String, String)>,
}

impl FlagValues {
    /// Adds the value of a flag (`--port`) or key (`server.port`); `None` means not given.
    pub fn set(mut self, name: &str, value: Option<impl ToString>) -> Self {
        self.given.extend(value.map(|value| (name.to_owned(), value.to_string())));
        self
    }

    /// Adds a flag without a value, if given.
    pub fn set_switch(self, name: &str, given: bool) -> Self {
        self.set(name, given.then_some(true))
    }
}

/// User of a configuration. Settings that the program does not use cannot be wrong for it: a `PORT` set for another
/// program must not stop `gpupool status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ConfigConsumer {
    /// Uses every setting, as `config check`.
    #[default]
    All,
    /// Uses everything except `[client]`, as `serve`.
    Agent,
    /// Uses `[client]` and the state directory with the agent's socket, as every other command.
    Client,
}

impl ConfigConsumer {
    /// Returns whether the consumer uses a setting or rule.
    pub fn uses(self, key: &str) -> bool {
        let of_client = key == "client" || key.starts_with("client.");
        match self {
            Self::All => true,
            Self::Agent => !of_client,
            Self::Client => of_client || key == "server.state_dir",
        }
    }
}

/// Inputs of a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigInputs {
    /// Command line; takes precedence.
    pub flags: FlagValues,
    pub env: BTreeMap<String, String>,
    /// File and its text; lowest precedence.
    pub file: Option<(PathBuf, String)>,
    /// Machine that defaults depend on.
    pub machine: HostContext,
    pub consumer: ConfigConsumer,
    /// Turns bad client settings into warnings and uses the next source instead.
    pub lenient: bool,
}

impl ConfigInputs {
    /// Returns inputs without flags, environment and file.
    pub fn empty(machine: HostContext) -> Self {
        let (flags, env) = (FlagValues::default(), BTreeMap::new());
        Self { flags, env, file: None, machine, consumer: ConfigConsumer::All, lenient: false }
    }
}

/// Configuration with the origin of its values.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedConfig {
    /// Configuration in effect.
    pub config: Config,
    /// Values in effect with their origins, in the order of the sections.
    pub resolved: Vec<ResolvedSetting>,
    /// Ignored bad values.
    pub warnings: Vec<ConfigWarning>,
}

/// Value in effect, as shown to users, and its origin.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedSetting {
    /// Setting or rule, such as `server.port` or `policy[0].max_fraction`.
    pub key: String,
    /// Value; secrets are hidden.
    pub value: Json,
    pub origin: SettingOrigin,
}

/// Endpoints of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredEndpoints {
    /// Normalized URLs without duplicates; at least one.
    pub urls: Vec<String>,
    /// Origin; [`SettingOrigin::Default`] means that the Unix socket of this machine's agent comes first.
    pub origin: SettingOrigin,
}

/// Resolves the configuration, or returns everything that is wrong with it.
pub fn load_config(inputs: &ConfigInputs) -> Result<LoadedConfig, ConfigProblems> {
    let mut resolver = Resolver::new(inputs);
    let config = Config::resolve(&mut resolver);
    resolver.check_unknown_keys();
    resolver.check_contradictions(&config);
    if !resolver.problems.is_empty() {
        return Err(ConfigProblems(resolver.problems));
    }
    Ok(LoadedConfig { config, resolved: resolver.resolved, warnings: resolver.warnings })
}

impl LoadedConfig {
    /// Returns the origin of the value of `key`.
    pub fn origin_of(&self, key: &str) -> SettingOrigin {
        origin_in(&self.resolved, key)
    }

    /// Returns whether `key` was set.
    pub fn is_set(&self, key: &str) -> bool {
        self.origin_of(key) != SettingOrigin::Default
    }

    /// Returns the endpoints of a client: those of the source with the highest precedence, the list before the single
    /// one.
    pub fn client_endpoints(&self) -> ConfiguredEndpoints {
        let client = &self.config.client;
        let several =
            ConfiguredEndpoints { urls: client.endpoints.clone(), origin: self.origin_of("client.endpoints") };
        let one = ConfiguredEndpoints {
            urls: client.endpoint.iter().cloned().collect(),
            origin: self.origin_of("client.endpoint"),
        };
        let weakness = |servers: &ConfiguredEndpoints| match servers.origin {
            SettingOrigin::Flag { .. } => 0,
            SettingOrigin::Environment { .. } => 1,
            SettingOrigin::File { .. } => 2,
            SettingOrigin::Default => 3,
        };
        let named = [several, one].into_iter().filter(|servers| !servers.urls.is_empty());
        // The first of equal elements wins, so the list does.
        named.min_by_key(weakness).unwrap_or_else(|| ConfiguredEndpoints {
            urls: vec![DEFAULT_ENDPOINT.to_owned()],
            origin: SettingOrigin::Default,
        })
    }

    /// Returns the Unix sockets of agents of this machine: this user's, then the machine's. A configured state
    /// directory selects only its own agent.
    pub fn agent_sockets(&self) -> Vec<PathBuf> {
        let named = self.config.server.state_dir.as_path();
        let machines = Path::new(SYSTEM_STATE_DIR);
        let also = (named != machines && !self.is_set("server.state_dir")).then_some(machines);
        std::iter::once(named).chain(also).map(socket_path).collect()
    }
}

fn origin_in(resolved: &[ResolvedSetting], key: &str) -> SettingOrigin {
    resolved.iter().find(|resolved| resolved.key == key).map_or(SettingOrigin::Default, |found| found.origin.clone())
}

/// State while a configuration is resolved.
pub(crate) struct Resolver<'i> {
    inputs: &'i ConfigInputs,
    path: Arc<Path>,
    line_ends: Vec<usize>,
    /// Part of the file that no reader has taken yet.
    pub file: DeTable<'i>,
    /// Values given for each setting, by precedence.
    offers: BTreeMap<&'static str, Vec<(SettingOrigin, RawValue<'i>)>>,
    resolved: Vec<ResolvedSetting>,
    problems: Vec<ConfigProblem>,
    warnings: Vec<ConfigWarning>,
}

impl<'i> Resolver<'i> {
    fn new(inputs: &'i ConfigInputs) -> Self {
        let (path, text) = inputs.file.as_ref().map_or((Path::new(""), ""), |(path, text)| (path, text));
        let mut resolver = Self {
            inputs,
            path: Arc::from(path),
            line_ends: text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect(),
            file: DeTable::new(),
            offers: BTreeMap::new(),
            resolved: Vec::new(),
            problems: Vec::new(),
            warnings: Vec::new(),
        };
        resolver.parse(text);
        for setting in all_settings() {
            let offers = resolver.collect_offers(setting);
            resolver.offers.insert(setting.key, offers);
        }
        resolver
    }

    fn parse(&mut self, text: &'i str) {
        if text.len() > limits::FILE_BYTES {
            let message = format!("the file has {} bytes; the maximum is {}", text.len(), limits::FILE_BYTES);
            return self.add_problem(ConfigProblem::unreadable(&self.path, message));
        }
        let (table, mut errors) = DeTable::parse_recoverable(text);
        if errors.is_empty() {
            self.file = table.into_inner();
        }
        errors.truncate(limits::PROBLEMS);
        let begin = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
        errors.sort_by_key(|error| self.line_at(begin(error)));
        for error in errors {
            self.add_problem(ConfigProblem::syntax(&self.written_at(begin(&error)), error.message().trim()));
        }
    }

    fn collect_offers(&mut self, setting: &'static Setting) -> Vec<(SettingOrigin, RawValue<'i>)> {
        let inputs = self.inputs;
        let mut offers = Vec::new();
        for (name, text) in inputs.flags.given.iter().rev() {
            if name == setting.key || Some(&**name) == setting.flag {
                offers.push((SettingOrigin::Flag { name: name.clone() }, RawValue::String(text.into())));
            }
        }
        for &name in setting.env {
            if let Some(text) = inputs.env.get(name) {
                offers.push((SettingOrigin::Environment { name }, RawValue::String(text.into())));
            }
        }
        if let Some(RawValue::Table(section)) = self.file.get_mut(setting.section()).map(|section| section.get_mut())
            && let Some((key, value)) = section.remove_entry(setting.name())
        {
            offers.push((self.written_at(key.span().start), value.into_inner()));
        }
        offers
    }

    pub(crate) fn host_context(&self) -> &'i HostContext {
        &self.inputs.machine
    }

    /// Returns the value of a setting in effect.
    pub(crate) fn pick<T>(&mut self, key: &'static str, kind: &ValueKind<T>, default: T) -> T {
        let mut chosen = None;
        for (origin, raw) in self.offers.remove(key).unwrap_or_default() {
            let is_blank = text_of(&raw).is_some_and(str::is_empty);
            if matches!(origin, SettingOrigin::Environment { .. }) && is_blank && !kind.takes_empty {
                continue;
            }
            match (kind.read)(&raw) {
                Some(value) => {
                    chosen.get_or_insert((value, origin));
                }
                None => self.refuse(key, ConfigProblem::bad_value(key, origin, &raw, kind), chosen.is_some()),
            }
        }
        let (value, origin) = chosen.unwrap_or((default, SettingOrigin::Default));
        self.resolved.push(ResolvedSetting { key: key.to_owned(), value: (kind.show)(&value), origin });
        value
    }

    fn refuse(&mut self, key: &str, problem: ConfigProblem, overridden: bool) {
        let why_ignored = if overridden {
            "because a source with higher precedence sets it"
        } else if self.inputs.lenient && key.starts_with("client.") {
            "because warnings are enabled instead of errors"
        } else {
            return self.add_problem(problem);
        };
        if self.inputs.consumer.uses(key) && self.warnings.len() < limits::PROBLEMS {
            self.warnings.push(ConfigWarning { problem, why_ignored });
        }
    }

    /// Returns the value of a rule in the file, if it is allowed.
    pub(crate) fn read_rule<T>(
        &mut self,
        key: String,
        origin: SettingOrigin,
        raw: &RawValue<'_>,
        kind: &ValueKind<T>,
    ) -> Option<T> {
        let value = (kind.read)(raw);
        match &value {
            Some(value) => self.resolved.push(ResolvedSetting { key, value: (kind.show)(value), origin }),
            None => self.add_problem(ConfigProblem::bad_value(&shortened(&key), origin, raw, kind)),
        }
        value
    }

    /// Adds a problem unless the consumer does not use the key or there are too many problems.
    pub(crate) fn add_problem(&mut self, problem: ConfigProblem) {
        let concerns_reader = problem.key.as_ref().is_none_or(|key| self.inputs.consumer.uses(key));
        if concerns_reader && self.problems.len() < limits::PROBLEMS {
            self.problems.push(problem);
        }
    }

    /// Returns the line, from 1, of a byte offset in the file.
    fn line_at(&self, at: usize) -> usize {
        self.line_ends.partition_point(|end| *end < at) + 1
    }

    pub(crate) fn written_at(&self, at: usize) -> SettingOrigin {
        SettingOrigin::File { path: self.path.clone(), line: self.line_at(at) }
    }

    pub(crate) fn origin_of(&self, key: &str) -> SettingOrigin {
        origin_in(&self.resolved, key)
    }

    /// Reports unknown keys of the file and unknown flags.
    fn check_unknown_keys(&mut self) {
        for (name, value) in std::mem::take(&mut self.file) {
            let origin = self.written_at(name.span().start);
            let name = name.into_inner();
            let is_section = SECTIONS.iter().any(|(section, _)| *section == name);
            self.add_problem(match value.into_inner() {
                RawValue::Table(keys) if is_section => {
                    self.check_section_keys(&name, keys);
                    continue;
                }
                _ if is_section => {
                    let allowed = format!("a section that begins with [{name}]");
                    ConfigProblem::not_allowed(&name, origin, "a value", &allowed, None)
                }
                _ => ConfigProblem::unknown_key(&shortened(&name), &origin, suggest_key(None, &name)),
            });
        }
        for (name, _) in self.inputs.flags.given.iter().filter(|(name, _)| Setting::find(name).is_none()) {
            let mut problem =
                ConfigProblem::unknown_key(name, &SettingOrigin::Flag { name: name.clone() }, suggest_key(None, name));
            // Every consumer uses the command line.
            problem.key = None;
            self.add_problem(problem);
        }
    }

    fn check_section_keys(&mut self, section: &str, keys: DeTable<'_>) {
        for (name, value) in keys {
            let origin = self.written_at(name.span().start);
            let name = name.into_inner();
            let hint = match section {
                "quota" if value.get_ref().is_table() => Some(format!("quota.owners.{}", shortened(&name))),
                "quota" if QUOTA_KEYS.contains(&&*name) => Some(format!("quota.default.{name}")),
                _ => suggest_key(Some(section), &name),
            };
            self.add_problem(ConfigProblem::unknown_key(&format!("{section}.{}", shortened(&name)), &origin, hint));
        }
    }

    /// Reports settings that contradict each other.
    fn check_contradictions(&mut self, config: &Config) {
        let mut add_problem = |key: &str, message: String| {
            self.add_problem(ConfigProblem::contradiction(key, &self.origin_of(key), message));
        };
        match (&config.server.tls_cert, &config.server.tls_key) {
            (Some(_), None) => {
                add_problem("server.tls_cert", "a certificate without its key; set server.tls_key as well".into());
            }
            (None, Some(_)) => {
                add_problem("server.tls_key", "a key without its certificate; set server.tls_cert as well".into());
            }
            _ => {}
        }
        let (usual, most) = (config.leases.default_ttl_secs.as_secs_f64(), config.leases.max_ttl_secs.as_secs_f64());
        if usual > most {
            add_problem("leases.default_ttl_secs", format!("{usual} s is above leases.max_ttl_secs ({most} s)"));
        }
        if config.api.docs_url == config.api.redoc_url {
            add_problem(
                "api.redoc_url",
                format!("{} is already used by api.docs_url; choose another path", config.api.docs_url),
            );
        }
        if let Err(error) = config.policies.validate()
            && self.problems.is_empty()
        {
            self.add_problem(ConfigProblem::contradiction("policy", &SettingOrigin::Default, error.to_string()));
        }
    }
}
