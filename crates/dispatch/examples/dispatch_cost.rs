//! Cost of dispatching, compared to a hand-written equivalent. Prints one line of numbers, which `benches/run-dispatch`
//! formats as a table.

use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_dispatch::command::CommandLine;
use gpupool_dispatch::worker::{TaskWorker, WorkerHello, serve_tasks};
use gpupool_dispatch::{Dispatcher, RunEvent, RunPlan, TaskId, TaskOutcome, WorkerOutputPolicy, WorkerProgram};

type Failure = Box<dyn std::error::Error>;

/// Returns its payload, or only the payload's length.
struct Echo {
    counts: bool,
}

impl TaskWorker for Echo {
    fn set_up(hello: &WorkerHello) -> Result<Self, String> {
        Ok(Self { counts: hello.settings == "count" })
    }

    fn process(&mut self, _: TaskId, payload: Bytes) -> Result<Bytes, String> {
        Ok(if self.counts { payload.len().to_string().into() } else { payload })
    }
}

fn main() -> ExitCode {
    gpupool_dispatch::run_helper_if_requested();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<u32>().ok()).unwrap_or(1);
    let done = match arguments.first().map(String::as_str) {
        Some("worker") => pin_to_processor(arguments.get(1)).and_then(|()| Ok(serve_tasks::<Echo>()?)),
        Some("bare-worker") => pin_to_processor(arguments.get(1)).and_then(|()| run_bare_worker()),
        Some("tasks") => tasks(number(1), number(2), number(3), arguments.get(4).is_some_and(|back| back == "back")),
        Some("round-trips") => round_trips(number(1), arguments.get(2), arguments.get(3)),
        Some("commands") => commands(number(1), number(2)),
        Some("spawns") => spawns(number(1), number(2)),
        Some("memory") => memory(number(1)),
        Some("timeouts") => timeouts(number(1)),
        _ => Err("dispatch_cost tasks N WORKERS BYTES [back] | round-trips N [CPU CPU] | commands N WORKERS | spawns N THREADS | memory N | timeouts N".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dispatch_cost: {error}");
            ExitCode::FAILURE
        }
    }
}

fn echo_plan(workers: u32, counts: bool) -> RunPlan {
    let mut plan = RunPlan::new(WorkerProgram::native("/proc/self/exe").args(["worker"])).workers(workers);
    plan.settings = if counts { "count".into() } else { "echo".into() };
    plan
}

/// Starts a dispatcher and waits until all workers are set up.
fn ready(plan: RunPlan) -> Result<Dispatcher, Failure> {
    let workers = plan.slots.len();
    let mut dispatcher = Dispatcher::start(plan)?;
    for _ in 0..workers {
        match dispatcher.next_event() {
            Some(RunEvent::WorkerReady { .. }) => {}
            other => return Err(format!("instead of being ready: {other:?}").into()),
        }
    }
    Ok(dispatcher)
}

/// Runs so many tasks of so many bytes: prints tasks per second and GB per second of payload, each way.
fn tasks(count: u32, workers: u32, bytes: u32, back: bool) -> Result<(), Failure> {
    let mut plan = echo_plan(workers, !back);
    if bytes >= 1 << 20 {
        plan.rules.queue_size = 64;
    }
    let dispatcher = ready(plan)?;
    let payload = Bytes::from(vec![7; bytes as usize]);
    let started = Instant::now();
    let mut done = 0_u32;
    let source = (0..count).map(|_| Ok::<Bytes, Infallible>(payload.clone()));
    let mut ended = started;
    dispatcher.run(source, |event| {
        if let RunEvent::TaskEnded(end) = event {
            done += u32::from(matches!(end.outcome, TaskOutcome::Done(_)));
            ended = end.finished;
        }
    })?;
    if done != count {
        return Err(format!("{done} of {count} were done").into());
    }
    let seconds = (ended - started).as_secs_f64();
    println!("{:.0} {:.3}", f64::from(count) / seconds, f64::from(count) * f64::from(bytes) / seconds / 1e9);
    Ok(())
}

