//! Ways to an early end: --halt, signals, retries; and what is left then.

use gpupool_confine::Signal;

use crate::support::{Running, Watched, map, said};

#[test]
fn halt_gives_up_when_it_is_due() {
    let run = |halt: &str, line: &str| said(&["-j1", "-k", "--halt", halt, line, ":::", "0", "1", "0", "0", "1", "0"]);
    let line = "echo {#}; exit {}";
    assert_eq!(run("now,fail=1", line).tells(1, &["--halt fail=1", "cancelled 4"]).with(1), "1\n2\n");
    assert_eq!(run("soon,fail=2", line).tells(1, &["--halt fail=2"]).with(1), "1\n2\n3\n4\n5\n");
    assert_eq!(run("soon,success=2", line).with(0), "1\n2\n3\n");
    assert_eq!(run("now,done=1", line).with(0), "1\n");
    assert_eq!(run("never", line).with(1), "1\n2\n3\n4\n5\n6\n");
    assert_eq!(run("soon,fail=40%", "echo {#}; false").with(1), "1\n2\n3\n", "a percentage needs three");
}

#[test]
fn halt_now_kills_what_runs_and_soon_lets_it_end() {
    let line = "if [ {} = 1 ]; then sleep 0.2; exit 1; fi; sleep {}; echo ended {}";
    let now = said(&["-j2", "--halt", "now,fail=1", line, ":::", "1", "600"]);
    assert_eq!(now.tells(1, &["cancelled 1"]).with(1), "");
    let soon = said(&["-j2", "--halt", "soon,fail=1", line, ":::", "1", "0.6", "600"]);
    assert_eq!(soon.tells(1, &["cancelled 1"]).with(1), "ended 0.6\n");
}

#[test]
fn an_interrupt_ends_everything_now() {
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129)] {
        let line = ": {}; echo $$; sleep 600 & echo $!; wait";
        let mut running = Running::start(map(&["-u", "-q", "-j2", line, ":::", "a", "b"]));
        let processes: Vec<Watched> = (0..4).map(|_| Watched::of(&running.says(""))).collect();
        running.signal(signal);
        assert_eq!(running.code(), code);
        processes.iter().for_each(Watched::expect_end);
    }
}

#[test]
fn sigterm_lets_what_runs_end_and_a_second_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let line = format!("echo begun; while ! test -e {}; do sleep 0.01; done; echo ended", go.display());
    let start = || {
        let mut running = Running::start(map(&["-u", "-j1", &line, ":::", "a", "b", "c"]));
        running.says("begun");
        running.signal(Signal::TERM);
        running.tells("comes to its end");
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
fn what_fails_is_tried_again_as_often_as_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("echo x >> {0}/{{}}; test $(wc -l < {0}/{{}}) -ge 3", dir.path().display());
    said(&["--retries", "2", &line, ":::", "a"]).tells(0, &["retried 2"]);
    said(&["--retries", "1", &line, ":::", "b"]).tells(1, &["retried 1", "task 1 (b): exit code 1"]);
}

#[test]
fn a_source_that_says_nothing_does_not_hold_up_an_interrupt() {
    let mut running = Running::start(map(&["-u", "-q", "echo {}"]));
    running.press(b"a\n");
    running.says("a");
    running.signal(Signal::INT);
    assert_eq!(running.code(), 130);
}
