//! `config check` reports likely mistakes.

use gpupool_config::{
    ConfigInputs, ConfigSeverity, FileFact, MachineFacts, PortFact, check_config, findings_as_json, findings_as_text,
};

use super::{finding_codes, findings, from_env, from_file};

#[test]
fn a_good_configuration_has_no_findings() {
    assert_eq!(findings(&from_env(&[])), []);
    assert_eq!(findings_as_text(&[]), "No problems found.\n");
}

#[test]
fn each_common_mistake_has_its_finding() {
    for (text, code) in [
        ("server.host = '0.0.0.0'", "network_without_tls"),
        ("server.host = '::'\nserver.allow_plain_http = true", "plain_http_tokens"),
        ("server.host = '0.0.0.0'\nserver.open = true\nserver.tls_cert = 'c'\nserver.tls_key = 'k'", "open_with_tls"),
        ("server.open = true", "open_on_loopback"),
        ("server.workers = 4", "no_effect"),
        ("monitoring.refresh_interval = 0.05", "refresh_often"),
        ("monitoring.refresh_interval = '10m'", "refresh_seldom"),
        ("monitoring.cuda_visible_devices = '0,banana'", "bad_visible_devices"),
        ("monitoring.cuda_visible_devices = ''", "no_visible_devices"),
        ("monitoring.simulate = '1xH100'\nmonitoring.backend = 'amd'", "backend_unused"),
        ("client.memory_threshold_percent = 0", "threshold_zero"),
        ("client.token = 'abc'\nclient.endpoint = 'http://gpu-box:8000'", "token_without_tls"),
        ("client.endpoint = 'http://a'\nclient.endpoints = ['http://b']", "endpoint_twice"),
        ("[[policy]]\nname = 'all'\n[[policy]]\nname = 'ann'\nowners = ['ann']", "policy_unreachable"),
        ("[[policy]]\nname = 'a'\nowners = ['a']\n[[policy]]\nname = 'a'\nowners = ['b']", "policy_name_twice"),
        ("[[policy]]\nowners = []", "policy_empty_list"),
        ("[quota.owners.ann]", "quota_says_nothing"),
        ("[quota.owners.ann]\ngpus = 0", "quota_zero"),
        ("[quota.owners.ann]\nweight = 2", "weight_unused"),
        ("server.prot = 1", "unknown_key"),
        ("server.port = 'x'", "bad_value"),
        ("server.tls_key = 'x'", "contradiction"),
        ("server.port =", "syntax"),
    ] {
        let found = findings(&from_file(text));
        assert_eq!(finding_codes(&found), [code], "{text}\n{}", findings_as_text(&found));
    }
}

#[test]
fn valid_settings_have_no_findings() {
    for text in [
        "server.host = '0.0.0.0'\nserver.open = true",
        "server.host = '0.0.0.0'\nserver.tls_cert = 'c'\nserver.tls_key = 'k'",
        "server.host = '::1'",
        "monitoring.cuda_visible_devices = '0, 1 GPU-5f3c MIG-GPU-5f3c/1/0 MIG-0aa1'",
        "client.token = 'abc'\nclient.endpoint = 'http://[::1]:8000'",
        "client.token = 'abc'\nclient.endpoint = 'https://gpu-box'",
        "[[policy]]\nname = 'ann'\nowners = ['ann']\n[[policy]]\nname = 'all'",
        "queue.order = 'fair-share'\n[quota.owners.ann]\nweight = 2",
    ] {
        assert_eq!(findings(&from_file(text)), [], "{text}");
    }
}

