//! Mistakes are reported with place, value and allowed values, all at once.

use gpupool_config::{ConfigConsumer, ConfigInputs, FlagValues};

use super::{from_env, from_file, from_flags, loaded, problem_lines};

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = "[server]\nprot = 1\nport = 99999\nworkers = 'two'\n\n[sever]\nhost = 'x'\n";
    let inputs = ConfigInputs { env: from_env(&[("ACCESS_LOG", "maybe")]).env, ..from_file(text) };
    assert_eq!(
        problem_lines(&inputs),
        [
            "gpupool.toml:3: server.port: 99999 is not allowed; it must be a whole number from 0 to 65535",
            "ACCESS_LOG: \"maybe\" is not allowed; it must be true or false (also 1/0, yes/no, on/off)",
            "gpupool.toml:4: server.workers: \"two\" is not allowed; it must be a whole number from 1 to 1024",
            "gpupool.toml:2: server.prot: unknown key; did you mean server.port?",
            "gpupool.toml:6: sever: unknown key; did you mean server?",
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
        let printed = problem_lines(&from_env(&[(name, value)])).join("\n");
        assert!(
            printed.starts_with(&format!("{name}: \"{value}\" is not allowed")) && printed.contains(part),
            "{printed}"
        );
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
fn lenient_inputs_turn_client_problems_into_warnings() {
    let variables = [("GPU_MEMORY_THRESHOLD_PERCENT", "150"), ("GPU_ENDPOINT_MAX_RETRIES", "many")];
    let result = loaded(&ConfigInputs { lenient: true, ..from_env(&variables) });
    assert_eq!(result.config.client.memory_threshold_percent.as_number(), 80.0);
    assert_eq!((result.config.client.endpoint_max_retries, result.warnings.len()), (3, 2));
    let printed = problem_lines(&ConfigInputs { lenient: true, ..from_env(&[("PORT", "x")]) });
    assert!(printed[0].starts_with("PORT"), "{printed:?}");
}

#[test]
fn settings_that_a_command_does_not_use_are_not_checked() {
    let mut inputs = from_file("[server]\nprot = 1\n[[policy]]\nmax_memory = 1\n[client]\nendpoint_max_retries = 7");
    inputs.env = from_env(&[("PORT", "tcp://10.0.0.1:80")]).env;
    assert_eq!(problem_lines(&inputs).len(), 3);
    inputs.consumer = ConfigConsumer::Client;
    let result = loaded(&inputs);
    assert_eq!((result.config.client.endpoint_max_retries, result.warnings.len()), (7, 0));
    inputs.env = from_env(&[("GPU_ENDPOINT_MAX_RETRIES", "x"), ("GPUPOOL_STATE_DIR", "a\0b")]).env;
    assert_eq!(problem_lines(&inputs).len(), 2);
    let agent =
        ConfigInputs { consumer: ConfigConsumer::Agent, ..from_env(&[("GPU_SERVICE_ENDPOINT", "x"), ("PORT", "x")]) };
    let printed = problem_lines(&agent);
    assert!(printed.len() == 1 && printed[0].starts_with("PORT"), "{printed:?}");
    let flags = FlagValues::default().set("--nonsense", Some(1));
    assert_eq!(problem_lines(&ConfigInputs { consumer: ConfigConsumer::Client, ..from_flags(flags) }).len(), 1);
}

#[test]
fn a_secret_is_never_printed() {
    let printed = problem_lines(&from_env(&[("GPUPOOL_TOKEN", "hush hush")])).join("\n");
    assert!(printed.starts_with("GPUPOOL_TOKEN: (hidden) is not allowed") && !printed.contains("hush"), "{printed}");
    let result = loaded(&from_file("[client]\ntoken = 'quietly-please'"));
    assert_eq!(result.config.client.token.as_ref().unwrap().expose(), "quietly-please");
    let shown = format!("{}{}{:?}", result.as_text(), result.as_json(), result);
    assert!(!shown.contains("quietly-please") && shown.contains("(hidden)"), "{shown}");
}

#[test]
fn syntax_errors_are_reported_with_their_line() {
    let printed = problem_lines(&from_file("[server]\nport = \n[client\n"));
    assert!(
        printed[0].starts_with("gpupool.toml:2: ") && printed.iter().any(|line| line.starts_with("gpupool.toml:3: ")),
        "{printed:?}"
    );
}

#[test]
fn misplaced_keys_get_a_suggestion() {
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
        let printed = problem_lines(&from_file(text)).join("\n");
        assert!(printed.ends_with(&format!("did you mean {meant}?")), "{text}: {printed}");
    }
    let printed = problem_lines(&from_flags(FlagValues::default().set("--prot", Some(1)))).join("\n");
    assert_eq!(printed, "--prot: unknown key; did you mean server.port?");
}

#[test]
fn contradicting_settings_are_refused() {
    for (text, part) in [
        ("server.tls_cert = 'c.pem'", "gpupool.toml:1: server.tls_cert: a certificate without its key"),
        ("server.tls_key = 'k.pem'", "a key without its certificate"),
        (
            "[leases]\ndefault_ttl_secs = '2h'\nmax_ttl_secs = '1h'",
            "gpupool.toml:2: leases.default_ttl_secs: 7200 s is above",
        ),
        ("api.docs_url = '/redoc'", "/redoc is already used by api.docs_url"),
        (
            "[[policy]]\nmin_fraction = 0.8\nmax_fraction = 0.5",
            "gpupool.toml:2: policy[0].min_fraction: min_fraction 0.8 is above max_fraction 0.5",
        ),
        ("[[policy]]\nmax_fraction = 0.05", "gpupool.toml:1: policy[0].min_fraction: min_fraction 0.1 is above"),
    ] {
        let printed = problem_lines(&from_file(text)).join("\n");
        assert!(printed.contains(part), "{text}: {printed}");
    }
}

#[test]
fn values_of_the_wrong_type_are_reported() {
    let printed =
        problem_lines(&from_file("server = 5\nclient.endpoint = 5\napi.title = true\nserver_x = { }")).join("\n");
    for part in ["it must be a section that begins with [server]", "client.endpoint: 5 is", "api.title: true is"] {
        assert!(printed.contains(part), "{printed}");
    }
}