/// Runs tasks one after the other, and bytes to a plain process and back: prints medians in µs. Both sides are pinned,
/// because the choice of processors makes more difference than the work.
fn round_trips(count: u32, ours_on: Option<&String>, theirs_on: Option<&String>) -> Result<(), Failure> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new("/proc/self/exe")
        .arg("bare-worker")
        .args(theirs_on)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let mut plan = echo_plan(1, false);
    plan.program = plan.program.args(theirs_on);
    let mut dispatcher = ready(plan)?;
    pin_to_processor(ours_on)?;
    let (mut bare, mut dispatched) = (Vec::new(), Vec::new());
    let mut socket = &ours;
    let mut buffer = [0; 32];
    // Alternating, so that both meet the same conditions.
    for _ in 0..count / 100 {
        for _ in 0..100 {
            let started = Instant::now();
            socket.write_all(&[7; 32])?;
            socket.read_exact(&mut buffer)?;
            bare.push(started.elapsed());
        }
        for _ in 0..100 {
            let started = Instant::now();
            dispatcher.submit(Bytes::from_static(&[7; 32]))?;
            match dispatcher.next_event() {
                Some(RunEvent::TaskEnded(_)) => {}
                other => return Err(format!("instead of a result: {other:?}").into()),
            }
            dispatched.push(started.elapsed());
        }
    }
    dispatcher.finish()?;
    drop(ours);
    child.wait()?;
    println!("{:.1} {:.1}", median(&mut bare), median(&mut dispatched));
    Ok(())
}

/// Pins this thread to a processor, if one is given.
fn pin_to_processor(processor: Option<&String>) -> Result<(), Failure> {
    let Some(processor) = processor else { return Ok(()) };
    let mut only = rustix::thread::CpuSet::new();
    only.set(processor.parse()?);
    Ok(rustix::thread::sched_setaffinity(None, &only)?)
}

fn run_bare_worker() -> Result<(), Failure> {
    let mut socket = UnixStream::from(rustix::io::dup(rustix::stdio::stdin())?);
    let mut buffer = [0; 32];
    while socket.read_exact(&mut buffer).is_ok() {
        socket.write_all(&buffer)?;
    }
    Ok(())
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// Runs `true` repeatedly: prints commands per second.
fn commands(count: u32, workers: u32) -> Result<(), Failure> {
    let mut plan = RunPlan::new(WorkerProgram::commands()).workers(workers);
    plan.output = WorkerOutputPolicy::Reported;
    let dispatcher = ready(plan)?;
    let line = CommandLine::direct(["true"]).to_payload();
    let started = Instant::now();
    let mut ended = started;
    let source = (0..count).map(|_| Ok::<Bytes, Infallible>(line.clone()));
    let stats = dispatcher.run(source, |event| {
        if let RunEvent::TaskEnded(end) = event {
            ended = end.finished;
        }
    })?;
    if stats.completed != u64::from(count) {
        return Err(format!("{stats:?}").into());
    }
    println!("{:.0}", f64::from(count) / (ended - started).as_secs_f64());
    Ok(())
}

/// Does the same by hand: `posix_spawn` and `waitpid` in so many threads.
fn spawns(count: u32, threads: u32) -> Result<(), Failure> {
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..count / threads {
                    // The standard library uses posix_spawn where it can.
                    let spawned = Command::new("true").stdin(Stdio::null()).spawn();
                    if let Ok(mut child) = spawned {
                        let _ = child.wait();
                    }
                }
            });
        }
    });
    println!("{:.0}", f64::from(count / threads * threads) / started.elapsed().as_secs_f64());
    Ok(())
}

/// Runs a long source of tasks: prints the peak memory of this process in MiB.
fn memory(count: u32) -> Result<(), Failure> {
    let dispatcher = ready(echo_plan(2, false))?;
    let source = (0..count).map(|n| Ok::<Bytes, Infallible>(n.to_string().into()));
    dispatcher.run(source, |_| {})?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let kib: f64 = peak.trim().trim_end_matches("kB").trim().parse()?;
    println!("{:.1}", kib / 1024.0);
    Ok(())
}

/// Runs tasks past their time limit, each in a command that ignores the interrupt: prints the delay of their ends in
/// ms, median and worst.
fn timeouts(count: u32) -> Result<(), Failure> {
    let limit = Duration::from_millis(100);
    let mut plan = RunPlan::new(WorkerProgram::commands()).workers(2);
    plan.rules.task_timeout = Some(limit);
    plan.rules.grace = Duration::from_secs(5);
    let dispatcher = ready(plan)?;
    let line = CommandLine::direct(["sleep", "10"]).to_payload();
    let source = (0..count).map(|_| Ok::<Bytes, Infallible>(line.clone()));
    let mut late = Vec::new();
    dispatcher.run(source, |event| {
        if let RunEvent::TaskEnded(end) = event
            && let Some(started) = end.started
        {
            late.push((end.finished - started).saturating_sub(limit));
        }
    })?;
    let median = median(&mut late) / 1e3;
    let worst = late.last().map_or(0.0, |late| late.as_secs_f64() * 1e3);
    println!("{median:.2} {worst:.2}");
    Ok(())
}
