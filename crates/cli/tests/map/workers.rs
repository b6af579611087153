//! Workers that are started once: by lines, and by the documented protocol.

use std::fs;
use std::path::Path;

use crate::support::{map, run_map, with_input};

#[test]
fn a_hundred_thousand_lines_go_through_workers_in_order() {
    let input: String = (0..100_000).map(|n| format!("{n}\n")).collect();
    let reported = with_input(map(&["-k", "-j2", "--speaks", "lines", "cat"]), input.as_bytes());
    assert!(reported.bytes == input.as_bytes(), "{} bytes of {}: {}", reported.bytes.len(), input.len(), reported.err);
    assert_eq!(reported.code, Some(0));
}

#[test]
fn the_example_of_the_documentation_is_a_worker() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/worker-protocol.md");
    let guide = fs::read_to_string(guide).unwrap();
    let example = guide.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("worker.py");
    fs::write(&file, example).unwrap();
    let line = format!("python3 {}", file.display());
    let out = run_map(&["-k", "-j2", "--tag", "--speaks", "frames", &line, ":::", "a", "b", "c"]).success();
    assert_eq!(out, "a\tA\nb\tB\nc\tC\n");
}

#[test]
fn a_worker_that_fails_to_start_is_reported() {
    run_map(&["-j1", "--speaks", "frames", "sh -c 'echo broken >&2; exit 3'", ":::", "a"])
        .reports(1, &["broken", "code 3"]);
    run_map(&["-j1", "--speaks", "frames", "--setup-timeout", "200ms", "sleep 600", ":::", "a"]).reports(1, &["200"]);
}
