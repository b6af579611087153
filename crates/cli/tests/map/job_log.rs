//! The job log: logged tasks are not repeated, and no other task is skipped.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use gpupool_confine::Signal;
use tempfile::TempDir;

use crate::support::{BINARY, BackgroundCommand, ObservedProcess, map, run_map, with_input, without_variables};

/// Returns task numbers and exit codes of a log.
fn logged(path: &Path) -> Vec<(u64, i64)> {
    let text = fs::read_to_string(path).unwrap();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let fields = whole.lines().skip(1).map(|line| line.split('\t').collect::<Vec<_>>());
    fields.map(|fields| (fields[0].trim().parse().unwrap(), fields[6].parse().unwrap())).collect()
}

fn log_in(dir: &TempDir) -> (std::path::PathBuf, String) {
    let path = dir.path().join("log");
    let text = path.to_str().unwrap().to_owned();
    (path, text)
}

#[test]
fn a_log_has_the_columns_of_gnu_parallel() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = log_in(&dir);
    run_map(&["-k", "--joblog", &log, "printf 'a\tb'; exit {}", ":::", "0", "3"]).with(1);
    run_map(&[
        "--timeout",
        "100ms",
        "--kill-after",
        "0",
        "--joblog",
        &log,
        "--resume",
        "printf 'a\tb'; exit {}",
        ":::",
        "0",
        "3",
    ])
    .success();
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(lines[0].join(" "), "Seq Host Starttime JobRuntime Send Receive Exitval Signal Command");
    assert_eq!(lines[1].len(), 9, "{text}");
    let of = |line: &[&str]| [line[0], line[1], line[4], line[5], line[6], line[7], line[8]].join(" ");
    assert_eq!(of(&lines[1]), r"1 : 0 3 0 0 printf 'a\tb'; exit 0");
    assert_eq!(of(&lines[2]), r"2 : 0 3 3 0 printf 'a\tb'; exit 3");
    assert_eq!(lines.len(), 3, "nothing is repeated");
}

#[test]
fn failed_tasks_are_repeated_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = log_in(&dir);
    // The command fails the first time.
    let line = format!("echo {{}}; test -e {0}/{{}} || {{ touch {0}/{{}}; exit 1; }}", dir.path().display());
    fs::write(dir.path().join("a"), "").unwrap();
    assert_eq!(run_map(&["-k", "--joblog", &log, &line, ":::", "a", "b"]).with(1), "a\nb\n");
    assert_eq!(run_map(&["--joblog", &log, "--resume", &line, ":::", "a", "b"]).success(), "");
    assert_eq!(run_map(&["--joblog", &log, "--resume-failed", &line, ":::", "a", "b"]).success(), "b\n");
    assert_eq!(logged(&path), [(1, 0), (2, 1), (2, 0)]);
}

#[test]
fn the_log_of_another_run_or_one_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = log_in(&dir);
    run_map(&["--joblog", &log, "echo", ":::", "a"]).success();
    run_map(&["--joblog", &log, "--resume", "echo", ":::", "b"]).reports(1, &["another run", "`echo a`", "`echo b`"]);
    let mut first = BackgroundCommand::start(map(&["--joblog", &log, "-u", "echo ready; exec sleep {}", ":::", "600"]));
    first.wait_for_output("ready");
    run_map(&["--joblog", &log, "echo", ":::", "a"]).reports(1, &["in use"]);
    first.signal(Signal::INT);
    assert_eq!(first.code(), 130);
    assert_eq!(logged(&path), [], "cancelled tasks are not logged");
    fs::write(&path, "precious\n").unwrap();
    run_map(&["--joblog", &log, "echo", ":::", "a"]).reports(1, &["not a job log"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious\n");
}

#[test]
fn a_killed_run_resumes_where_it_stopped() {
    const TASKS: u64 = 60;
    for kill_after in [1, 9, 25] {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = log_in(&dir);
        let ran = dir.path().join("ran");
        let line = format!("echo {{}} >> {}; echo {{}}; exec sleep 0.005", ran.display());
        let arguments: Vec<String> = (1..=TASKS).map(|n| n.to_string()).collect();
        let run = |how: &[&str]| {
            let mut command = map(&["-j3", "--joblog", &log]);
            command.args(how).arg(&line).arg(":::").args(&arguments);
            command
        };
        let mut first = BackgroundCommand::start(run(&[]));
        for _ in 0..kill_after {
            first.wait_for_output("");
        }
        first.signal(Signal::KILL);
        assert_eq!(first.code(), 137);
        let before = logged(&path);
        let reported = with_input(run(&["--resume"]), b"");
        assert_eq!(reported.code, Some(0), "{reported:#?}");
        let after = logged(&path);
        assert_eq!(after[..before.len()], before);
        let mut seqs: Vec<u64> = after.iter().map(|(seq, _)| *seq).collect();
        seqs.sort_unstable();
        assert_eq!(seqs, (1..=TASKS).collect::<Vec<_>>(), "each task is logged once");
        let mut times: BTreeMap<u64, u32> = BTreeMap::new();
        for number in fs::read_to_string(&ran).unwrap().lines() {
            *times.entry(number.parse().unwrap()).or_default() += 1;
        }
        assert_eq!(times.len() as u64, TASKS, "no task is skipped");
        for (seq, _) in before {
            assert_eq!(times[&seq], 1, "task {seq} was logged and repeated");
        }
    }
}

#[test]
fn a_killed_run_leaves_no_process() {
    let mut running = BackgroundCommand::start(map(&[
        "-u",
        "-j1",
        "-q",
        "setsid sh -c 'echo $$; exec sleep {}' & wait",
        ":::",
        "600",
    ]));
    let orphan = ObservedProcess::of(&running.wait_for_output(""));
    running.signal(Signal::KILL);
    assert_eq!(running.code(), 137);
    orphan.wait_for_exit();
}

#[test]
fn a_log_that_cannot_be_written_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = log_in(&dir);
    // Limits the size of the file and ignores the signal.
    let script = r#"trap '' XFSZ; ulimit -f 16; exec "$@""#;
    let mut command = without_variables(Command::new("sh"));
    command.args(["-c", script, "sh", BINARY, "map", "--gpus", "0", "-j1", "--joblog", &log, "true {}"]);
    let reported = with_input(command, "x\n".repeat(2_000).as_bytes());
    reported.reports(1, &["job log", "written"]);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.ends_with('\n') && text.lines().count() > 1, "half a line was left: {text}");
}
