//! `gpupool config`, `gpupool completions`, and the confinement in `gpupool doctor`.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::support::{FinishedCommand, command_in, skipped};

#[test]
fn config_show_prints_the_origin_of_each_value() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("gpupool.toml");
    fs::write(&file, "[server]\nport = 9000\n").unwrap();
    let file = file.to_str().unwrap();
    let mut command = command_in(home.path(), &["config", "show", "--config", file]);
    command.env("REFRESH_INTERVAL", "0.5").env("GPUPOOL_TOKEN", "hush");
    let text = FinishedCommand::run(&mut command).success();
    let row = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("no {key}: {text}"));
    assert!(row("server.port ").contains("9000") && row("server.port ").contains("gpupool.toml"), "{text}");
    assert!(row("monitoring.refresh_interval ").contains("REFRESH_INTERVAL"), "{text}");
    assert!(row("client.token ").contains("(hidden)") && !text.contains("hush"), "{text}");
    let json =
        FinishedCommand::run(&mut command_in(home.path(), &["config", "show", "--json", "--config", file])).json();
    assert!(json.to_string().contains("9000"), "{json}");
    FinishedCommand::run(&mut command_in(home.path(), &["config", "show", "--config", "/nowhere.toml"]))
        .fails(1, &["/nowhere.toml"]);
}

#[test]
fn config_check_reports_mistakes_and_exits_with_1() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("gpupool.toml");
    fs::write(&file, "[server]\nprot = 9000\n").unwrap();
    let file = file.to_str().unwrap();
    let printed = FinishedCommand::run(&mut command_in(home.path(), &["config", "check", "--config", file]));
    assert_eq!(printed.code, Some(1), "{printed:#?}");
    assert!(
        printed.out.contains("prot") && printed.out.contains("port") && printed.out.contains("to do:"),
        "{printed:#?}"
    );
    let printed = FinishedCommand::run(&mut command_in(home.path(), &["config", "check", "--json", "--config", file]));
    let json: serde_json::Value = serde_json::from_str(&printed.out).unwrap();
    assert_eq!((printed.code, &json["findings"][0]["code"]), (Some(1), &"unknown_key".into()), "{json}");
    fs::write(file, "[server]\nport = 0\n").unwrap();
    FinishedCommand::run(&mut command_in(home.path(), &["config", "check", "--config", file])).success();
}

#[test]
fn every_shell_can_parse_its_completions() {
    let home = TempDir::new().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = FinishedCommand::run(&mut command_in(home.path(), &["completions", shell])).success();
        assert!(script.contains("acquire") && script.contains("simulate"), "{shell}: {script}");
        let path = home.path().join(shell);
        fs::write(&path, script).unwrap();
        if !["bash", "zsh", "fish"].contains(&shell) {
            continue;
        }
        match Command::new(shell).arg("-n").arg(&path).output() {
            Ok(read) => assert!(read.status.success(), "{shell}: {read:?}"),
            Err(error) => skipped(&format!("reading the completions of {shell}"), &error.to_string()),
        }
    }
    FinishedCommand::run(&mut command_in(home.path(), &["completions", "tcsh"])).fails(2, &["tcsh", "bash"]);
}

#[test]
fn doctor_reports_confinement_and_limits() {
    let home = TempDir::new().unwrap();
    let text = FinishedCommand::run(&mut command_in(home.path(), &["doctor"])).out;
    let reported = text.lines().find_map(|line| line.strip_prefix("Jobs are confined by: "));
    let reported = reported.unwrap_or_else(|| panic!("{text}")).trim_end_matches('.');
    let json: serde_json::Value =
        serde_json::from_str(&FinishedCommand::run(&mut command_in(home.path(), &["doctor", "--json"])).out).unwrap();
    assert_eq!(json["confinement"], reported);
    let limits = json["limits"].as_array().unwrap();
    let names: Vec<&str> = limits.iter().map(|limit| limit["limit"].as_str().unwrap()).collect();
    assert_eq!(names, ["host memory", "processes", "CPU time", "GPU memory"]);
    let (_, shown) = text.split_once("Limits on jobs:\n").unwrap_or_else(|| panic!("{text}"));
    for (limit, line) in limits.iter().zip(shown.lines()) {
        assert!(["kernel", "looking", "nothing"].contains(&limit["by"].as_str().unwrap()), "{limit}");
        assert!(line.ends_with(limit["how"].as_str().unwrap()), "{line:?} does not contain {limit}");
    }
    assert!(json["findings"].is_array(), "{json}");
}
