//! Limits are enforced, and only the task that exceeds one is affected.

use crate::support::run_map;

#[test]
fn a_task_above_its_time_limit_is_terminated_then_killed() {
    let polite = "trap 'echo tidied; exit 1' TERM; sleep {} & wait; echo done {}";
    let out = run_map(&["-k", "-j1", "--timeout", "500ms", polite, ":::", "600", "0"]);
    assert_eq!(
        out.reports(1, &["task 1 (600): exceeded the time limit of 500 ms", "timeouts 1"]).with(1),
        "tidied\ndone 0\n"
    );
    let stubborn = "if [ {} = x ]; then trap '' TERM; while :; do sleep 600; done; fi; echo {}";
    let out = run_map(&["-k", "-j1", "--timeout", "300ms", "--kill-after", "100ms", stubborn, ":::", "x", "y"]);
    assert_eq!(out.reports(1, &["timeouts 1"]).with(1), "y\n");
}

#[test]
fn a_task_above_its_memory_limit_is_killed() {
    let hog = "python3 -c 'import sys; x = bytearray(int(sys.argv[1]) << 20); print(len(x) >> 20)' {}";
    let out = run_map(&["-k", "-j1", "--worker-memory", "100MiB", hog, ":::", "400", "1"]);
    assert_eq!(out.reports(1, &["task 1 (400)", "host memory", "failed 1"]).with(1), "1\n");
}

#[test]
fn a_task_above_its_cpu_time_limit_is_killed() {
    let line = "if [ {} = x ]; then while :; do :; done; fi; echo {}";
    let out = run_map(&["-k", "-j1", "--cpu-time", "300ms", line, ":::", "x", "y"]);
    assert_eq!(out.reports(1, &["CPU time", "failed 1"]).with(1), "y\n");
}

#[test]
fn a_task_above_its_process_limit_fails() {
    let line = "for n in $(seq {}); do sleep 600 & done; echo {}";
    let out = run_map(&["-k", "-j1", "--processes", "20", line, ":::", "200", "1"]);
    let out = out.with(1);
    assert!(out.ends_with("1\n"), "{out}");
}
