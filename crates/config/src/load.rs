//! Puts a configuration together: flags > environment > file > default, each value with its origin, all mistakes at once.
//! No I/O: [`crate::machine`] gathers what this takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value as Json;
use toml::de::DeTable;

use crate::limits;
use crate::machine::{HostContext, SYSTEM_STATE, socket_path};
use crate::policies::QUOTA_KEYS;
use crate::problem::{ConfigProblem, ConfigProblems, ConfigWarning, SettingOrigin, key_for};
use crate::settings::{Config, SECTIONS, Setting, all_settings};
use crate::value::{Kind, Raw, shortened, text_of};

/// The server that is asked where none is named and this machine has no agent's socket.
pub const DEFAULT_ENDPOINT: &str = "http://localhost:8000";

/// The values given on the command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FlagValues {
    given: Vec<(String, String)>,
}

impl FlagValues {
    /// Adds a value under a flag (`--port`) or a key (`server.port`); `None` is a flag that was not given.
    pub fn set(mut self, name: &str, value: Option<impl ToString>) -> Self {
        self.given.extend(value.map(|value| (name.to_owned(), value.to_string())));
        self
    }

    /// Adds a flag that takes no value, where it was given.
    pub fn set_switch(self, name: &str, given: bool) -> Self {
        self.set(name, given.then_some(true))
    }
}

/// The user of a configuration. A setting that a program does not use cannot be wrong for it: a `PORT` that another program
/// set must not stop `gpupool status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ConfigConsumer {
    /// Everything is used, as by `config check`.
    #[default]
    All,
    /// `serve`: everything but `[client]`.
    Agent,
    /// Every other command: `[client]`, and the state directory, where the agent's socket is.
    Client,
}

impl ConfigConsumer {
    /// Whether it uses the setting or rule `key`.
    pub fn uses(self, key: &str) -> bool {
        let of_client = key == "client" || key.starts_with("client.");
        match self {
            Self::All => true,
            Self::Agent => !of_client,
            Self::Client => of_client || key == "server.state_dir",
        }
    }
}

/// Everything a configuration is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigInputs {
    /// The command line, strongest.
    pub flags: FlagValues,
    pub env: BTreeMap<String, String>,
    /// The file and its text, weakest.
    pub file: Option<(PathBuf, String)>,
    /// The machine that defaults depend on.
    pub machine: HostContext,
    pub consumer: ConfigConsumer,
    /// Turns bad client settings into warnings: the next weaker source counts instead.
    pub lenient: bool,
}

impl ConfigInputs {
    /// No flags, no environment, no file.
    pub fn empty(machine: HostContext) -> Self {
        let (flags, env) = (FlagValues::default(), BTreeMap::new());
        Self { flags, env, file: None, machine, consumer: ConfigConsumer::All, lenient: false }
    }
}

/// A configuration and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedConfig {
    /// The configuration in effect.
    pub config: Config,
    /// Every value in effect and its origin, in the order of the sections.
    pub resolved: Vec<ResolvedSetting>,
    /// Bad values that were ignored.
    pub warnings: Vec<ConfigWarning>,
}

/// A value in effect, as it is shown, and its origin.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedSetting {
    /// The setting or rule: `server.port`, `policy[0].max_fraction`.
    pub key: String,
    /// Its value; secrets are hidden.
    pub value: Json,
    pub origin: SettingOrigin,
}

/// The servers a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredEndpoints {
    /// Their URLs, tidied, each once, at least one.
    pub urls: Vec<String>,
    /// Where they were named; [`SettingOrigin::Default`] means that the Unix socket of this machine's agent comes first.
    pub origin: SettingOrigin,
}

/// The configuration that `inputs` make, or everything that is wrong with them.
pub fn load_config(inputs: &ConfigInputs) -> Result<LoadedConfig, ConfigProblems> {
    let mut resolver = Resolver::new(inputs);
    let config = Config::resolve(&mut resolver);
    resolver.complain_of_leftovers();
    resolver.complain_of_contradictions(&config);
    if !resolver.problems.is_empty() {
        return Err(ConfigProblems(resolver.problems));
    }
    Ok(LoadedConfig { config, resolved: resolver.resolved, warnings: resolver.warnings })
}

