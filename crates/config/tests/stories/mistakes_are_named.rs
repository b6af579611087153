//! A mistake is told with its place, its value and what is allowed; all of them at once.

use gpupool_config::{ConfigConsumer, ConfigInputs, FlagValues};

use super::{from_env, from_file, from_flags, loaded, wrong};

#[test]
fn every_mistake_is_told_not_only_the_first() {
    let text = "[server]\nprot = 1\nport = 99999\nworkers = 'two'\n\n[sever]\nhost = 'x'\n";
    let inputs = ConfigInputs { env: from_env(&[("ACCESS_LOG", "maybe")]).env, ..from_file(text) };
    assert_eq!(
        wrong(&inputs),
        [
            "gpupool.toml:3: server.port: 99999 is not allowed, it must be a whole number from 0 to 65535",
            "ACCESS_LOG: \"maybe\" is not allowed, it must be true or false (also 1/0, yes/no, on/off)",
            "gpupool.toml:4: server.workers: \"two\" is not allowed, it must be a whole number from 1 to 1024",
            "gpupool.toml:2: server.prot: nobody knows this key; did you mean server.port?",
            "gpupool.toml:6: sever: nobody knows this key; did you mean server?",
        ]
    );
}

#[test]
fn a_bad_variable_is_named_with_its_value_and_range() {
    for (name, value, part) in [
        ("GPU_MEMORY_THRESHOLD_PERCENT", "150", "from 0 to 100"),
        ("GPU_UTILIZATION_THRESHOLD_PERCENT", "-1", "from 0 to 100"),
        ("GPU_POLLING_INTERVAL_SECONDS", "nan", "seconds from 0.05 to 3600"),
        ("GPU_SERVICE_ENDPOINT", "gpu-box:8000", "did you mean http://gpu-box:8000?"),
        ("GPU_SERVICE_ENDPOINTS", "http://a,b:1", "did you mean http://b:1?"),
        ("GPU_LOAD_BALANCING_STRATEGY", "wieghted", "did you mean weighted?"),
        ("DOCS_URL", "docs", "did you mean /docs?"),
        ("GPUPOOL_BACKEND", "cuda", "rocm-smi"),
        ("REFRESH_INTERVAL", "0", "seconds from 0.05 to 3600"),
        ("PORT", "tcp://10.0.0.1:80", "0 to 65535"),
    ] {
        let said = wrong(&from_env(&[(name, value)])).join("\n");
        assert!(said.starts_with(&format!("{name}: \"{value}\" is not allowed")) && said.contains(part), "{said}");
    }
}

#[test]
fn a_bad_value_that_is_overridden_is_only_a_warning() {
    let flags = FlagValues::default().set("--port", Some(9000));
    let result = loaded(&ConfigInputs { flags, ..from_env(&[("PORT", "tcp://10.0.0.1:80")]) });
    assert_eq!(result.config.server.port, 9000);
    assert!(result.warnings[0].to_string().contains("PORT: \"tcp://10.0.0.1:80\""), "{}", result.warnings[0]);
}

#[test]
fn whoever_asks_for_warnings_gets_the_weaker_value_for_client_settings_and_errors_for_others() {
    let variables = [("GPU_MEMORY_THRESHOLD_PERCENT", "150"), ("GPU_ENDPOINT_MAX_RETRIES", "many")];
    let result = loaded(&ConfigInputs { lenient: true, ..from_env(&variables) });
    assert_eq!(result.config.client.memory_threshold_percent.as_number(), 80.0);
    assert_eq!((result.config.client.endpoint_max_retries, result.warnings.len()), (3, 2));
    let said = wrong(&ConfigInputs { lenient: true, ..from_env(&[("PORT", "x")]) });
    assert!(said[0].starts_with("PORT"), "{said:?}");
}

