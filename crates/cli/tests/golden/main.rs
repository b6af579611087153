//! Published names: routes and fields, metrics, settings, command-line options, event kinds, problem codes.
//!
//! Programs of other people depend on them, so a change of a list here is a breaking change. `GPUPOOL_WRITE_GOLDEN=1
//! cargo test --workspace --test golden` rewrites the lists.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use gpupool_config::all_settings;
use gpupool_testkit::TestAgent;
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_gpupool");

/// Compares `text` with a golden list, or rewrites the list.
fn compare_with_golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if env::var_os("GPUPOOL_WRITE_GOLDEN").is_some() {
        fs::write(&path, text).unwrap();
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    let (now, before): (BTreeSet<&str>, BTreeSet<&str>) = (text.lines().collect(), golden.lines().collect());
    let gone: Vec<_> = before.difference(&now).collect();
    let new: Vec<_> = now.difference(&before).collect();
    assert!(text == golden, "{name} changed\ngone: {gone:#?}\nnew: {new:#?}");
}

/// Sends a GET request over the agent's socket and returns the body.
fn get(agent: &TestAgent, path: &str) -> String {
    let url = format!("{}{path}", agent.address());
    let output = Command::new("curl").args(["-sSf", &url]).output().unwrap();
    assert!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn routes_and_fields_are_as_published() {
    let agent = TestAgent::builder(BINARY).start().await;
    let mut document: Value = serde_json::from_str(&get(&agent, "/openapi.json")).unwrap();
    remove_prose(&mut document);
    compare_with_golden("openapi.json", &format!("{document:#}\n"));
}

/// Removes descriptions; a field that is itself named `description` is an object and stays.
fn remove_prose(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, value| !(value.is_string() && ["description", "summary"].contains(&name.as_str())));
            fields.values_mut().for_each(remove_prose);
        }
        Value::Array(entries) => entries.iter_mut().for_each(remove_prose),
        _ => {}
    }
}

#[tokio::test]
async fn metrics_are_as_published() {
    let agent = TestAgent::builder(BINARY).simulate("1xH100,1xMI300X,1xH100/3g.40gb/1g.10gb*4").start().await;
    let status = Command::new(BINARY)
        .args(["run", "--fraction", "0.5", "--", "true"])
        .env("GPU_SERVICE_ENDPOINT", agent.address())
        .status();
    assert!(status.unwrap().success());
    let text = get(&agent, "/metrics");
    let mut metrics: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            metrics.entry(kind).or_default();
        } else if !line.starts_with('#') {
            let (name, labels) = line.split_once('{').unwrap_or((line, ""));
            let name = name.split(' ').next().unwrap();
            let labels =
                labels.split('}').next().unwrap().split(',').filter_map(|label| Some(label.split_once('=')?.0));
            metrics.entry(name).or_default().extend(labels);
        }
    }
    let lines = metrics.iter().map(|(name, labels)| {
        let labels: Vec<&str> = labels.iter().copied().collect();
        format!("{name} {{{}}}\n", labels.join(", "))
    });
    compare_with_golden("metrics.txt", &lines.collect::<String>());
}

#[test]
fn settings_are_as_published() {
    let lines = all_settings().iter().map(|setting| {
        let (env, flag) = (setting.env.join(" "), setting.flag.unwrap_or_default());
        format!("{} env=[{env}] flag=[{flag}] live={} secret={}\n", setting.key, setting.live, setting.secret)
    });
    compare_with_golden("settings.txt", &lines.collect::<String>());
}

#[test]
fn commands_and_options_are_as_published() {
    let mut text = String::new();
    list_options(&mut Vec::new(), &mut text);
    compare_with_golden("options.txt", &text);
}

/// Lists the options and arguments of a command and its subcommands, from their help.
fn list_options(command: &mut Vec<String>, text: &mut String) {
    let output = Command::new(BINARY).args(&*command).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    *text += &format!("gpupool {}\n", command.join(" "));
    let mut below = Vec::new();
    let mut section = "";
    for line in help.lines() {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        if indent == 0 {
            section = line;
        } else if section == "Commands:" && indent == 2 {
            below.extend(words.split(' ').next().filter(|name| *name != "help").map(str::to_owned));
        } else if words.starts_with('-') && indent <= 6 || section == "Arguments:" && indent == 2 {
            let option = words.split("  ").next().unwrap();
            *text += &format!("  {option}\n");
        }
    }
    for name in below {
        command.push(name);
        list_options(command, text);
        command.pop();
    }
}

#[test]
fn event_kinds_are_as_published() {
    check_names_in_source_and_docs("event-kinds.txt");
}

#[test]
fn problem_codes_are_as_published() {
    check_names_in_source_and_docs("problem-codes.txt");
}

/// Checks that each name of a list is a literal in the agent or its API and is explained in `docs/api.md`.
fn check_names_in_source_and_docs(list: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut source = String::new();
    for crate_name in ["agent", "api"] {
        for path in rust_files(&root.join("crates").join(crate_name).join("src")) {
            source += &fs::read_to_string(path).unwrap();
        }
    }
    let docs = fs::read_to_string(root.join("docs/api.md")).unwrap();
    let names = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(list)).unwrap();
    assert!(names.lines().count() > 5);
    for name in names.lines() {
        assert!(source.contains(&format!("\"{name}\"")), "{list}: {name} is not in the source");
        assert!(docs.contains(&format!("`{name}`")), "{list}: {name} is not in docs/api.md");
    }
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    files
}
