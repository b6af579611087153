//! Counts primes with four worker processes: this program is dispatcher and worker.

use std::time::Duration;

use bytes::Bytes;
use gpupool_dispatch::worker::{TaskWorker, WorkerHello, serve_tasks};
use gpupool_dispatch::{Dispatcher, RunEvent, RunPlan, TaskId, TaskOutcome, WorkerProgram};

/// Data that a worker loads once: small primes to divide by.
struct Primes(Vec<u64>);

impl TaskWorker for Primes {
    fn set_up(hello: &WorkerHello) -> Result<Self, String> {
        let most = hello.settings["most"].as_u64().ok_or("settings.most is missing")?;
        let is_prime = |n: &u64| (2..*n).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
        Ok(Self((2..=most).take_while(|n| n * n <= most).filter(is_prime).collect()))
    }

    fn process(&mut self, _: TaskId, payload: Bytes) -> Result<Bytes, String> {
        let text = String::from_utf8_lossy(&payload);
        let (from, to) = text.split_once('-').ok_or_else(|| format!("{text} is not a range"))?;
        let parse = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
        let (from, to) = (parse(from)?, parse(to)?);
        let is_prime = |n: &u64| *n > 1 && self.0.iter().take_while(|d| *d * *d <= *n).all(|d| !n.is_multiple_of(*d));
        Ok((from..to).filter(is_prime).count().to_string().into())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpupool_dispatch::run_helper_if_requested();
    if std::env::args().nth(1).is_some_and(|argument| argument == "worker") {
        return Ok(serve_tasks::<Primes>()?);
    }
    let most = 2_000_000_u64;
    let mut plan = RunPlan::new(WorkerProgram::native(std::env::current_exe()?).args(["worker"])).workers(4);
    plan.settings = serde_json::json!({ "most": most });
    plan.rules.task_timeout = Some(Duration::from_secs(60));
    let ranges =
        (0..most / 10_000).map(|n| Ok::<Bytes, std::io::Error>(format!("{}-{}", n * 10_000, (n + 1) * 10_000).into()));
    let mut primes = 0;
    let stats = Dispatcher::start(plan)?.run(ranges, |event| {
        if let RunEvent::TaskEnded(over) = event {
            match over.outcome {
                TaskOutcome::Done(count) => primes += String::from_utf8_lossy(&count).parse::<u64>().unwrap_or(0),
                other => eprintln!("task {}: {other:?}", over.task),
            }
        }
    })?;
    println!("{primes} primes below {most}; {} tasks done, {} failed", stats.completed, stats.failed);
    for worker in &stats.workers {
        println!("worker {}: {} tasks", worker.id, worker.completed);
    }
    Ok(())
}
