//! `config show`: every value in effect and where it came from, for people and for programs.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use crate::load::Loaded;

impl Loaded {
    /// A table of key, value and origin.
    pub fn as_text(&self) -> String {
        let rows: Vec<[String; 3]> = self
            .resolved
            .iter()
            .map(|resolved| [resolved.key.clone(), plain(&resolved.value), resolved.origin.to_string()])
            .collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let (keys, values) = (width(0).max(3), width(1).clamp(5, 40));
        let mut text = format!("{:keys$}  {:values$}  FROM\n", "KEY", "VALUE");
        for [key, value, origin] in &rows {
            // Writing to a text cannot fail.
            let _ = writeln!(text, "{key:keys$}  {value:values$}  {origin}");
        }
        text
    }

    /// `{settings: [{key, value, origin}], warnings: [text]}`.
    pub fn as_json(&self) -> Json {
        let settings = self
            .resolved
            .iter()
            .map(|resolved| json!({ "key": resolved.key, "value": resolved.value, "origin": resolved.origin }));
        let warnings = self.warnings.iter().map(ToString::to_string);
        json!({ "settings": settings.collect::<Vec<_>>(), "warnings": warnings.collect::<Vec<_>>() })
    }
}

/// A value as a person writes it.
pub(crate) fn plain(value: &Json) -> String {
    match value {
        Json::Null => "(not set)".to_owned(),
        Json::String(text) if text.is_empty() => "(empty)".to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(entries) if entries.is_empty() => "(none)".to_owned(),
        Json::Array(entries) => entries.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}
