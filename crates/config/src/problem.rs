//! Mistakes in a configuration: where each was written, and what was probably meant.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::limits;
use crate::settings::{SECTIONS, Setting, all_settings};
use crate::value::{HIDDEN, Kind, Raw, quoted, text_of};

/// The place that a value came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SettingOrigin {
    Default,
    /// A line of the file, counted from 1.
    File {
        path: Arc<Path>,
        line: usize,
    },
    Environment {
        name: &'static str,
    },
    /// A flag of the command line, dashes included.
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

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{head}: {said}")]
pub struct ConfigProblem {
    /// A short name of its kind that never changes.
    pub code: &'static str,
    /// The setting it is about, where it is about one.
    pub key: Option<String>,
    /// The place it was written.
    pub place: String,
    /// Place and key, as the message begins.
    head: String,
    said: String,
    /// What to do about it.
    pub remedy: String,
}

impl ConfigProblem {
    /// A value that is not allowed. Secrets are not repeated.
    pub(crate) fn bad_value<T>(key: &str, origin: SettingOrigin, raw: &Raw<'_>, kind: &Kind<T>) -> Self {
        let is_blank = text_of(raw).is_some_and(str::is_empty);
        let value = if kind.secret && !is_blank { HIDDEN.to_owned() } else { quoted(raw) };
        Self::not_allowed(key, origin, &value, &kind.allowed, (kind.meant)(raw))
    }

    /// A `value` where `allowed` is expected.
    pub(crate) fn not_allowed(
        key: &str,
        origin: SettingOrigin,
        value: &str,
        allowed: &str,
        hint: Option<String>,
    ) -> Self {
        let said = format!("{value} is not allowed, it must be {allowed}{}", did_you_mean(hint.as_deref()));
        Self::about(key, &origin, "bad_value", said, format!("Write {}.", hint.as_deref().unwrap_or(allowed)))
    }

    /// A key of the file that no setting has.
    pub(crate) fn unknown_key(key: &str, origin: &SettingOrigin, hint: Option<String>) -> Self {
        let remedy = match &hint {
            Some(hint) => format!("Write {hint} instead, or remove it."),
            None => "Remove it; `gpupool config show` lists every key.".to_owned(),
        };
        let said = format!("nobody knows this key{}", did_you_mean(hint.as_deref()));
        Self::about(key, origin, "unknown_key", said, remedy)
    }

    /// Two settings that cannot both be.
    pub(crate) fn contradiction(key: &str, origin: &SettingOrigin, said: String) -> Self {
        Self::about(key, origin, "contradiction", said, "Change one of the two.".to_owned())
    }

    /// A line of the file that is not TOML.
    pub(crate) fn syntax(origin: &SettingOrigin, said: &str) -> Self {
        let (code, head, said) = ("syntax", origin.to_string(), said.to_owned());
        let remedy = "Correct the line; texts stand in quotes, sections in [brackets].".to_owned();
        Self { code, key: None, place: head.clone(), head, said, remedy }
    }

    /// A file that cannot be read.
    pub(crate) fn unreadable(path: &Path, said: String) -> Self {
        let (code, head) = ("unreadable", path.display().to_string());
        let remedy = "Name another file with --config, or correct this one.".to_owned();
        Self { code, key: None, place: head.clone(), head, said, remedy }
    }

    fn about(key: &str, origin: &SettingOrigin, code: &'static str, said: String, remedy: String) -> Self {
        // A variable or flag is its own name; in the file the key says which line is meant.
        let head = match origin {
            SettingOrigin::Default => key.to_owned(),
            SettingOrigin::File { .. } => format!("{origin}: {key}"),
            SettingOrigin::Environment { name } => (*name).to_owned(),
            SettingOrigin::Flag { name } => name.clone(),
        };
        Self { code, key: Some(key.to_owned()), place: origin.to_string(), head, said, remedy }
    }
}

fn did_you_mean(hint: Option<&str>) -> String {
    hint.map(|hint| format!("; did you mean {hint}?")).unwrap_or_default()
}

/// Everything that is wrong, not only the first of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigProblems(pub Vec<ConfigProblem>);

