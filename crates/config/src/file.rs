//! The file as a tree of values with their lines, from which each reader takes what it knows; what is left is unknown.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use crate::limits;
use crate::problem::{Origin, Problem};
use crate::raw::Raw;

/// Keys of one table.
pub(crate) type Table = BTreeMap<String, Node>;

/// A value of the file and the line it begins on.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub line: usize,
    pub what: What,
}

#[derive(Debug, Clone)]
pub(crate) enum What {
    Value(Raw),
    Table(Table),
    Tables(Vec<Node>),
}

/// The tables of the file, or what is wrong with its syntax.
pub(crate) fn parse(path: &Arc<Path>, text: &str) -> Result<Table, Vec<Problem>> {
    if text.len() > limits::FILE_BYTES {
        let said = format!("the file has {} bytes, at most {} are read", text.len(), limits::FILE_BYTES);
        return Err(vec![Problem::Unreadable { path: path.to_path_buf(), said }]);
    }
    let lines = Lines::of(text);
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(own_table(table.get_ref(), &lines));
    }
    let mut told: Vec<_> = errors
        .into_iter()
        .take(limits::PROBLEMS)
        .map(|error| (error.span().map_or(1, |span| lines.at(span.start)), error))
        .collect();
    told.sort_by_key(|(line, _)| *line);
    let told = told.into_iter().map(|(line, error)| Problem::Syntax {
        origin: Origin::File { path: path.clone(), line },
        said: error.message().trim().to_owned(),
    });
    Err(told.collect())
}

fn own_table(table: &DeTable<'_>, lines: &Lines) -> Table {
    let own = |key_at: usize, value: &DeValue<'_>| Node { line: lines.at(key_at), what: own_value(value, lines) };
    table.iter().map(|(key, value)| (key.get_ref().to_string(), own(key.span().start, value.get_ref()))).collect()
}

fn own_value(value: &DeValue<'_>, lines: &Lines) -> What {
    match value {
        DeValue::Table(table) => What::Table(own_table(table, lines)),
        DeValue::Array(entries) if entries.iter().any(|entry| entry.get_ref().is_table()) => {
            let own = entries
                .iter()
                .map(|entry| Node { line: lines.at(entry.span().start), what: own_value(entry.get_ref(), lines) });
            What::Tables(own.collect())
        }
        value => What::Value(Raw::from_toml(value)),
    }
}

/// Where the lines of a text begin.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect())
    }

    /// The line, from 1, of the byte at `at`.
    fn at(&self, at: usize) -> usize {
        self.0.partition_point(|end| *end < at) + 1
    }
}
