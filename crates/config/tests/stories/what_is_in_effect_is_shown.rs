//! `config show`, `GET /config` and the changes of a reload.

use std::collections::BTreeMap;

use gpupool_config::{ConfigChanges, ConfigInputs, FlagValues, all_settings};
use serde_json::json;

use super::{from_env, from_file, loaded};

#[test]
fn every_setting_is_shown_with_its_origin() {
    let mut inputs = from_file("[server]\nport = 9000\n\n[[policy]]\nname = 'all'\nmax_duration = '2h'");
    inputs.env = from_env(&[("HOST", "0.0.0.0")]).env;
    inputs.flags = FlagValues::default().set_switch("--open", true);
    let result = loaded(&inputs);
    let text = result.as_text();
    let line = |key: &str| {
        text.lines()
            .find(|line| line.starts_with(&format!("{key} ")))
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    assert_eq!(line("server.port").as_deref(), Some("server.port 9000 gpupool.toml:2"));
    assert_eq!(line("server.host").as_deref(), Some("server.host 0.0.0.0 environment HOST"));
    assert_eq!(line("server.open").as_deref(), Some("server.open true flag --open"));
    assert_eq!(line("server.socket_mode").as_deref(), Some("server.socket_mode 0666 default"));
    assert_eq!(line("policy[0].max_duration").as_deref(), Some("policy[0].max_duration 7200 gpupool.toml:6"));
    for setting in all_settings() {
        assert!(line(setting.key).is_some(), "{} is not shown in\n{text}", setting.key);
    }
    let shown = result.as_json();
    let settings = shown["settings"].as_array().unwrap();
    let port = settings.iter().find(|setting| setting["key"] == "server.port").unwrap();
    assert_eq!(
        *port,
        json!({ "key": "server.port", "value": 9000, "origin": { "kind": "file", "path": "gpupool.toml", "line": 2 } })
    );
}

#[test]
fn the_config_route_has_the_published_names_and_types() {
    let config = loaded(&from_env(&[("REFRESH_INTERVAL", "0.5"), ("LOG_LEVEL", "WARNING"), ("WORKERS", "4")])).config;
    assert_eq!(
        json!(config.to_contract_config(8123, "1.2.3")),
        json!({
            "server": {
                "host": "127.0.0.1", "port": 8123, "reload": false, "log_level": "warn", "access_log": true, "workers": 4,
            },
            "api": {
                "title": "gpupool", "version": "1.2.3", "docs_url": "/docs", "redoc_url": "/redoc", "enable_cors": true,
                "api_prefix": "",
            },
            "monitoring": { "refresh_interval": 0.5, "max_history": 100 },
        })
    );
}

#[test]
fn a_reload_applies_rules_log_level_and_tls_and_leaves_the_rest_for_a_restart() {
    let old = loaded(&from_file(
        "[server]\nport = 1\nlog_level = 'info'\ntls_cert = 'a'\ntls_key = 'k'\n\
         [[policy]]\nname = 'a'\nmax_fraction = 0.5",
    ));
    let new = loaded(&from_file(
        "[server]\nport = 2\nlog_level = 'debug'\ntls_cert = 'c'\ntls_key = 'k'\n[queue]\norder = 'fair-share'\n\
         [quota.owners.ann]\ngpus = 1\n[[policy]]\nname = 'a'\n[client]\nendpoint_max_retries = 9",
    ));
    let names = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
    let applied = names(&[
        "server.log_level",
        "server.tls_cert",
        "queue.order",
        "quota.owners.ann.gpus",
        "policy[0].max_fraction",
    ]);
    let ConfigChanges { applied: mut got, need_restart } = old.changes(&new);
    got.sort_by_key(|key| applied.iter().position(|each| each == key));
    assert_eq!((got, need_restart), (applied, names(&["server.port"])));
    assert_eq!(old.changes(&old), ConfigChanges::default());
    let without_tls = loaded(&from_file("server.port = 1"));
    assert_eq!(without_tls.changes(&old).need_restart, names(&["server.tls_cert", "server.tls_key"]));
}

#[test]
fn each_key_variable_and_flag_belongs_to_one_setting() {
    let mut owners = BTreeMap::new();
    for setting in all_settings() {
        for name in setting.env.iter().copied().chain(setting.flag).chain([setting.key]) {
            assert_eq!(owners.insert(name, setting.key), None, "{name} is declared twice");
        }
    }
    assert!(all_settings().iter().any(|setting| setting.secret && setting.key == "client.token"));
    let only_secret = all_settings().iter().filter(|setting| setting.secret).count();
    assert_eq!(only_secret, 1);
}

#[test]
fn every_default_can_be_written_into_a_file() {
    let result = loaded(&ConfigInputs::empty(super::machine()));
    let set = result.resolved.iter().filter(|resolved| !resolved.value.is_null());
    let text: String = set.map(|resolved| format!("{} = {}\n", resolved.key, resolved.value)).collect();
    let again = loaded(&from_file(&text));
    assert_eq!(again.config, result.config, "{text}");
}
