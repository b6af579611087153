//! Display of a configuration: `config show`, `GET /config`, and the changes of a reload.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use crate::load::LoadedConfig;
use crate::settings::{Config, Setting};

impl LoadedConfig {
    /// Formats a table of key, value and origin.
    pub fn as_text(&self) -> String {
        let row = |resolved: &crate::ResolvedSetting| {
            [resolved.key.clone(), display_value(&resolved.value), resolved.origin.to_string()]
        };
        let rows: Vec<[String; 3]> = self.resolved.iter().map(row).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let (keys, values) = (width(0).max(3), width(1).clamp(5, 40));
        let mut text = format!("{:keys$}  {:values$}  ORIGIN\n", "KEY", "VALUE");
        for [key, value, origin] in &rows {
            // Writing to a text cannot fail.
            let _ = writeln!(text, "{key:keys$}  {value:values$}  {origin}");
        }
        text
    }

    /// Formats `{settings: [{key, value, origin}], warnings: [text]}`.
    pub fn as_json(&self) -> Json {
        let settings = self
            .resolved
            .iter()
            .map(|resolved| json!({ "key": resolved.key, "value": resolved.value, "origin": resolved.origin }));
        let warnings = self.warnings.iter().map(ToString::to_string);
        json!({ "settings": settings.collect::<Vec<_>>(), "warnings": warnings.collect::<Vec<_>>() })
    }

    /// Returns the changes that `new` makes. Client settings do not affect an agent and are left out.
    pub fn changes(&self, new: &Self) -> ConfigChanges {
        let mut changes = ConfigChanges::default();
        let mut note = |key: &str, is_exchange: bool| {
            // Rules of the file are not settings and are all live.
            let is_live = is_exchange && Setting::find(key).is_none_or(|setting| setting.live);
            let list = if is_live { &mut changes.applied } else { &mut changes.need_restart };
            list.push(key.to_owned());
        };
        for now in new.resolved.iter().filter(|now| !now.key.starts_with("client.")) {
            match self.resolved.iter().find(|before| before.key == now.key) {
                // A running agent can replace a certificate, but not enable or disable TLS.
                Some(before) if before.value != now.value => {
                    note(&now.key, !before.value.is_null() && !now.value.is_null());
                }
                Some(_) => {}
                None => note(&now.key, true),
            }
        }
        for before in &self.resolved {
            if !new.resolved.iter().any(|now| now.key == before.key) {
                note(&before.key, true);
            }
        }
        changes
    }
}

/// Keys that differ between two configurations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigChanges {
    /// Changes applied at once.
    pub applied: Vec<String>,
    /// Changes applied at the next start.
    pub need_restart: Vec<String>,
}

impl Config {
    /// Formats the parts `server`, `api` and `monitoring` of `GET /config` with the published field names. `port` is
    /// the port in use, `version` the program's.
    pub fn to_contract_config(&self, port: u16, version: &str) -> Json {
        let (server, api, monitoring) = (&self.server, &self.api, &self.monitoring);
        json!({
            "server": {
                "host": server.host,
                "port": port,
                "reload": server.reload,
                "log_level": server.log_level.name(),
                "access_log": server.access_log,
                "workers": server.workers,
            },
            "api": {
                "title": api.title,
                "version": version,
                "docs_url": api.docs_url,
                "redoc_url": api.redoc_url,
                "enable_cors": api.enable_cors,
                "api_prefix": api.api_prefix,
            },
            "monitoring": {
                "refresh_interval": monitoring.refresh_interval.as_secs_f64(),
                "max_history": monitoring.max_history,
            },
        })
    }
}

/// Formats a value for users.
fn display_value(value: &Json) -> String {
    match value {
        Json::Null => "(not set)".to_owned(),
        Json::String(text) if text.is_empty() => "(empty)".to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(entries) if entries.is_empty() => "(none)".to_owned(),
        Json::Array(entries) => entries.iter().map(display_value).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}