#[test]
fn what_a_command_does_not_use_cannot_be_wrong_for_it() {
    let mut inputs = from_file("[server]\nprot = 1\n[[policy]]\nmax_memory = 1\n[client]\nendpoint_max_retries = 7");
    inputs.env = from_env(&[("PORT", "tcp://10.0.0.1:80")]).env;
    assert_eq!(wrong(&inputs).len(), 3);
    inputs.consumer = ConfigConsumer::Client;
    let result = loaded(&inputs);
    assert_eq!((result.config.client.endpoint_max_retries, result.warnings.len()), (7, 0));
    inputs.env = from_env(&[("GPU_ENDPOINT_MAX_RETRIES", "x"), ("GPUPOOL_STATE_DIR", "a\0b")]).env;
    assert_eq!(wrong(&inputs).len(), 2);
    let agent =
        ConfigInputs { consumer: ConfigConsumer::Agent, ..from_env(&[("GPU_SERVICE_ENDPOINT", "x"), ("PORT", "x")]) };
    let said = wrong(&agent);
    assert!(said.len() == 1 && said[0].starts_with("PORT"), "{said:?}");
    let flags = FlagValues::default().set("--nonsense", Some(1));
    assert_eq!(wrong(&ConfigInputs { consumer: ConfigConsumer::Client, ..from_flags(flags) }).len(), 1);
}

#[test]
fn a_secret_is_not_repeated_in_a_complaint_nor_shown_nor_debugged() {
    let said = wrong(&from_env(&[("GPUPOOL_TOKEN", "hush hush")])).join("\n");
    assert!(said.starts_with("GPUPOOL_TOKEN: (hidden) is not allowed") && !said.contains("hush"), "{said}");
    let result = loaded(&from_file("[client]\ntoken = 'quietly-please'"));
    assert_eq!(result.config.client.token.as_ref().unwrap().expose(), "quietly-please");
    let shown = format!("{}{}{:?}", result.as_text(), result.as_json(), result);
    assert!(!shown.contains("quietly-please") && shown.contains("(hidden)"), "{shown}");
}

#[test]
fn syntax_is_told_with_its_line() {
    let said = wrong(&from_file("[server]\nport = \n[client\n"));
    assert!(
        said[0].starts_with("gpupool.toml:2: ") && said.iter().any(|line| line.starts_with("gpupool.toml:3: ")),
        "{said:?}"
    );
}

#[test]
fn keys_in_the_wrong_place_lead_to_the_right_one() {
    for (text, meant) in [
        ("port = 1", "server.port"),
        ("HOST = 'x'", "server.host"),
        ("[server]\nrefresh_interval = 1", "monitoring.refresh_interval"),
        ("[gpu]\nx = 1", "monitoring"),
        ("[quota.alice]\ngpus = 1", "quota.owners.alice"),
        ("[quota]\ngpus = 1", "quota.default.gpus"),
        ("[[policies]]\nname = 'x'", "policy"),
        ("[[policy]]\nmax_fracton = 0.5", "policy[0].max_fraction"),
        ("[default_policy]\nmin_fractoin = 0.5", "default_policy.min_fraction"),
    ] {
        let said = wrong(&from_file(text)).join("\n");
        assert!(said.ends_with(&format!("did you mean {meant}?")), "{text}: {said}");
    }
    let said = wrong(&from_flags(FlagValues::default().set("--prot", Some(1)))).join("\n");
    assert_eq!(said, "--prot: nobody knows this key; did you mean server.port?");
}

#[test]
fn settings_that_cannot_be_together_are_refused() {
    for (text, part) in [
        ("server.tls_cert = 'c.pem'", "gpupool.toml:1: server.tls_cert: a certificate without its key"),
        ("server.tls_key = 'k.pem'", "a key without its certificate"),
        (
            "[leases]\ndefault_ttl_secs = '2h'\nmax_ttl_secs = '1h'",
            "gpupool.toml:2: leases.default_ttl_secs: 7200 s is above",
        ),
        ("api.docs_url = '/redoc'", "/redoc is api.docs_url already"),
        (
            "[[policy]]\nmin_fraction = 0.8\nmax_fraction = 0.5",
            "gpupool.toml:2: policy[0].min_fraction: min_fraction 0.8 is above max_fraction 0.5",
        ),
        ("[[policy]]\nmax_fraction = 0.05", "gpupool.toml:1: policy[0].min_fraction: min_fraction 0.1 is above"),
    ] {
        let said = wrong(&from_file(text)).join("\n");
        assert!(said.contains(part), "{text}: {said}");
    }
}

#[test]
fn a_section_that_is_no_section_and_a_number_where_a_text_belongs_are_told() {
    let said = wrong(&from_file("server = 5\nclient.endpoint = 5\napi.title = true\nserver_x = { }")).join("\n");
    for part in ["it must be a section that begins with [server]", "client.endpoint: 5 is", "api.title: true is"] {
        assert!(said.contains(part), "{said}");
    }
}