impl LoadedConfig {
    /// The origin of the value of `key`.
    pub fn origin_of(&self, key: &str) -> SettingOrigin {
        origin_in(&self.resolved, key)
    }

    /// Whether `key` was set anywhere.
    pub fn is_set(&self, key: &str) -> bool {
        self.origin_of(key) != SettingOrigin::Default
    }

    /// The servers a client asks: those named in the strongest place, and there the list before the single one.
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
        // The first of equals wins, hence the list.
        named.min_by_key(weakness).unwrap_or_else(|| ConfiguredEndpoints {
            urls: vec![DEFAULT_ENDPOINT.to_owned()],
            origin: SettingOrigin::Default,
        })
    }

    /// The Unix sockets of agents of this machine: this user's, and the machine's. A named state directory means the agent
    /// there, not the machine's.
    pub fn agent_sockets(&self) -> Vec<PathBuf> {
        let named = self.config.server.state_dir.as_path();
        let machines = Path::new(SYSTEM_STATE);
        let also = (named != machines && !self.is_set("server.state_dir")).then_some(machines);
        std::iter::once(named).chain(also).map(socket_path).collect()
    }
}

fn origin_in(resolved: &[ResolvedSetting], key: &str) -> SettingOrigin {
    resolved.iter().find(|resolved| resolved.key == key).map_or(SettingOrigin::Default, |found| found.origin.clone())
}

