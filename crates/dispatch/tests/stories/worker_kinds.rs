//! Workers by protocol: frames, lines, and one command per task.

use gpupool_dispatch::command::{CommandLine, CommandReport};
use gpupool_dispatch::{RunEvent, RunPlan, TaskId, TaskOutcome, WorkerOutputPolicy, WorkerProgram};

use crate::common::{RunResult, command_plan, run, with_helper};

fn outputs(result: &RunResult, task: u64) -> (String, String) {
    let output = result.task_ends[&TaskId(task)].output.as_ref().unwrap();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    output.copy_stdout_to(&mut out).unwrap();
    output.copy_stderr_to(&mut err).unwrap();
    (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

fn report(outcome: &TaskOutcome) -> CommandReport {
    match outcome {
        TaskOutcome::Done(output) | TaskOutcome::Failed(output) => CommandReport::parse(output).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn grouped(workers: u32) -> RunPlan {
    let mut plan = command_plan(workers);
    plan.output = WorkerOutputPolicy::Reported;
    plan
}

#[test]
fn each_command_has_its_own_output() {
    let line = |n: u64| CommandLine::shell(format!("echo out {n}; echo err {n} >&2; exit $(({n} % 3))")).to_payload();
    let result = run(grouped(3), (0..200).map(line));
    for task in 0..200 {
        assert_eq!(report(result.outcome(task)).exit_code, Some((task % 3) as i32));
        assert_eq!(matches!(result.outcome(task), TaskOutcome::Done(_)), task % 3 == 0);
        assert_eq!(outputs(&result, task), (format!("out {task}\n"), format!("err {task}\n")));
    }
}

#[test]
fn a_missing_or_killed_command_has_a_shells_exit_code() {
    let lines = [
        CommandLine::direct(["there-is-no-such-program"]),
        CommandLine::direct(["/etc/passwd"]),
        CommandLine::shell("kill -9 $$"),
        CommandLine::direct(["printf", "%s", "a b\nc"]),
    ];
    let result = run(grouped(1), lines.iter().map(CommandLine::to_payload));
    let missing = report(result.outcome(0));
    assert_eq!(missing.exit_code, Some(127));
    assert!(missing.not_started.unwrap().contains("there-is-no-such-program"));
    assert_eq!(report(result.outcome(1)).exit_code, Some(126));
    assert_eq!((report(result.outcome(2)).exit_code, report(result.outcome(2)).signal), (None, Some(9)));
    assert_eq!(outputs(&result, 3).0, "a b\nc");
}

#[test]
fn leftover_processes_end_before_the_next_command() {
    let leave = CommandLine::shell("sleep 1000 & setsid sh -c 'sleep 1000 & :'; echo $$");
    let count = CommandLine::shell("cat /proc/$PPID/task/$PPID/children | wc -w");
    let result = run(grouped(1), [leave.to_payload(), count.to_payload()]);
    assert_eq!(outputs(&result, 1).0.trim(), "1", "only the command itself is there");
}

#[test]
fn large_output_of_one_command_is_complete() {
    let large = CommandLine::shell("head -c 20000000 /dev/zero | tr '\\0' x; echo end >&2");
    let result = run(grouped(1), [large.to_payload(), CommandLine::direct(["echo", "after"]).to_payload()]);
    let (out, err) = outputs(&result, 0);
    assert_eq!((out.len(), err.as_str()), (20_000_000, "end\n"));
    assert_eq!(outputs(&result, 1).0, "after\n");
}

#[test]
fn a_program_that_reads_and_writes_lines_is_a_worker() {
    let script =
        r#"while read -r line; do case $line in bad*) echo '{"error":"'$line'"}';; *) echo "<$line>";; esac; done"#;
    let plan = with_helper(RunPlan::new(WorkerProgram::lines("sh").args(["-c", script])).workers(2));
    let result = run(plan, (0..100).map(|n| if n % 10 == 7 { format!("bad {n}") } else { n.to_string() }));
    for task in 0..100 {
        if task % 10 == 7 {
            assert_eq!(result.outcome(task), &TaskOutcome::Failed(format!("bad {task}").into()));
        } else {
            assert_eq!(result.done(task), format!("<{task}>"));
        }
    }
}

#[test]
fn a_line_worker_that_dies_loses_one_task_and_is_replaced() {
    let script = r#"while read -r line; do [ "$line" = die ] && exit 3; echo "$line"; done"#;
    let plan = with_helper(RunPlan::new(WorkerProgram::lines("sh").args(["-c", script])).workers(1));
    let result = run(plan, ["a", "die", "b"]);
    assert_eq!((result.done(0), result.done(2)), ("a".into(), "b".into()));
    assert!(matches!(result.outcome(1), TaskOutcome::WorkerLost(_)), "{:?}", result.outcome(1));
}

/// A program from the documentation, verbatim.
fn documented(language: &str) -> &'static str {
    let documentation = include_str!("../../../../docs/worker-protocol.md");
    let (_, from) = documentation.split_once(&format!("```{language}\n")).unwrap();
    let (program, _) = from.split_once("```").unwrap();
    assert!(program.lines().count() <= 30, "the documented program must be short");
    program
}

#[test]
fn the_worker_of_the_documentation_works() {
    let plan =
        with_helper(RunPlan::new(WorkerProgram::native("python3").args(["-c", documented("python")])).workers(2));
    let result = run(plan, ["ab", "cd", ""]);
    assert_eq!([0, 1, 2].map(|task| result.done(task)), ["AB", "CD", ""]);
}

#[test]
fn the_line_worker_of_the_documentation_works() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a.png"), "12345").unwrap();
    let program = WorkerProgram::lines("sh").args(["-c", documented("sh")]).directory(directory.path());
    let result = run(with_helper(RunPlan::new(program).workers(1)), ["a.png", "b.txt"]);
    assert_eq!(result.done(0), "a.png: 5 bytes");
    assert_eq!(result.outcome(1), &TaskOutcome::Failed("no picture".into()));
}

#[test]
fn worker_output_is_reported_and_its_end_is_kept() {
    let mut plan = crate::common::odd_worker_plan(1);
    plan.output = WorkerOutputPolicy::Reported;
    let result = run(plan, ["say hello there", "exit 3"]);
    let mut output = String::new();
    for event in &result.events {
        match event {
            RunEvent::WorkerWrote { bytes, .. } => output.push_str(&String::from_utf8_lossy(bytes)),
            RunEvent::WorkerGone { output_tail, is_last: false, .. } => assert_eq!(&**output_tail, "hello there\n"),
            _ => {}
        }
    }
    assert_eq!(output, "hello there\n");
}

/// The output exceeds a pipe's capacity; results that wait for earlier ones must not stop its reading.
#[test]
fn a_worker_that_writes_much_is_read_while_results_wait_for_its_task() {
    let mut plan = crate::common::odd_worker_plan(2);
    plan.output = WorkerOutputPolicy::Reported;
    plan.order = gpupool_dispatch::ResultOrder::Input;
    plan.rules.queue_size = 3_000;
    let tasks = (0..2_500).map(|n| if n == 0 { "chatter 300000".to_owned() } else { format!("echo {n}") });
    let result = run(plan, tasks);
    assert_eq!(result.task_ends.len(), 2_500);
    let output: usize = result
        .events
        .iter()
        .map(|event| if let RunEvent::WorkerWrote { bytes, .. } = event { bytes.len() } else { 0 })
        .sum();
    assert_eq!(output, 300_000);
}
