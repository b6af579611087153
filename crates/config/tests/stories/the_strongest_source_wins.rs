//! Precedence of sources: flags, environment, file, default.

use gpupool_config::{ConfigInputs, FlagValues, SettingOrigin};
use proptest::prelude::*;
use serde_json::json;

use super::{default_of, from_env, from_file, from_flags, loaded, machine};

/// Setting and three values, as written and as shown.
const SAMPLES: &[(&str, [&str; 3])] = &[
    ("server.host", ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    ("server.port", ["1", "2", "3"]),
    ("server.log_level", ["trace", "debug", "error"]),
    ("monitoring.refresh_interval", ["2", "3", "4"]),
    ("monitoring.backend", ["nvidia", "amd", "nvml"]),
    ("client.endpoint", ["http://a:1", "http://b:1", "http://c:1"]),
    ("client.memory_threshold_percent", ["10", "20", "30"]),
    ("client.load_balancing_strategy", ["weighted", "round_robin", "availability"]),
    ("leases.default_ttl_secs", ["10", "20", "30"]),
];

proptest! {
    #[test]
    fn the_strongest_source_wins_for_any_combination(
        given in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), SAMPLES.len())
    ) {
        let mut inputs = ConfigInputs::empty(machine());
        let mut file = String::new();
        for ((key, [by_flag, by_env, by_file]), (flag, env, in_file)) in SAMPLES.iter().zip(&given) {
            let setting = gpupool_config::all_settings().iter().find(|setting| setting.key == *key).unwrap();
            let name = if flag == env { setting.flag.unwrap_or(key) } else { key };
            inputs.flags = inputs.flags.set(name, flag.then_some(by_flag));
            if let (true, Some(variable)) = (*env, setting.env.last()) {
                inputs.env.insert((*variable).to_owned(), (*by_env).to_owned());
            }
            if *in_file {
                file += &format!("{key} = {by_file:?}\n");
            }
        }
        inputs.file = Some(("x.toml".into(), file));
        let result = loaded(&inputs);
        for ((key, [by_flag, by_env, by_file]), (flag, env, in_file)) in SAMPLES.iter().zip(&given) {
            let setting = gpupool_config::all_settings().iter().find(|setting| setting.key == *key).unwrap();
            let found = result.resolved.iter().find(|resolved| resolved.key == *key).unwrap();
            let shown = found.value.as_str().map_or_else(|| found.value.to_string(), str::to_owned);
            let env = *env && !setting.env.is_empty();
            match (&found.origin, flag, env, in_file) {
                (SettingOrigin::Flag { .. }, true, _, _) => prop_assert_eq!(&shown, by_flag),
                (SettingOrigin::Environment { .. }, false, true, _) => prop_assert_eq!(&shown, by_env),
                (SettingOrigin::File { .. }, false, false, true) => prop_assert_eq!(&shown, by_file),
                (SettingOrigin::Default, false, false, false) => {
                    prop_assert_eq!(&found.value, &default_of(key, machine()));
                }
                (origin, ..) => prop_assert!(false, "{key} came from {origin}; flag {flag}, env {env}, file {in_file}"),
            }
        }
    }
}

#[test]
fn an_empty_variable_is_ignored_unless_empty_is_a_value() {
    let result = loaded(&from_env(&[("PORT", ""), ("HOST", " "), ("CUDA_VISIBLE_DEVICES", ""), ("API_PREFIX", "")]));
    assert_eq!((result.config.server.port, result.config.server.host.as_str()), (8000, "127.0.0.1"));
    assert_eq!(result.config.monitoring.cuda_visible_devices.as_deref(), Some(""));
    assert!(result.is_set("monitoring.cuda_visible_devices") && result.is_set("api.api_prefix"));
    assert_eq!(loaded(&from_env(&[])).config.monitoring.cuda_visible_devices, None);
    let over_file =
        ConfigInputs { env: [("API_PREFIX".into(), String::new())].into(), ..from_file("api.api_prefix = '/x'") };
    assert_eq!(loaded(&over_file).config.api.api_prefix, "");
}

