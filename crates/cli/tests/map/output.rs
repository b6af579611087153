//! Output of tasks is complete, unchanged and grouped by task.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::support::{BackgroundCommand, map, run_map, with_input};

#[test]
fn the_lines_of_a_task_stay_together() {
    let line = "for n in 1 2 3 4 5; do echo {}-$n; sleep 0.01; done; echo {}-error >&2";
    let reported = run_map(&["-j4", line, ":::", "a", "b", "c", "d"]);
    let err: Vec<&str> = reported.err.lines().filter(|line| line.ends_with("-error")).collect();
    assert_eq!(err.len(), 4, "{reported:#?}");
    let out = reported.success();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 20, "{out}");
    for group in lines.chunks(5) {
        let task = &group[0][..1];
        let expected: Vec<String> = (1..=5).map(|n| format!("{task}-{n}")).collect();
        assert_eq!(group, expected, "{out}");
    }
}

#[test]
fn bytes_are_unchanged() {
    let out = run_map(&["-k", r"printf '\000\377\r\n{}\001'", ":::", "a", "b"]).bytes;
    assert_eq!(out, b"\0\xff\r\na\x01\0\xff\r\nb\x01");
}

#[test]
fn a_task_can_write_a_hundred_mebibytes() {
    let reported = run_map(&["-j2", "yes {} | head -c 104857600", ":::", "0123456"]);
    assert_eq!((reported.code, reported.bytes.len()), (Some(0), 100 << 20), "{}", reported.err);
    assert!(reported.bytes.chunks(8).all(|line| line == b"0123456\n"));
}

#[test]
fn a_closed_output_ends_the_run_quietly() {
    let mut command = map(&["-q", "-j2", "echo {}; exec sleep 0.01"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // The source is endless; only the closed output ends the run.
    let feeder = std::thread::spawn(move || while std::io::Write::write_all(&mut input, b"line\n").is_ok() {});
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "line\n");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
    feeder.join().unwrap();
}

#[test]
fn each_line_is_tagged() {
    assert_eq!(run_map(&["-k", "--tag", "printf '{}\\nx'", ":::", "a b", "c"]).success(), "a b\ta b\na b\txc\tc\nc\tx");
}

#[test]
fn ungrouped_output_appears_at_once() {
    let mut running = BackgroundCommand::start(map(&["-u", "-j1", "-q", "echo early; exec sleep {}", ":::", "600"]));
    running.wait_for_output("early");
    running.signal(gpupool_confine::Signal::INT);
    assert_eq!(running.code(), 130);
}

#[test]
fn events_are_lines_of_json_and_the_last_is_a_summary() {
    let line = "echo out {}; echo err >&2; exit {}";
    let out = run_map(&["--json", "-k", "--retries", "1", line, ":::", "0", "3"]).with(1);
    let events: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| events.iter().filter(|event| event["event"] == kind).collect::<Vec<_>>();
    let over = of("over");
    assert_eq!(
        (&over[0]["seq"], &over[0]["outcome"], &over[0]["stdout"]),
        (&1.into(), &"done".into(), &"out 0\n".into())
    );
    let failed = over[1];
    assert_eq!(
        (&failed["argument"], &failed["outcome"], &failed["exit_code"]),
        (&"3".into(), &"failed".into(), &3.into())
    );
    assert_eq!(
        (&failed["tries"], &failed["stderr"], &failed["why"]),
        (&2.into(), &"err\n".into(), &"exit code 3".into())
    );
    assert_eq!((of("retried").len(), of("started").len()), (1, 3), "{out}");
    assert!(!of("ready").is_empty());
    let last = events.last().unwrap();
    let facts = ["event", "completed", "failed", "retried", "exit_code"].map(|name| last[name].to_string());
    assert_eq!(facts, ["\"summary\"", "1", "1", "1", "1"], "{last}");
}

#[test]
fn quiet_prints_nothing_and_otherwise_failures_are_summarized() {
    let line = "echo one >&2; echo two >&2; exit {}";
    let reported = run_map(&["-q", "true", ":::", "a"]);
    assert_eq!((reported.err.as_str(), reported.code), ("", Some(0)));
    run_map(&["-k", line, ":::", "0", "7"])
        .reports(1, &["task 2 (7): exit code 7", "    two", "done 1, failed 1, timeouts 0"]);
    let many = with_input(map(&["false"]), "x\n".repeat(9).as_bytes());
    many.reports(1, &["and 4 more failed", "failed 9"]);
}
