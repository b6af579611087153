//! A job log that was cut off at any byte resumes: no logged task is repeated, and no other task is skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gpupool_dispatch::job_log::{FinishedTasks, JobLog, JobLogEntry, JobLogError, RerunPolicy};
use proptest::prelude::*;
use tempfile::TempDir;

const HEADER: &str = "Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n";

fn entry(seq: u64, command: &[u8], exit_code: i32) -> JobLogEntry<'_> {
    let (started, took) = (SystemTime::now(), Duration::from_millis(1));
    JobLogEntry { seq, started, took, received: 0, exit_code, signal: 0, command }
}

fn log_path() -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("log");
    (dir, path)
}

fn resumed(path: &Path) -> (JobLog, FinishedTasks) {
    JobLog::resume(path, RerunPolicy::Nothing).unwrap()
}

/// Writes a log of these tasks. Returns the end of each line.
fn written(path: &Path, tasks: &[(u64, Vec<u8>)]) -> Vec<u64> {
    let mut log = JobLog::create(path).unwrap();
    let ends = tasks.iter().map(|(seq, command)| {
        log.append(&entry(*seq, command, 0)).unwrap();
        fs::metadata(path).unwrap().len()
    });
    let ends = ends.collect();
    log.finish().unwrap();
    ends
}

/// Distinct task numbers in any order, with commands of any bytes.
fn tasks() -> impl Strategy<Value = Vec<(u64, Vec<u8>)>> {
    let command = prop::collection::vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b'\t'), Just(b'\\')], 0..20);
    prop::collection::btree_map(1..5_000_u64, command, 0..12).prop_map(|map| map.into_iter().collect()).prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_log_cut_anywhere_keeps_exactly_its_complete_lines(tasks in tasks(), cut in any::<prop::sample::Index>()) {
        let (_dir, path) = log_path();
        let ends = written(&path, &tasks);
        let whole = fs::read(&path).unwrap();
        let kept = cut.index(whole.len() + 1);
        fs::write(&path, &whole[..kept]).unwrap();
        let (mut log, mut finished) = resumed(&path);
        for ((seq, command), end) in tasks.iter().zip(&ends) {
            let is_whole = *end <= kept as u64;
            prop_assert_eq!(finished.contains(*seq, command).unwrap(), is_whole, "task {}, cut at {}", seq, kept);
            if !is_whole {
                log.append(&entry(*seq, command, 0)).unwrap();
            }
        }
        log.finish().unwrap();
        let (_log, mut finished) = resumed(&path);
        prop_assert_eq!(finished.count(), tasks.len() as u64);
        for (seq, command) in &tasks {
            prop_assert!(finished.contains(*seq, command).unwrap());
        }
        prop_assert_eq!(fs::read(&path).unwrap().iter().filter(|byte| **byte == b'\n').count(), tasks.len() + 1);
    }
}

#[test]
fn failed_tasks_are_repeated_only_on_request_and_the_last_line_counts() {
    let (_dir, path) = log_path();
    let mut log = JobLog::create(&path).unwrap();
    for (seq, exit_code) in [(1, 0), (2, 3), (3, -1), (3, 0)] {
        log.append(&entry(seq, b"x", exit_code)).unwrap();
    }
    log.finish().unwrap();
    let resume = |again| {
        let (_log, mut finished) = JobLog::resume(&path, again).unwrap();
        (finished.count(), [1, 2, 3, 4].map(|seq| finished.contains(seq, b"x").unwrap()))
    };
    assert_eq!(resume(RerunPolicy::Nothing), (3, [true, true, true, false]));
    assert_eq!(resume(RerunPolicy::Failed), (2, [true, false, true, false]));
}

#[test]
fn a_log_of_another_run_is_refused_with_both_commands() {
    let (_dir, path) = log_path();
    written(&path, &[(1, b"echo a".to_vec()), (2, b"echo b".to_vec())]);
    let (_log, mut finished) = resumed(&path);
    assert!(finished.contains(1, b"echo a").unwrap());
    let error = finished.contains(2, b"echo\tc").unwrap_err();
    assert!(matches!(error, JobLogError::AnotherRun { seq: 2, .. }));
    let text = error.to_string();
    assert!(text.contains("`echo b`") && text.contains(r"`echo\tc`"), "{text}");
}

#[test]
fn two_runs_cannot_use_one_log_at_once() {
    let (_dir, path) = log_path();
    let first = JobLog::create(&path).unwrap();
    for error in [JobLog::create(&path).unwrap_err(), JobLog::resume(&path, RerunPolicy::Nothing).unwrap_err()] {
        assert!(matches!(error, JobLogError::InUse(_)), "{error}");
    }
    drop(first);
    resumed(&path);
}

#[test]
fn other_files_are_left_unchanged() {
    let (_dir, path) = log_path();
    for text in ["precious\n", "precious", "Seq\tHost\nx"] {
        fs::write(&path, text).unwrap();
        for error in [JobLog::create(&path).unwrap_err(), JobLog::resume(&path, RerunPolicy::Nothing).unwrap_err()] {
            assert!(matches!(error, JobLogError::NotAJobLog(_)), "{error}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn an_invalid_line_is_named() {
    let (_dir, path) = log_path();
    fs::write(&path, format!("{HEADER}1\t:\t1\t1\t0\t0\t0\t0\tx\nrubbish\n")).unwrap();
    let error = JobLog::resume(&path, RerunPolicy::Nothing).unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("Seq"), "{error}");
    // Creating a new log still works.
    JobLog::create(&path).unwrap().finish().unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), HEADER);
}

#[test]
fn large_task_numbers_need_little_memory() {
    let (_dir, path) = log_path();
    let lines: String =
        (0..64).map(|n| format!("{}\t:\t1\t1\t0\t0\t0\t0\tx\n", 4_294_967_296_u64 - n * 50_000_000)).collect();
    fs::write(&path, format!("{HEADER}{lines}")).unwrap();
    let (_log, mut finished) = resumed(&path);
    assert_eq!(finished.count(), 64);
    assert!(finished.contains(4_294_967_296, b"x").unwrap() && !finished.contains(1, b"x").unwrap());
}