#[test]
fn booleans_and_log_levels_have_several_spellings() {
    for (text, value) in
        [("TRUE", true), ("1", true), ("Yes", true), ("on", true), ("0", false), ("No", false), ("OFF", false)]
    {
        assert_eq!(loaded(&from_env(&[("ACCESS_LOG", text)])).config.server.access_log, value, "{text}");
    }
    for (text, name) in [("WARNING", "warn"), ("critical", "error"), ("Info", "info"), ("warn", "warn")] {
        assert_eq!(loaded(&from_env(&[("LOG_LEVEL", text)])).config.server.log_level.name(), name, "{text}");
    }
}

#[test]
fn a_list_of_endpoints_is_normalized_and_precedes_a_single_one() {
    let urls = |inputs: &ConfigInputs| loaded(inputs).client_endpoints().urls;
    let list = ("GPU_SERVICE_ENDPOINTS", " http://a:1/, ,http://a:1,,https://b/api/ ");
    let single = ("GPU_SERVICE_ENDPOINT", "http://c:1/");
    assert_eq!(urls(&from_env(&[list, single])), ["http://a:1", "https://b/api"]);
    assert_eq!(urls(&from_env(&[list, ("GPU_STATS_SERVICE_ENDPOINTS", "http://d:1")])), ["http://d:1"]);
    assert_eq!(urls(&from_env(&[single, ("GPU_SERVICE_ENDPOINTS", " , ")])), ["http://c:1"]);
    let flag = ConfigInputs { flags: FlagValues::default().set("--endpoint", Some("http://e:1")), ..from_env(&[list]) };
    assert_eq!(urls(&flag), ["http://e:1"]);
    let file =
        ConfigInputs { env: from_env(&[single]).env, ..from_file("client.endpoints = ['http://f:1', 'http://g:1']") };
    assert_eq!(urls(&file), ["http://c:1"]);
    let nothing = loaded(&from_env(&[])).client_endpoints();
    assert_eq!((nothing.urls, nothing.origin), (vec!["http://localhost:8000".to_owned()], SettingOrigin::Default));
}

#[test]
fn the_last_of_two_equal_flags_wins() {
    let flags = FlagValues::default()
        .set("--port", Some(1))
        .set("--port", Some(2))
        .set_switch("--open", true)
        .set("--host", None::<&str>);
    let result = loaded(&from_flags(flags));
    assert_eq!((result.config.server.port, result.config.server.open), (2, true));
    assert_eq!(json!(result.origin_of("server.open")), json!({ "kind": "flag", "name": "--open" }));
}

#[test]
fn the_state_directory_of_a_user_is_below_the_home_directory() {
    let mut inputs = ConfigInputs::empty(machine());
    assert_eq!(loaded(&inputs).config.server.state_dir.to_str(), Some("/var/lib/gpupool"));
    inputs.machine =
        gpupool_config::HostContext { root: false, state_home: Some("/home/ann/.local/state".into()), ..machine() };
    assert_eq!(loaded(&inputs).config.server.state_dir.to_str(), Some("/home/ann/.local/state/gpupool"));
}

#[test]
fn agent_sockets_are_those_of_the_user_and_the_machine() {
    let sockets = |inputs: &ConfigInputs| {
        let found = loaded(inputs).agent_sockets();
        found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
    };
    let mut inputs = ConfigInputs::empty(machine());
    assert_eq!(sockets(&inputs), ["/var/lib/gpupool/agent.sock"]);
    inputs.machine = gpupool_config::HostContext { root: false, state_home: Some("/home/ann".into()), ..machine() };
    assert_eq!(sockets(&inputs), ["/home/ann/gpupool/agent.sock", "/var/lib/gpupool/agent.sock"]);
    let named = from_env(&[("GPUPOOL_STATE_DIR", "/x")]);
    assert_eq!(sockets(&named), ["/x/agent.sock"], "a configured directory selects its own agent");
}
