//! `gpupool kube check` through the real binary.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use gpupool_core::{Request, RequestBody, RequestedAmount};
use serde_json::{Value, json};

fn gpupool(args: &[&str], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_gpupool"))
        .args(args)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The program may have refused its arguments and exited before it reads.
    let _ = child.stdin.take().expect("a pipe").write_all(stdin);
    child.wait_with_output().expect("the binary ends")
}

fn check(file: &str) -> (Option<i32>, String) {
    let output = gpupool(&["kube", "check", file], b"");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

fn check_json(file: &str) -> (Option<i32>, Value) {
    let output = gpupool(&["kube", "check", file, "--json"], b"");
    (output.status.code(), serde_json::from_slice(&output.stdout).expect("JSON"))
}

#[test]
fn a_valid_pod_prints_one_sentence_and_exits_with_0() {
    let (code, printed) = check("half_amd.yaml");
    assert_eq!(
        printed,
        "pod default/gpu-workload: requests 0.5 of 1 GPU (amd), 4000 MiB of its memory, isolation none, 2 CPUs, 8192 MiB \
         host memory\n"
    );
    assert_eq!(code, Some(0));
}

#[test]
fn every_document_is_checked_and_one_error_exits_with_1() {
    let (code, printed) = check("mixed.yaml");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 4, "{printed}");
    assert_eq!(lines[0], "deployment prod/serve: requests 2 GPUs (nvidia), whole, isolation none, priority 10");
    assert_eq!(lines[1], "pod default/web: requests no GPU");
    assert!(
        lines[2].starts_with(
            "pod default/greedy: error: annotation kaiwo.ai/gpu-fraction: \"1.5\" is not allowed; it must be "
        ),
        "{}",
        lines[2]
    );
    assert!(lines[3].starts_with("raycluster default/front: error: kind:"), "{}", lines[3]);
    assert_eq!(code, Some(1));
}

#[test]
fn isolation_that_amd_lacks_is_refused_with_the_alternatives() {
    let (code, printed) = check("mps_on_amd.yaml");
    for word in ["kaiwo.ai/gpu-isolation", "mps", "amd.com/gpu", "none or time-slicing"] {
        assert!(printed.contains(word), "no {word} in: {printed}");
    }
    assert_eq!(code, Some(1));
}

#[test]
fn malformed_yaml_is_reported_by_line_and_column() {
    let (code, printed) = check("broken.yaml");
    assert!(printed.starts_with("document 1: error: ") && printed.contains("line "), "{printed}");
    assert_eq!(code, Some(1));
}

#[test]
fn json_contains_a_request_that_the_pool_accepts() {
    let (code, answers) = check_json("shared.json");
    assert_eq!(code, Some(0));
    let answer = &answers[0];
    assert_eq!(
        (&answer["document"], &answer["kind"], &answer["namespace"], &answer["name"], &answer["verdict"]),
        (&json!(1), &json!("Pod"), &json!("research"), &json!("notebook"), &json!("gpu"))
    );
    assert_eq!(
        answer["request"],
        json!({
            "gpus": 1, "sharing": true, "isolation": "none", "cpus": 0.0, "host_memory_mib": 0, "owner": "research",
            "worker_id": "notebook", "labels": {"team": "vision"}, "priority": 0, "max_duration_secs": 3600.0,
        })
    );
    let body: RequestBody = serde_json::from_value(answer["request"].clone()).unwrap();
    assert_eq!(Request::try_from(body).unwrap().amount, RequestedAmount::Shared);
}

#[test]
fn json_errors_have_separate_parts() {
    let (code, answers) = check_json("mixed.yaml");
    assert_eq!(code, Some(1));
    let verdicts: Vec<&Value> = answers.as_array().unwrap().iter().map(|answer| &answer["verdict"]).collect();
    assert_eq!(verdicts, ["gpu", "no_gpu", "error", "error"]);
    let error = &answers[2]["error"];
    assert_eq!(error["code"], "invalid_annotation");
    assert_eq!(error["field"], "kaiwo.ai/gpu-fraction");
    assert_eq!(error["value"], "1.5");
    assert!(error["allowed"].as_str().unwrap().contains("0.1 to 1.0"));
    assert!(error["message"].as_str().unwrap().starts_with("annotation kaiwo.ai/gpu-fraction"));
    assert!(answers[1].get("request").is_none() && answers[2].get("request").is_none());
}

#[test]
fn a_dash_reads_standard_input() {
    let manifest = include_bytes!("../fixtures/half_amd.yaml");
    let output = gpupool(&["kube", "check", "-"], manifest);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("0.5 of 1 GPU (amd)"));
}

#[test]
fn an_unreadable_file_exits_with_1_and_a_remedy() {
    let output = gpupool(&["kube", "check", "missing.yaml"], b"");
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(printed.contains("missing.yaml") && printed.contains("give the path of a manifest"), "{printed}");
    let output = gpupool(&["kube", "check", "-"], b"\xff\xfe\x00");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("UTF-8"));
}

#[test]
fn an_empty_manifest_is_an_error() {
    let output = gpupool(&["kube", "check", "-", "--json"], b"---\n# nothing\n");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stdout, b"[]\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no document"));
}

#[test]
fn wrong_usage_is_exit_2() {
    for args in
        [&["kube", "check"] as &[&str], &["kube"], &["kube", "chekc", "a"], &["kube", "check", "a", "--yaml"], &[]]
    {
        assert_eq!(gpupool(args, b"").status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_huge_or_hostile_manifest_is_refused_at_once() {
    let long = vec![b'#'; 3 << 20];
    let output = gpupool(&["kube", "check", "-"], &long);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1048576"), "{output:?}");
    let mut laughs = "kind: Pod\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..20 {
        let before = format!("*a{}", level - 1);
        laughs += &format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(", "));
    }
    let output = gpupool(&["kube", "check", "-"], laughs.as_bytes());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("aliases"), "{output:?}");
}

#[test]
fn names_from_a_manifest_cannot_control_the_terminal() {
    let manifest = b"kind: Pod\nmetadata: {name: \"\\e[31mred\"}\nspec: {containers: [{name: a}]}\n";
    let output = gpupool(&["kube", "check", "-"], manifest);
    assert!(!output.stdout.contains(&0x1b), "{output:?}");
}
