//! Early ends of a run: --halt and signals; and retries.

use gpupool_confine::Signal;

use crate::support::{BackgroundCommand, ObservedProcess, map, run_map};

#[test]
fn a_run_is_halted_when_the_condition_is_met() {
    let run =
        |halt: &str, line: &str| run_map(&["-j1", "-k", "--halt", halt, line, ":::", "0", "1", "0", "0", "1", "0"]);
    let line = "echo {#}; exit {}";
    assert_eq!(run("now,fail=1", line).reports(1, &["--halt fail=1", "cancelled 4"]).with(1), "1\n2\n");
    assert_eq!(run("soon,fail=2", line).reports(1, &["--halt fail=2"]).with(1), "1\n2\n3\n4\n5\n");
    assert_eq!(run("soon,success=2", line).with(0), "1\n2\n3\n");
    assert_eq!(run("now,done=1", line).with(0), "1\n");
    assert_eq!(run("never", line).with(1), "1\n2\n3\n4\n5\n6\n");
    assert_eq!(run("soon,fail=40%", "echo {#}; false").with(1), "1\n2\n3\n", "a percentage needs three");
}

#[test]
fn halt_now_kills_running_tasks_and_soon_lets_them_finish() {
    let line = "if [ {} = 1 ]; then sleep 0.2; exit 1; fi; sleep {}; echo ended {}";
    let now = run_map(&["-j2", "--halt", "now,fail=1", line, ":::", "1", "600"]);
    assert_eq!(now.reports(1, &["cancelled 1"]).with(1), "");
    let soon = run_map(&["-j2", "--halt", "soon,fail=1", line, ":::", "1", "0.6", "600"]);
    assert_eq!(soon.reports(1, &["cancelled 1"]).with(1), "ended 0.6\n");
}

#[test]
fn an_interrupt_stops_everything_at_once() {
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129)] {
        let line = ": {}; echo $$; sleep 600 & echo $!; wait";
        let mut running = BackgroundCommand::start(map(&["-u", "-q", "-j2", line, ":::", "a", "b"]));
        let processes: Vec<ObservedProcess> =
            (0..4).map(|_| ObservedProcess::of(&running.wait_for_output(""))).collect();
        running.signal(signal);
        assert_eq!(running.code(), code);
        processes.iter().for_each(ObservedProcess::wait_for_exit);
    }
}

#[test]
fn sigterm_lets_running_tasks_finish_and_a_second_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let line = format!("echo begun; while ! test -e {}; do sleep 0.01; done; echo ended", go.display());
    let start = || {
        let mut running = BackgroundCommand::start(map(&["-u", "-j1", &line, ":::", "a", "b", "c"]));
        running.wait_for_output("begun");
        running.signal(Signal::TERM);
        running.wait_for_message("stopping after the running tasks");
        running
    };
    let running = start();
    std::fs::write(&go, "").unwrap();
    let (code, output, messages) = running.ended();
    assert_eq!(code, 143, "{messages}");
    assert_eq!((output.matches("begun").count(), output.matches("ended").count()), (1, 1), "{output}");
    assert!(messages.contains("cancelled 2"), "{messages}");
    std::fs::remove_file(&go).unwrap();
    let mut running = start();
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143);
}

#[test]
fn failed_tasks_are_retried() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("echo x >> {0}/{{}}; test $(wc -l < {0}/{{}}) -ge 3", dir.path().display());
    run_map(&["--retries", "2", &line, ":::", "a"]).reports(0, &["retried 2"]);
    run_map(&["--retries", "1", &line, ":::", "b"]).reports(1, &["retried 1", "task 1 (b): exit code 1"]);
}

#[test]
fn a_blocked_source_does_not_delay_an_interrupt() {
    let mut running = BackgroundCommand::start(map(&["-u", "-q", "echo {}"]));
    running.send_keys(b"a\n");
    running.wait_for_output("a");
    running.signal(Signal::INT);
    assert_eq!(running.code(), 130);
}
