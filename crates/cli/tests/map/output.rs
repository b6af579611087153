//! What tasks write comes out whole, unchanged, and a task at a time.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Running, map, said, with_input};

#[test]
fn the_lines_of_a_task_stay_together() {
    let line = "for n in 1 2 3 4 5; do echo {}-$n; sleep 0.01; done; echo {}-error >&2";
    let told = said(&["-j4", line, ":::", "a", "b", "c", "d"]);
    let err: Vec<&str> = told.err.lines().filter(|line| line.ends_with("-error")).collect();
    assert_eq!(err.len(), 4, "{told:#?}");
    let out = told.fine();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 20, "{out}");
    for group in lines.chunks(5) {
        let task = &group[0][..1];
        let expected: Vec<String> = (1..=5).map(|n| format!("{task}-{n}")).collect();
        assert_eq!(group, expected, "{out}");
    }
}

#[test]
fn bytes_are_not_touched() {
    let out = said(&["-k", r"printf '\000\377\r\n{}\001'", ":::", "a", "b"]).bytes;
    assert_eq!(out, b"\0\xff\r\na\x01\0\xff\r\nb\x01");
}

#[test]
fn a_hundred_mebibytes_of_one_task_come_out() {
    let told = said(&["-j2", "yes {} | head -c 104857600", ":::", "0123456"]);
    assert_eq!((told.code, told.bytes.len()), (Some(0), 100 << 20), "{}", told.err);
    assert!(told.bytes.chunks(8).all(|line| line == b"0123456\n"));
}

#[test]
fn whoever_stops_reading_ends_the_run_quietly() {
    let mut command = map(&["-q", "-j2", "echo {}; exec sleep 0.01"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // An endless source: only the closed output ends it.
    let feeder = std::thread::spawn(move || while std::io::Write::write_all(&mut input, b"line\n").is_ok() {});
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "line\n");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
    feeder.join().unwrap();
}

#[test]
fn a_tag_stands_before_each_line() {
    assert_eq!(said(&["-k", "--tag", "printf '{}\\nx'", ":::", "a b", "c"]).fine(), "a b\ta b\na b\txc\tc\nc\tx");
}

#[test]
fn without_groups_output_comes_at_once() {
    let mut running = Running::start(map(&["-u", "-j1", "-q", "echo early; exec sleep {}", ":::", "600"]));
    running.says("early");
    running.signal(gpupool_confine::Signal::INT);
    assert_eq!(running.code(), 130);
}

#[test]
fn events_are_lines_of_json_and_the_last_is_a_summary() {
    let line = "echo out {}; echo err >&2; exit {}";
    let out = said(&["--json", "-k", "--retries", "1", line, ":::", "0", "3"]).with(1);
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
fn quiet_says_nothing_and_else_failures_are_told_with_their_last_words() {
    let line = "echo one >&2; echo two >&2; exit {}";
    let told = said(&["-q", "true", ":::", "a"]);
    assert_eq!((told.err.as_str(), told.code), ("", Some(0)));
    said(&["-k", line, ":::", "0", "7"])
        .tells(1, &["task 2 (7): exit code 7", "    two", "done 1, failed 1, timeouts 0"]);
    let many = with_input(map(&["false"]), "x\n".repeat(9).as_bytes());
    many.tells(1, &["and 4 more failed", "failed 9"]);
}
