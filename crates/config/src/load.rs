//! Puts a configuration together from what was given. No I/O: [`crate::here`] gathers what this takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file;
use crate::problem::{Origin, Problem, Problems, Warning};
use crate::raw::Raw;
use crate::resolve::{Resolved, Resolver};
use crate::setting::Machine;
use crate::settings::Config;

/// What was given on the command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Flags {
    pub(crate) given: Vec<(String, Raw)>,
}

impl Flags {
    /// Adds a value under a flag (`--port`) or a key (`server.port`); `None` is a flag that was not given.
    pub fn set(mut self, name: &str, value: Option<impl ToString>) -> Self {
        if let Some(value) = value {
            self.given.push((name.to_owned(), Raw::Text(value.to_string())));
        }
        self
    }

    /// Adds a flag that takes no value, where it was given.
    pub fn switch(self, name: &str, given: bool) -> Self {
        self.set(name, given.then_some(true))
    }
}

/// Who will use a configuration. What somebody does not use cannot be wrong for them: a `PORT` that another program set
/// must not stop `gpupool status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reader {
    /// Everything is used, as by `config check`.
    #[default]
    Everybody,
    /// `serve`: everything but `[client]`.
    Agent,
    /// Every other command: `[client]`, and the state directory, where the agent's socket is.
    Client,
}

impl Reader {
    /// Whether it uses the setting or rule `key`.
    pub(crate) fn uses(self, key: &str) -> bool {
        let of_client = key == "client" || key.starts_with("client.");
        match self {
            Self::Everybody => true,
            Self::Agent => !of_client,
            Self::Client => of_client || key == "server.state_dir",
        }
    }
}

/// Everything a configuration is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// The command line, strongest.
    pub flags: Flags,
    /// The environment.
    pub env: BTreeMap<String, String>,
    /// The file and its text, weakest.
    pub file: Option<(PathBuf, String)>,
    /// What defaults depend on.
    pub machine: Machine,
    /// Who will use it.
    pub reader: Reader,
    /// Turns bad client settings into warnings: the next weaker source counts instead.
    pub lenient: bool,
}

impl Inputs {
    /// No flags, no environment, no file.
    pub fn nothing(machine: Machine) -> Self {
        Self {
            flags: Flags::default(),
            env: BTreeMap::new(),
            file: None,
            machine,
            reader: Reader::Everybody,
            lenient: false,
        }
    }
}

/// A configuration and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// What is in effect.
    pub config: Config,
    /// Every value in effect and where it came from, in the order of the sections.
    pub resolved: Vec<Resolved>,
    /// Bad values that were ignored.
    pub warnings: Vec<Warning>,
}

impl Loaded {
    /// Where the value of `key` came from.
    pub fn origin_of(&self, key: &str) -> Origin {
        let found = self.resolved.iter().find(|resolved| resolved.key == key);
        found.map_or(Origin::Default, |resolved| resolved.origin.clone())
    }

    /// Whether somebody set `key`.
    pub fn is_set(&self, key: &str) -> bool {
        self.origin_of(key) != Origin::Default
    }
}

/// The configuration that `inputs` make, or everything that is wrong with them.
pub fn load(inputs: &Inputs) -> Result<Loaded, Problems> {
    let path: Option<Arc<Path>> = inputs.file.as_ref().map(|(path, _)| Arc::from(path.as_path()));
    let mut syntax = Vec::new();
    let mut table = file::Table::new();
    if let (Some(path), Some((_, text))) = (&path, &inputs.file) {
        match file::parse(path, text) {
            Ok(parsed) => table = parsed,
            Err(problems) => syntax = problems,
        }
    }
    let mut resolver = Resolver::new(inputs, path, table);
    resolver.problems = syntax;
    let config = Config::resolve(&mut resolver);
    resolver.complain_of_leftovers();
    complain_of_contradictions(&mut resolver, &config);
    if !resolver.problems.is_empty() {
        return Err(Problems(resolver.problems));
    }
    Ok(Loaded { config, resolved: resolver.resolved, warnings: resolver.warnings })
}

/// Settings of which each is fine, but not together.
fn complain_of_contradictions(resolver: &mut Resolver<'_>, config: &Config) {
    let server = &config.server;
    let mut complain = |key: &str, said: String| {
        let origin = resolver.origin_of(key);
        resolver.complain(Problem::Contradiction { key: key.to_owned(), origin, said });
    };
    match (&server.tls_cert, &server.tls_key) {
        (Some(_), None) => complain("server.tls_cert", "a certificate without its key; set server.tls_key too".into()),
        (None, Some(_)) => complain("server.tls_key", "a key without its certificate; set server.tls_cert too".into()),
        _ => {}
    }
    let (usual, most) = (config.leases.default_ttl_secs, config.leases.max_ttl_secs);
    if usual > most {
        let said = format!("{} s is above leases.max_ttl_secs, which is {} s", usual.as_secs_f64(), most.as_secs_f64());
        complain("leases.default_ttl_secs", said);
    }
    if config.api.docs_url == config.api.redoc_url {
        complain("api.redoc_url", format!("{} is api.docs_url already; choose another path", config.api.docs_url));
    }
    if let Err(error) = config.policies.validate()
        && resolver.problems.is_empty()
    {
        let (key, said) = ("policy".to_owned(), error.to_string());
        resolver.complain(Problem::Contradiction { key, origin: Origin::Default, said });
    }
}
