//! Tasks and their outcomes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use gpupool_dispatch::{Dispatcher, ResultOrder, RunError, RunEvent, TaskId, TaskOutcome};

use crate::common::{odd_worker_plan, run};

#[test]
fn every_task_ends_exactly_once() {
    let result = run(odd_worker_plan(3), (0..10_000).map(|n| format!("echo {n}")));
    assert_eq!(result.task_ends.len(), 10_000);
    for (task, end) in &result.task_ends {
        assert_eq!(end.outcome, TaskOutcome::Done(task.to_string().into()));
        assert_eq!(end.tries, 1);
    }
    let stats = result.stats.unwrap();
    assert_eq!((stats.completed, stats.failed, stats.pending, stats.running), (10_000, 0, 0, 0));
}

#[test]
fn results_can_keep_the_order_of_the_source() {
    let mut plan = odd_worker_plan(3);
    plan.order = ResultOrder::Input;
    let result = run(plan, (0..300).map(|n| if n % 50 == 0 { "sleep 30".to_owned() } else { format!("echo {n}") }));
    assert_eq!(result.order.iter().map(|task| task.0).collect::<Vec<_>>(), (0..300).collect::<Vec<_>>());
}

#[test]
fn a_failed_task_keeps_its_error_text_and_its_worker() {
    let result = run(odd_worker_plan(1), ["pid", "fail too hot", "pid"]);
    assert_eq!(result.outcome(1), &TaskOutcome::Failed("too hot".into()));
    assert_eq!(result.done(0), result.done(2));
    assert_eq!(result.stats.unwrap().failed, 1);
}

#[test]
fn a_failed_task_is_retried_and_the_retry_reported() {
    let mut plan = odd_worker_plan(2);
    plan.rules.retries = 2;
    let result = run(plan, ["fail always", "echo fine"]);
    assert_eq!(result.outcome(0), &TaskOutcome::Failed("always".into()));
    assert_eq!(result.task_ends[&TaskId(0)].tries, 3);
    let retried = |event: &&RunEvent| matches!(event, RunEvent::TaskRetried { task: TaskId(0), .. });
    assert_eq!(result.events.iter().filter(retried).count(), 2);
    assert_eq!(result.stats.unwrap().retried, 2);
}

#[test]
fn the_source_is_never_read_further_ahead_than_the_queue_holds() {
    let mut plan = odd_worker_plan(2);
    plan.rules.queue_size = 10;
    let read = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&read);
    let source = (0..500).map(move |n| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok::<Bytes, std::convert::Infallible>(format!("echo {n}").into())
    });
    let (mut ended, mut most_ahead) = (0, 0);
    Dispatcher::start(plan)
        .unwrap()
        .run(source, |event| {
            if let RunEvent::TaskEnded(_) = event {
                most_ahead = most_ahead.max(read.load(Ordering::SeqCst) - ended);
                ended += 1;
            }
        })
        .unwrap();
    assert_eq!(ended, 500);
    // Ten in the queue, one at each worker, and the one that is being reported.
    assert!(most_ahead <= 10 + 2 + 1, "{most_ahead} ahead");
}

#[test]
fn an_error_of_the_source_follows_the_tasks_before_it() {
    let source = (0..20).map(|n| if n == 10 { Err("the disk is gone") } else { Ok(Bytes::from(format!("echo {n}"))) });
    let mut ended = 0;
    let error = Dispatcher::start(odd_worker_plan(2))
        .unwrap()
        .run(source, |event| ended += usize::from(matches!(event, RunEvent::TaskEnded(_))));
    assert!(matches!(error, Err(RunError::Source("the disk is gone"))), "{error:?}");
    assert_eq!(ended, 10);
}

#[test]
fn another_thread_can_submit_and_wait_for_room() {
    let mut plan = odd_worker_plan(2);
    plan.rules.queue_size = 4;
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    let handle = dispatcher.handle();
    let feeder = std::thread::spawn(move || {
        let tasks: Vec<TaskId> =
            (0..1_000).map(|n| handle.submit_blocking(format!("echo {n}").into()).unwrap()).collect();
        handle.close();
        tasks
    });
    let mut ended = 0;
    while let Some(event) = dispatcher.next_event() {
        ended += usize::from(matches!(event, RunEvent::TaskEnded(_)));
    }
    assert_eq!(ended, 1_000);
    assert_eq!(feeder.join().unwrap(), (0..1_000).map(TaskId).collect::<Vec<_>>());
    assert_eq!(dispatcher.finish().unwrap().completed, 1_000);
}

#[test]
fn workers_continue_during_a_slow_callback() {
    let mut plan = odd_worker_plan(2);
    plan.rules.queue_size = 100;
    let mut dispatcher = Dispatcher::start(plan).unwrap();
    for n in 0..100 {
        dispatcher.submit(format!("echo {n}").into()).unwrap();
    }
    dispatcher.close();
    while !matches!(dispatcher.next_event(), Some(RunEvent::TaskEnded(_))) {}
    // Without a call for events the remaining tasks still run.
    let handle = dispatcher.handle();
    while handle.stats().completed < 100 {
        std::thread::yield_now();
    }
    assert_eq!(dispatcher.finish().unwrap().completed, 100);
}

#[test]
fn a_worker_knows_its_id_and_sees_only_its_own_gpus() {
    let mut plan = odd_worker_plan(2);
    for (slot, gpu) in plan.slots.iter_mut().zip([3, 5]) {
        slot.gpu_ids = vec![gpu];
        slot.environment = vec![("CUDA_VISIBLE_DEVICES".into(), Some(gpu.to_string())), ("HOME".into(), None)];
    }
    let tasks = std::iter::repeat_n("env CUDA_VISIBLE_DEVICES", 50).chain(std::iter::repeat_n("env HOME", 2));
    let result = run(plan, tasks);
    for task in 0..50 {
        let worker = result.task_ends[&TaskId(task)].worker.unwrap();
        assert_eq!(result.done(task), if worker.0 == 0 { "3" } else { "5" });
    }
    assert!(matches!(result.outcome(50), TaskOutcome::Failed(_)), "a variable that was removed");
    assert_eq!(
        result.stats.unwrap().workers.iter().map(|worker| worker.gpu_ids.clone()).collect::<Vec<_>>(),
        [[3], [5]]
    );
}
