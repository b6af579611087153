//! Problems in a configuration: place, message and suggestion.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::limits;
use crate::settings::{SECTIONS, Setting, all_settings};
use crate::value::{HIDDEN_TEXT, RawValue, ValueKind, quoted, text_of};

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SettingOrigin {
    Default,
    /// Line of the file, from 1.
    File {
        path: Arc<Path>,
        line: usize,
    },
    Environment {
        name: &'static str,
    },
    /// Flag of the command line, with dashes.
    Flag {
        name: String,
    },
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment { name } => write!(f, "environment {name}"),
            Self::Flag { name } => write!(f, "flag {name}"),
        }
    }
}

/// Problem in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{head}: {message}")]
pub struct ConfigProblem {
    /// Stable code.
    pub code: &'static str,
    /// Setting, if the problem is about one.
    pub key: Option<String>,
    /// Origin of the value.
    pub place: String,
    /// Origin and key at the start of the message.
    head: String,
    message: String,
    /// Next step.
    pub remedy: String,
}

impl ConfigProblem {
    /// Creates the problem of a value that is not allowed. Secrets are not repeated.
    pub(crate) fn bad_value<T>(key: &str, origin: SettingOrigin, raw: &RawValue<'_>, kind: &ValueKind<T>) -> Self {
        let is_blank = text_of(raw).is_some_and(str::is_empty);
        let value = if kind.secret && !is_blank { HIDDEN_TEXT.to_owned() } else { quoted(raw) };
        Self::not_allowed(key, origin, &value, &kind.allowed, (kind.suggest)(raw))
    }

    /// Creates the problem of a `value` where `allowed` is expected.
    pub(crate) fn not_allowed(
        key: &str,
        origin: SettingOrigin,
        value: &str,
        allowed: &str,
        hint: Option<String>,
    ) -> Self {
        let message = format!("{value} is not allowed; it must be {allowed}{}", did_you_mean(hint.as_deref()));
        Self::new(key, &origin, "bad_value", message, format!("Write {}.", hint.as_deref().unwrap_or(allowed)))
    }

    /// Creates the problem of an unknown key.
    pub(crate) fn unknown_key(key: &str, origin: &SettingOrigin, hint: Option<String>) -> Self {
        let remedy = match &hint {
            Some(hint) => format!("Use {hint} instead, or remove it."),
            None => "Remove it; `gpupool config show` lists every key.".to_owned(),
        };
        let message = format!("unknown key{}", did_you_mean(hint.as_deref()));
        Self::new(key, origin, "unknown_key", message, remedy)
    }

    /// Creates the problem of two contradicting settings.
    pub(crate) fn contradiction(key: &str, origin: &SettingOrigin, message: String) -> Self {
        Self::new(key, origin, "contradiction", message, "Change one of the two.".to_owned())
    }

    /// Creates the problem of a line that is not TOML.
    pub(crate) fn syntax(origin: &SettingOrigin, message: &str) -> Self {
        let (code, head, message) = ("syntax", origin.to_string(), message.to_owned());
        let remedy = "Correct the line; write text in quotes and sections in [brackets].".to_owned();
        Self { code, key: None, place: head.clone(), head, message, remedy }
    }

    /// Creates the problem of an unreadable file.
    pub(crate) fn unreadable(path: &Path, message: String) -> Self {
        let (code, head) = ("unreadable", path.display().to_string());
        let remedy = "Correct the file, or name another one with --config.".to_owned();
        Self { code, key: None, place: head.clone(), head, message, remedy }
    }

    fn new(key: &str, origin: &SettingOrigin, code: &'static str, message: String, remedy: String) -> Self {
        // The message names the variable or flag itself; in a file it needs the key.
        let head = match origin {
            SettingOrigin::Default => key.to_owned(),
            SettingOrigin::File { .. } => format!("{origin}: {key}"),
            SettingOrigin::Environment { name } => (*name).to_owned(),
            SettingOrigin::Flag { name } => name.clone(),
        };
        Self { code, key: Some(key.to_owned()), place: origin.to_string(), head, message, remedy }
    }
}

fn did_you_mean(hint: Option<&str>) -> String {
    hint.map(|hint| format!("; did you mean {hint}?")).unwrap_or_default()
}

/// All problems of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigProblems(pub Vec<ConfigProblem>);

/// Bad value that is ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; it is ignored, {why_ignored}")]
pub struct ConfigWarning {
    pub problem: ConfigProblem,
    pub why_ignored: &'static str,
}

// Suggestions.

/// Tables of the file with rules instead of settings.
const RULE_TABLES: [&str; 2] = ["policy", "default_policy"];