/// The sources of values while a configuration is put together.
pub(crate) struct Resolver<'i> {
    inputs: &'i ConfigInputs,
    path: Arc<Path>,
    line_ends: Vec<usize>,
    /// What is left of the file after each reader took what it knows.
    pub file: DeTable<'i>,
    /// Every value given for each setting, the strongest first.
    offers: BTreeMap<&'static str, Vec<(SettingOrigin, Raw<'i>)>>,
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
            let offers = resolver.take_offers(setting);
            resolver.offers.insert(setting.key, offers);
        }
        resolver
    }

    fn parse(&mut self, text: &'i str) {
        if text.len() > limits::FILE_BYTES {
            let said = format!("the file has {} bytes, at most {} are read", text.len(), limits::FILE_BYTES);
            return self.complain(ConfigProblem::unreadable(&self.path, said));
        }
        let (table, mut errors) = DeTable::parse_recoverable(text);
        if errors.is_empty() {
            self.file = table.into_inner();
        }
        errors.truncate(limits::PROBLEMS);
        let begin = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
        errors.sort_by_key(|error| self.line_at(begin(error)));
        for error in errors {
            self.complain(ConfigProblem::syntax(&self.written_at(begin(&error)), error.message().trim()));
        }
    }

    fn take_offers(&mut self, setting: &'static Setting) -> Vec<(SettingOrigin, Raw<'i>)> {
        let inputs = self.inputs;
        let mut offers = Vec::new();
        for (name, text) in inputs.flags.given.iter().rev() {
            if name == setting.key || Some(&**name) == setting.flag {
                offers.push((SettingOrigin::Flag { name: name.clone() }, Raw::String(text.into())));
            }
        }
        for &name in setting.env {
            if let Some(text) = inputs.env.get(name) {
                offers.push((SettingOrigin::Environment { name }, Raw::String(text.into())));
            }
        }
        if let Some(Raw::Table(section)) = self.file.get_mut(setting.section()).map(|section| section.get_mut())
            && let Some((key, value)) = section.remove_entry(setting.name())
        {
            offers.push((self.written_at(key.span().start), value.into_inner()));
        }
        offers
    }

    pub(crate) fn machine(&self) -> &'i HostContext {
        &self.inputs.machine
    }

    /// The value of the setting `key` that is in effect.
    pub(crate) fn pick<T>(&mut self, key: &'static str, kind: &Kind<T>, default: T) -> T {
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
            "because a stronger source sets it"
        } else if self.inputs.lenient && key.starts_with("client.") {
            "because only a warning was asked for"
        } else {
            return self.complain(problem);
        };
        if self.inputs.consumer.uses(key) && self.warnings.len() < limits::PROBLEMS {
            self.warnings.push(ConfigWarning { problem, why_ignored });
        }
    }

    /// The value of the rule `key` of the file, if it is allowed.
    pub(crate) fn read_rule<T>(
        &mut self,
        key: String,
        origin: SettingOrigin,
        raw: &Raw<'_>,
        kind: &Kind<T>,
    ) -> Option<T> {
        let value = (kind.read)(raw);
        match &value {
            Some(value) => self.resolved.push(ResolvedSetting { key, value: (kind.show)(value), origin }),
            None => self.complain(ConfigProblem::bad_value(&shortened(&key), origin, raw, kind)),
        }
        value
    }

    /// Notes something that is wrong, unless the reader does not use it or there is too much of it already.
    pub(crate) fn complain(&mut self, problem: ConfigProblem) {
        let concerns_reader = problem.key.as_ref().is_none_or(|key| self.inputs.consumer.uses(key));
        if concerns_reader && self.problems.len() < limits::PROBLEMS {
            self.problems.push(problem);
        }
    }

    /// The line of the file, from 1, that holds the byte at `at`.
    fn line_at(&self, at: usize) -> usize {
        self.line_ends.partition_point(|end| *end < at) + 1
    }

    pub(crate) fn written_at(&self, at: usize) -> SettingOrigin {
        SettingOrigin::File { path: self.path.clone(), line: self.line_at(at) }
    }

    pub(crate) fn origin_of(&self, key: &str) -> SettingOrigin {
        origin_in(&self.resolved, key)
    }

    /// Complains of every key of the file that no reader took, and of every unknown flag.
    fn complain_of_leftovers(&mut self) {
        for (name, value) in std::mem::take(&mut self.file) {
            let origin = self.written_at(name.span().start);
            let name = name.into_inner();
            let is_section = SECTIONS.iter().any(|(section, _)| *section == name);
            self.complain(match value.into_inner() {
                Raw::Table(keys) if is_section => {
                    self.complain_of_keys(&name, keys);
                    continue;
                }
                _ if is_section => {
                    let allowed = format!("a section that begins with [{name}]");
                    ConfigProblem::not_allowed(&name, origin, "something else than a section", &allowed, None)
                }
                _ => ConfigProblem::unknown_key(&shortened(&name), &origin, key_for(None, &name)),
            });
        }
        for (name, _) in self.inputs.flags.given.iter().filter(|(name, _)| Setting::find(name).is_none()) {
            let mut problem =
                ConfigProblem::unknown_key(name, &SettingOrigin::Flag { name: name.clone() }, key_for(None, name));
            // The command line concerns every reader.
            problem.key = None;
            self.complain(problem);
        }
    }

    fn complain_of_keys(&mut self, section: &str, keys: DeTable<'_>) {
        for (name, value) in keys {
            let origin = self.written_at(name.span().start);
            let name = name.into_inner();
            let hint = match section {
                "quota" if value.get_ref().is_table() => Some(format!("quota.owners.{}", shortened(&name))),
                "quota" if QUOTA_KEYS.contains(&&*name) => Some(format!("quota.default.{name}")),
                _ => key_for(Some(section), &name),
            };
            self.complain(ConfigProblem::unknown_key(&format!("{section}.{}", shortened(&name)), &origin, hint));
        }
    }

    /// Complains of settings that are fine alone, but not together.
    fn complain_of_contradictions(&mut self, config: &Config) {
        let mut complain = |key: &str, said: String| {
            self.complain(ConfigProblem::contradiction(key, &self.origin_of(key), said));
        };
        match (&config.server.tls_cert, &config.server.tls_key) {
            (Some(_), None) => {
                complain("server.tls_cert", "a certificate without its key; set server.tls_key too".into());
            }
            (None, Some(_)) => {
                complain("server.tls_key", "a key without its certificate; set server.tls_cert too".into());
            }
            _ => {}
        }
        let (usual, most) = (config.leases.default_ttl_secs.as_secs_f64(), config.leases.max_ttl_secs.as_secs_f64());
        if usual > most {
            complain("leases.default_ttl_secs", format!("{usual} s is above leases.max_ttl_secs, which is {most} s"));
        }
        if config.api.docs_url == config.api.redoc_url {
            complain("api.redoc_url", format!("{} is api.docs_url already; choose another path", config.api.docs_url));
        }
        if let Err(error) = config.policies.validate()
            && self.problems.is_empty()
        {
            self.complain(ConfigProblem::contradiction("policy", &SettingOrigin::Default, error.to_string()));
        }
    }
}
