//! Limits hold, and the task that passes one is the only one that suffers.

use crate::support::said;

#[test]
fn a_task_that_takes_too_long_is_told_to_end_then_killed() {
    let polite = "trap 'echo tidied; exit 1' TERM; sleep {} & wait; echo done {}";
    let out = said(&["-k", "-j1", "--timeout", "500ms", polite, ":::", "600", "0"]);
    assert_eq!(out.tells(1, &["task 1 (600): it took longer than 500 ms", "timeouts 1"]).with(1), "tidied\ndone 0\n");
    let stubborn = "if [ {} = x ]; then trap '' TERM; while :; do sleep 600; done; fi; echo {}";
    let out = said(&["-k", "-j1", "--timeout", "300ms", "--kill-after", "100ms", stubborn, ":::", "x", "y"]);
    assert_eq!(out.tells(1, &["timeouts 1"]).with(1), "y\n");
}

#[test]
fn a_task_with_too_much_memory_is_ended() {
    let hog = "python3 -c 'import sys; x = bytearray(int(sys.argv[1]) << 20); print(len(x) >> 20)' {}";
    let out = said(&["-k", "-j1", "--worker-memory", "100MiB", hog, ":::", "400", "1"]);
    assert_eq!(out.tells(1, &["task 1 (400)", "host memory", "failed 1"]).with(1), "1\n");
}

#[test]
fn a_task_with_too_much_processor_time_is_ended() {
    let line = "if [ {} = x ]; then while :; do :; done; fi; echo {}";
    let out = said(&["-k", "-j1", "--cpu-time", "300ms", line, ":::", "x", "y"]);
    assert_eq!(out.tells(1, &["CPU time", "failed 1"]).with(1), "y\n");
}

#[test]
fn a_task_with_too_many_processes_is_ended_or_refused_more() {
    let line = "for n in $(seq {}); do sleep 600 & done; echo {}";
    let out = said(&["-k", "-j1", "--processes", "20", line, ":::", "200", "1"]);
    let out = out.with(1);
    assert!(out.ends_with("1\n"), "{out}");
}
