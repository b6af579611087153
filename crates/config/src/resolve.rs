//! Chooses each value by precedence (flag, environment, file, default) and remembers where it came from.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use crate::file::{Node, Table, What};
use crate::limits;
use crate::load::Inputs;
use crate::problem::{Origin, Problem, Warning};
use crate::raw::{Raw, shortened};
use crate::secret::HIDDEN;
use crate::setting::{Machine, Setting};
use crate::suggest;
use crate::value::Value;

/// A value in effect, as it is shown, and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// Which setting: `server.port`, `policy[0].max_fraction`.
    pub key: String,
    /// Its value; secrets are hidden.
    pub value: Json,
    /// Where it came from.
    pub origin: Origin,
    /// Whether a running agent takes a change of it on SIGHUP.
    pub live: bool,
}

/// The sources of values while a configuration is put together.
pub(crate) struct Resolver<'i> {
    inputs: &'i Inputs,
    path: Option<Arc<Path>>,
    /// What nobody has taken yet.
    pub file: Table,
    pub resolved: Vec<Resolved>,
    pub problems: Vec<Problem>,
    pub warnings: Vec<Warning>,
}

impl<'i> Resolver<'i> {
    pub(crate) fn new(inputs: &'i Inputs, path: Option<Arc<Path>>, file: Table) -> Self {
        Self { inputs, path, file, resolved: Vec::new(), problems: Vec::new(), warnings: Vec::new() }
    }

    pub(crate) fn machine(&self) -> &'i Machine {
        &self.inputs.machine
    }

    /// The value of `setting` that is in effect.
    pub(crate) fn pick<T: Value>(&mut self, setting: &'static Setting, bounds: &T::Bounds, default: T) -> T {
        let mut chosen = None;
        for (origin, raw) in self.offers(setting, T::takes_empty(bounds)) {
            match T::read(&raw, bounds) {
                Some(value) => {
                    chosen.get_or_insert((value, origin));
                }
                None => {
                    let problem = bad_value::<T>(setting.key.to_owned(), origin, &raw, bounds);
                    self.refuse(setting, problem, chosen.is_some());
                }
            }
        }
        let (value, origin) = chosen.unwrap_or((default, Origin::Default));
        self.remember(setting.key.to_owned(), &value, origin, setting.live);
        value
    }

    /// Notes that a value is in effect.
    pub(crate) fn remember<T: Value>(&mut self, key: String, value: &T, origin: Origin, live: bool) {
        self.resolved.push(Resolved { key, value: value.shown(), origin, live });
    }

    /// Notes something that is wrong, unless the reader does not use it or there is too much of it already.
    pub(crate) fn complain(&mut self, problem: Problem) {
        if !self.concerns_reader(&problem) {
            return;
        }
        if self.problems.len() < limits::PROBLEMS {
            self.problems.push(problem);
        }
    }

    /// What the command line says always does.
    fn concerns_reader(&self, problem: &Problem) -> bool {
        let by_flag = matches!(problem, Problem::UnknownKey { origin: Origin::Flag { .. }, .. });
        by_flag || problem.key().is_none_or(|key| self.inputs.reader.uses(key))
    }

    pub(crate) fn at_line(&self, line: usize) -> Origin {
        match &self.path {
            Some(path) => Origin::File { path: path.clone(), line },
            None => Origin::Default,
        }
    }

    /// Where the value of `key` came from.
    pub(crate) fn origin_of(&self, key: &str) -> Origin {
        self.resolved.iter().find(|resolved| resolved.key == key).map_or(Origin::Default, |found| found.origin.clone())
    }

    /// Every value given for `setting`, the strongest first.
    fn offers(&mut self, setting: &'static Setting, takes_empty: bool) -> Vec<(Origin, Raw)> {
        let mut offers = Vec::new();
        let named = |name: &str| name == setting.key || setting.flag.is_some_and(|flag| name == flag);
        for (name, raw) in self.inputs.flags.given.iter().rev().filter(|(name, _)| named(name)) {
            offers.push((Origin::Flag { name: name.clone() }, raw.clone()));
        }
        for &name in setting.env {
            let set = self.inputs.env.get(name).filter(|text| takes_empty || !text.trim().is_empty());
            if let Some(text) = set {
                offers.push((Origin::Environment { name }, Raw::Text(text.clone())));
            }
        }
        if let Some((line, raw)) = self.take_value(setting) {
            offers.push((self.at_line(line), raw));
        }
        offers
    }

    fn take_value(&mut self, setting: &Setting) -> Option<(usize, Raw)> {
        let What::Table(section) = &mut self.file.get_mut(setting.section())?.what else { return None };
        match section.remove(setting.name())? {
            Node { line, what: What::Value(raw) } => Some((line, raw)),
            Node { line, what: What::Table(_) | What::Tables(_) } => Some((line, Raw::Other("a table"))),
        }
    }

    fn refuse(&mut self, setting: &Setting, problem: Problem, overridden: bool) {
        let why_ignored = if overridden {
            "because a stronger source sets it"
        } else if self.inputs.lenient && setting.section() == "client" {
            "because only a warning was asked for"
        } else {
            return self.complain(problem);
        };
        if self.concerns_reader(&problem) && self.warnings.len() < limits::PROBLEMS {
            self.warnings.push(Warning { problem, why_ignored });
        }
    }

    /// Complains of every key nobody took and every flag nobody knows.
    pub(crate) fn complain_of_leftovers(&mut self) {
        for (name, Node { line, what }) in std::mem::take(&mut self.file) {
            let origin = self.at_line(line);
            let is_section = crate::SECTIONS.iter().any(|(section, _)| *section == name);
            match what {
                What::Table(keys) if is_section => self.complain_of_keys(&name, keys),
                _ if is_section => self.complain(Problem::BadValue {
                    allowed: format!("a section that begins with [{name}]"),
                    key: name,
                    origin,
                    value: "something else than a section".to_owned(),
                    hint: None,
                }),
                _ => {
                    let hint = suggest::key_for(None, &name);
                    self.complain(Problem::UnknownKey { key: shortened(&name), origin, hint });
                }
            }
        }
        for (name, _) in &self.inputs.flags.given {
            if !crate::all_settings().iter().any(|setting| setting.key == name || setting.flag == Some(name)) {
                let (key, origin) = (name.clone(), Origin::Flag { name: name.clone() });
                self.complain(Problem::UnknownKey { key, origin, hint: suggest::key_for(None, name) });
            }
        }
    }

    fn complain_of_keys(&mut self, section: &str, keys: Table) {
        for (name, Node { line, what }) in keys {
            let hint = match what {
                What::Table(_) if section == "quota" => Some(format!("quota.owners.{}", shortened(&name))),
                _ if section == "quota" && crate::policies::QUOTA_KEYS.contains(&&*name) => {
                    Some(format!("quota.default.{name}"))
                }
                _ => suggest::key_for(Some(section), &name),
            };
            let origin = self.at_line(line);
            self.complain(Problem::UnknownKey { key: format!("{section}.{}", shortened(&name)), origin, hint });
        }
    }
}

/// The problem of a value that is not allowed; what a secret was is not repeated.
pub(crate) fn bad_value<T: Value>(key: String, origin: Origin, raw: &Raw, bounds: &T::Bounds) -> Problem {
    let value = if T::SECRET { HIDDEN.to_owned() } else { raw.to_string() };
    let value = if raw.is_empty() { "an empty text".to_owned() } else { value };
    Problem::BadValue { key, origin, value, allowed: T::allowed(bounds), hint: T::meant(raw, bounds) }
}
