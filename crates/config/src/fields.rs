//! Reads the keys of one table of rules; whatever was not asked for at the end is unknown.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::ids::Labels;

use crate::file::{Node, Table, What};
use crate::limits;
use crate::problem::{Origin, Problem};
use crate::raw::{Raw, shortened};
use crate::resolve::{Resolver, bad_value};
use crate::rules;
use crate::suggest::nearest;
use crate::value::Value;

/// One table that is being read.
pub(crate) struct Fields<'r, 'i> {
    from: &'r mut Resolver<'i>,
    path: String,
    line: usize,
    table: Table,
    asked: Vec<&'static str>,
}

impl<'r, 'i> Fields<'r, 'i> {
    /// The table `node`, which is called `path`; a complaint where it is something else.
    pub(crate) fn of(from: &'r mut Resolver<'i>, path: String, node: Node) -> Option<Self> {
        let Node { line, what: What::Table(table) } = node else {
            from.complain(Problem::BadValue {
                key: path,
                origin: from.at_line(node.line),
                value: "something else than a table".to_owned(),
                allowed: "a table of keys and values".to_owned(),
                hint: None,
            });
            return None;
        };
        Some(Self { from, path, line, table, asked: Vec::new() })
    }

    /// The value of `name`, if it is there and allowed.
    pub(crate) fn get<T: Value>(&mut self, name: &'static str, bounds: &T::Bounds) -> Option<T> {
        let (line, raw) = self.take(name)?;
        self.read(format!("{}.{name}", self.path), line, &raw, bounds)
    }

    /// Pairs of a table of texts.
    pub(crate) fn labels(&mut self, name: &'static str) -> Labels {
        self.asked.push(name);
        let Some(node) = self.table.remove(name) else { return Labels::new() };
        let path = format!("{}.{name}", self.path);
        let Some(inner) = Fields::of(self.from, path.clone(), node) else { return Labels::new() };
        let table = inner.table;
        if table.len() > limits::ENTRIES {
            let said = format!("{} pairs are too many, at most {} are taken", table.len(), limits::ENTRIES);
            self.contradiction(name, said);
            return Labels::new();
        }
        let mut labels = BTreeMap::new();
        for (key, Node { line, what }) in table {
            let raw = raw_of(what);
            if let Some(text) = self.read::<String>(format!("{path}.{key}"), line, &raw, &rules::TEXT) {
                labels.insert(Arc::from(key), Arc::from(text));
            }
        }
        labels
    }

    /// Complains that `name` cannot be together with another key.
    pub(crate) fn contradiction(&mut self, name: &str, said: String) {
        let key = format!("{}.{name}", self.path);
        let origin = match self.from.origin_of(&key) {
            Origin::Default => self.from.at_line(self.line),
            origin => origin,
        };
        self.from.complain(Problem::Contradiction { key, origin, said });
    }

    /// Complains of every key that was not asked for.
    pub(crate) fn finish(self) {
        for (name, node) in self.table {
            let hint = nearest(&name, self.asked.iter().copied()).map(|name| format!("{}.{name}", self.path));
            let (key, origin) = (format!("{}.{}", self.path, shortened(&name)), self.from.at_line(node.line));
            self.from.complain(Problem::UnknownKey { key, origin, hint });
        }
    }

    fn take(&mut self, name: &'static str) -> Option<(usize, Raw)> {
        self.asked.push(name);
        let Node { line, what } = self.table.remove(name)?;
        Some((line, raw_of(what)))
    }

    fn read<T: Value>(&mut self, key: String, line: usize, raw: &Raw, bounds: &T::Bounds) -> Option<T> {
        let origin = self.from.at_line(line);
        let Some(value) = T::read(raw, bounds) else {
            self.from.complain(bad_value::<T>(shortened(&key), origin, raw, bounds));
            return None;
        };
        self.from.remember(key, &value, origin, true);
        Some(value)
    }
}

fn raw_of(what: What) -> Raw {
    match what {
        What::Value(raw) => raw,
        What::Table(_) | What::Tables(_) => Raw::Other("a table"),
    }
}