/// A bad value that was left out of account.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; it is ignored, {why_ignored}")]
pub struct ConfigWarning {
    pub problem: ConfigProblem,
    pub why_ignored: &'static str,
}

// Suggestions.

/// Tables of the file that hold no settings but rules.
const RULE_TABLES: [&str; 2] = ["policy", "default_policy"];

/// The words of other programs.
const OTHER_WORDS: &[(&str, &str)] = &[
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

/// The one of `known` that is nearest to `word`, if any is near. A swap of two neighbours is one mistake.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = plain(word);
    let length = word.chars().count();
    if length == 0 || length > limits::SUGGEST_FOR {
        return None;
    }
    let near = (length / 4).clamp(1, 3);
    let ranked = known.into_iter().map(|name| (strsim::osa_distance(&word, &plain(name)), name));
    ranked.filter(|(far, _)| *far <= near).min_by_key(|(far, _)| *far).map(|(_, name)| name)
}

/// The key that was probably meant by `name` in `section` (or outside of any).
pub(crate) fn key_for(section: Option<&str>, name: &str) -> Option<String> {
    let here = all_settings().iter().filter(|setting| Some(setting.section()) == section);
    if let Some(name) = nearest(name, here.map(Setting::name)) {
        return section.map(|section| format!("{section}.{name}"));
    }
    let word = plain(name);
    let same = |setting: &&Setting| {
        plain(setting.name()) == word || setting.env.iter().any(|variable| plain(variable) == word)
    };
    if let Some(setting) = all_settings().iter().find(same) {
        return Some(setting.key.to_owned());
    }
    if let Some((_, meant)) = OTHER_WORDS.iter().find(|(other, _)| *other == word) {
        return Some((*meant).to_owned());
    }
    if section.is_none()
        && let Some(section) = nearest(name, SECTIONS.iter().map(|(name, _)| *name).chain(RULE_TABLES))
    {
        return Some(section.to_owned());
    }
    let elsewhere = nearest(name, all_settings().iter().map(Setting::name))?;
    all_settings().iter().find(|setting| setting.name() == elsewhere).map(|setting| setting.key.to_owned())
}

fn plain(word: &str) -> String {
    word.trim().trim_start_matches("--").to_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_is_one_mistake_and_a_different_word_is_far() {
        assert_eq!(nearest("prot", ["port"]), Some("port"));
        assert_eq!((nearest("tresholds", ["threshold"]), nearest("treshs", ["thresh"])), (Some("threshold"), None));
        assert_eq!(nearest("", ["a"]), None);
        assert_eq!(nearest("fiffo", ["fifo", "fair-share"]), Some("fifo"));
        assert_eq!(nearest("banana", ["fifo", "fair-share"]), None);
        assert_eq!(nearest(&"x".repeat(100_000), ["fifo"]), None);
    }

    #[test]
    fn a_key_is_found_in_its_section_in_another_and_by_other_words() {
        let meant = |section, name| key_for(section, name);
        assert_eq!(meant(Some("server"), "prot").as_deref(), Some("server.port"));
        assert_eq!(meant(Some("server"), "refresh_interval").as_deref(), Some("monitoring.refresh_interval"));
        assert_eq!(meant(None, "port").as_deref(), Some("server.port"));
        assert_eq!(meant(None, "GPUPOOL_STATE_DIR").as_deref(), Some("server.state_dir"));
        assert_eq!(meant(None, "sever").as_deref(), Some("server"));
        assert_eq!(meant(None, "agent").as_deref(), Some("server"));
        assert_eq!(meant(Some("server"), "bind").as_deref(), Some("server.host"));
        assert_eq!(meant(Some("server"), "zzzzzz"), None);
    }

    #[test]
    fn other_words_lead_to_keys_and_sections_that_exist() {
        for (other, meant) in OTHER_WORDS {
            let known = all_settings().iter().any(|setting| setting.key == *meant)
                || SECTIONS.iter().any(|(section, _)| section == meant)
                || RULE_TABLES.contains(meant);
            assert!(known, "{other} leads to {meant}, which is nothing");
        }
    }
}
