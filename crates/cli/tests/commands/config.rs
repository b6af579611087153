//! `gpupool config`, `gpupool completions` and what `gpupool doctor` says of confinement.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::support::{Said, at_home, skipped};

#[test]
fn config_show_tells_where_each_value_came_from() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("gpupool.toml");
    fs::write(&file, "[server]\nport = 9000\n").unwrap();
    let file = file.to_str().unwrap();
    let mut command = at_home(home.path(), &["config", "show", "--config", file]);
    command.env("REFRESH_INTERVAL", "0.5").env("GPUPOOL_TOKEN", "hush");
    let text = Said::of(&mut command).fine();
    let row = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("no {key}: {text}"));
    assert!(row("server.port ").contains("9000") && row("server.port ").contains("gpupool.toml"), "{text}");
    assert!(row("monitoring.refresh_interval ").contains("REFRESH_INTERVAL"), "{text}");
    assert!(row("client.token ").contains("(hidden)") && !text.contains("hush"), "{text}");
    let json = Said::of(&mut at_home(home.path(), &["config", "show", "--json", "--config", file])).json();
    assert!(json.to_string().contains("9000"), "{json}");
    Said::of(&mut at_home(home.path(), &["config", "show", "--config", "/nowhere.toml"])).failed(1, &["/nowhere.toml"]);
}

#[test]
fn config_check_finds_mistakes_and_ends_with_one() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("gpupool.toml");
    fs::write(&file, "[server]\nprot = 9000\n").unwrap();
    let file = file.to_str().unwrap();
    let said = Said::of(&mut at_home(home.path(), &["config", "check", "--config", file]));
    assert_eq!(said.code, Some(1), "{said:#?}");
    assert!(said.out.contains("prot") && said.out.contains("port") && said.out.contains("to do:"), "{said:#?}");
    let said = Said::of(&mut at_home(home.path(), &["config", "check", "--json", "--config", file]));
    let json: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((said.code, &json["findings"][0]["code"]), (Some(1), &"unknown_key".into()), "{json}");
    fs::write(file, "[server]\nport = 0\n").unwrap();
    Said::of(&mut at_home(home.path(), &["config", "check", "--config", file])).fine();
}

#[test]
fn every_shell_gets_completions_it_can_read() {
    let home = TempDir::new().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = Said::of(&mut at_home(home.path(), &["completions", shell])).fine();
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
    Said::of(&mut at_home(home.path(), &["completions", "tcsh"])).failed(2, &["tcsh", "bash"]);
}

#[test]
fn doctor_says_which_confinement_is_in_force() {
    let home = TempDir::new().unwrap();
    let text = Said::of(&mut at_home(home.path(), &["doctor"])).out;
    let told = text.lines().find_map(|line| line.strip_prefix("Jobs are confined by: "));
    let told = told.unwrap_or_else(|| panic!("{text}")).trim_end_matches('.');
    let json: serde_json::Value =
        serde_json::from_str(&Said::of(&mut at_home(home.path(), &["doctor", "--json"])).out).unwrap();
    assert_eq!(json["confinement"], told);
    let limits = json["limits"].as_array().unwrap();
    let names: Vec<&str> = limits.iter().map(|limit| limit["limit"].as_str().unwrap()).collect();
    assert_eq!(names, ["host memory", "processes", "CPU time", "GPU memory"]);
    let (_, shown) = text.split_once("Their limits are kept:\n").unwrap_or_else(|| panic!("{text}"));
    for (limit, line) in limits.iter().zip(shown.lines()) {
        assert!(["kernel", "looking", "nothing"].contains(&limit["by"].as_str().unwrap()), "{limit}");
        assert!(line.ends_with(limit["how"].as_str().unwrap()), "{line:?} does not tell {limit}");
    }
    assert!(json["findings"].is_array(), "{json}");
}