#[test]
fn misspelled_variables_are_reported_and_those_of_other_programs_are_not() {
    for (name, meant) in [
        ("GPU_MEMORY_TRESHOLD_PERCENT", "GPU_MEMORY_THRESHOLD_PERCENT"),
        ("GPUPOOL_STATEDIR", "GPUPOOL_STATE_DIR"),
        ("GPUPOOL_PORT", "PORT"),
        ("GPUPOOL_ENDPOINT", "GPU_SERVICE_ENDPOINT"),
        ("GPU_POOL_STATE_DIR", "GPUPOOL_STATE_DIR"),
        ("LOGLEVEL", "LOG_LEVEL"),
        ("REFRESH_INTERVALL", "REFRESH_INTERVAL"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
    ] {
        let found = findings(&from_env(&[(name, "1")]));
        assert_eq!(finding_codes(&found), ["variable_misspelled"], "{name}");
        assert!(found[0].remedy.contains(&format!("Rename it to {meant},")), "{name}: {}", found[0].remedy);
    }
    let others = [
        ("HOSTNAME", "x"),
        ("PORTS", "1"),
        ("HIP_VISIBLE_DEVICES", "0"),
        ("ROCR_VISIBLE_DEVICES", "0"),
        ("GPUPOOL_SYS", "/s"),
        ("GPUPOOL_CLAIMS", "/c"),
        ("GPUPOOL_PORT", "tcp://10.0.0.1:80"),
        ("GPUPOOL_LEASE_ID", "7"),
        ("GPUPOOL_ID", "7"),
        ("GPUPOOL_CONFIG", "/x"),
        ("WORKER_ID", "3"),
        ("LOG_FILE", "x"),
    ];
    assert_eq!(findings(&from_env(&others)), []);
}

#[test]
fn a_variable_and_its_alias_with_different_values_are_reported() {
    let found = findings(&from_env(&[("GPU_POLLING_INTERVAL", "1"), ("GPU_POLLING_INTERVAL_SECONDS", "2")]));
    assert_eq!(finding_codes(&found), ["variable_twice"]);
    assert!(found[0].what.contains("GPU_POLLING_INTERVAL is used"));
    assert_eq!(findings(&from_env(&[("GPU_POLLING_INTERVAL", "1"), ("GPU_POLLING_INTERVAL_SECONDS", "1")])), []);
}

#[test]
fn facts_of_the_machine_are_reported_worst_first() {
    let key = FileFact::Readable { path: "/k.pem".into(), others_can_read: true };
    let mut facts = MachineFacts {
        port: PortFact::InUse { by: Some("python3 (pid 12)".into()) },
        tls_key: key.clone(),
        config_file: key,
        ..MachineFacts::default()
    };
    facts.tls_cert = FileFact::Unreadable { path: "/c.pem".into(), why: "not found".into() };
    facts.state_dir.network = Some("NFS");
    facts.state_dir.not_writable = Some("/x: read-only".into());
    let inputs = from_file("server.tls_cert = '/c.pem'\nserver.tls_key = '/k.pem'\nclient.token = 'abc'");
    let found = check_config(&inputs, |_| facts);
    let expected = [
        "file_unreadable",
        "state_dir_not_writable",
        "port_in_use",
        "key_readable",
        "token_readable",
        "state_dir_on_network",
    ];
    assert_eq!(finding_codes(&found), expected);
    assert!(found[..2].iter().all(|finding| finding.severity == ConfigSeverity::Error));
    let text = findings_as_text(&found);
    for part in ["by python3 (pid 12)", "to do: chmod 600 /k.pem", "where: server.tls_key (gpupool.toml:2)"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(findings_as_json(&found)["findings"][0]["severity"], "error");
}

#[test]
fn a_port_in_use_and_missing_files_are_found_on_this_machine() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let state = tempfile::tempdir().unwrap();
    let missing = state.path().join("missing.pem");
    let text = format!(
        "[server]\nport = {}\nstate_dir = {:?}\ntls_cert = {missing:?}\ntls_key = {missing:?}",
        taken.local_addr().unwrap().port(),
        state.path()
    );
    let inputs: ConfigInputs = from_file(&text);
    let found = check_config(&inputs, |loaded| MachineFacts::gather(loaded, &inputs));
    let mut finding_codes = finding_codes(&found);
    // The temporary directory of this machine may be on a network file system.
    finding_codes.retain(|code| *code != "state_dir_on_network");
    assert_eq!(finding_codes, ["file_unreadable", "file_unreadable", "port_in_use"], "{}", findings_as_text(&found));
}