/// Names that other programs use, and our keys.
const SYNONYMS: &[(&str, &str)] = &[
    ("address", "server.host"),
    ("bind", "server.host"),
    ("listen", "server.host"),
    ("certificate", "server.tls_cert"),
    ("cert", "server.tls_cert"),
    ("key_file", "server.tls_key"),
    ("data_dir", "server.state_dir"),
    ("level", "server.log_level"),
    ("verbosity", "server.log_level"),
    ("interval", "monitoring.refresh_interval"),
    ("gpus", "monitoring.cuda_visible_devices"),
    ("ttl", "leases.default_ttl_secs"),
    ("retention_days", "leases.history_retention_days"),
    ("url", "client.endpoint"),
    ("prefix", "api.api_prefix"),
    ("cors", "api.enable_cors"),
    ("agent", "server"),
    ("auth", "server"),
    ("logging", "server"),
    ("network", "server"),
    ("tls", "server"),
    ("http", "api"),
    ("devices", "monitoring"),
    ("gpu", "monitoring"),
    ("policies", "policy"),
];

/// Returns the known name nearest to `word`, if one is near. A swap of two neighbours counts as one mistake.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = normalized(word);
    let length = word.chars().count();
    if length == 0 || length > limits::SUGGEST_FOR {
        return None;
    }
    let near = (length / 4).clamp(1, 3);
    let ranked = known.into_iter().map(|name| (strsim::osa_distance(&word, &normalized(name)), name));
    ranked.filter(|(far, _)| *far <= near).min_by_key(|(far, _)| *far).map(|(_, name)| name)
}

/// Suggests the key that was probably meant by `name` in `section`, or outside of sections.
pub(crate) fn suggest_key(section: Option<&str>, name: &str) -> Option<String> {
    let here = all_settings().iter().filter(|setting| Some(setting.section()) == section);
    if let Some(name) = nearest(name, here.map(Setting::name)) {
        return section.map(|section| format!("{section}.{name}"));
    }
    let word = normalized(name);
    let same = |setting: &&Setting| {
        normalized(setting.name()) == word || setting.env.iter().any(|variable| normalized(variable) == word)
    };
    if let Some(setting) = all_settings().iter().find(same) {
        return Some(setting.key.to_owned());
    }
    if let Some((_, suggested)) = SYNONYMS.iter().find(|(other, _)| *other == word) {
        return Some((*suggested).to_owned());
    }
    if section.is_none()
        && let Some(section) = nearest(name, SECTIONS.iter().map(|(name, _)| *name).chain(RULE_TABLES))
    {
        return Some(section.to_owned());
    }
    let elsewhere = nearest(name, all_settings().iter().map(Setting::name))?;
    all_settings().iter().find(|setting| setting.name() == elsewhere).map(|setting| setting.key.to_owned())
}

fn normalized(word: &str) -> String {
    word.trim().trim_start_matches("--").to_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_counts_as_one_mistake_and_unrelated_words_are_far() {
        assert_eq!(nearest("prot", ["port"]), Some("port"));
        assert_eq!((nearest("tresholds", ["threshold"]), nearest("treshs", ["thresh"])), (Some("threshold"), None));
        assert_eq!(nearest("", ["a"]), None);
        assert_eq!(nearest("fiffo", ["fifo", "fair-share"]), Some("fifo"));
        assert_eq!(nearest("banana", ["fifo", "fair-share"]), None);
        assert_eq!(nearest(&"x".repeat(100_000), ["fifo"]), None);
    }

    #[test]
    fn keys_are_suggested_from_the_section_other_sections_and_synonyms() {
        let suggested = |section, name| suggest_key(section, name);
        assert_eq!(suggested(Some("server"), "prot").as_deref(), Some("server.port"));
        assert_eq!(suggested(Some("server"), "refresh_interval").as_deref(), Some("monitoring.refresh_interval"));
        assert_eq!(suggested(None, "port").as_deref(), Some("server.port"));
        assert_eq!(suggested(None, "GPUPOOL_STATE_DIR").as_deref(), Some("server.state_dir"));
        assert_eq!(suggested(None, "sever").as_deref(), Some("server"));
        assert_eq!(suggested(None, "agent").as_deref(), Some("server"));
        assert_eq!(suggested(Some("server"), "bind").as_deref(), Some("server.host"));
        assert_eq!(suggested(Some("server"), "zzzzzz"), None);
    }

    #[test]
    fn synonyms_lead_to_existing_keys_and_sections() {
        for (other, suggested) in SYNONYMS {
            let known = all_settings().iter().any(|setting| setting.key == *suggested)
                || SECTIONS.iter().any(|(section, _)| section == suggested)
                || RULE_TABLES.contains(suggested);
            assert!(known, "{other} leads to {suggested}, which does not exist");
        }
    }
}
