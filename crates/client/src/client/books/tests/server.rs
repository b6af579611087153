//! What a server says, and what of it is believed.

use tokio::time::advance;

use super::*;

#[tokio::test(start_paused = true)]
async fn available_is_strictly_below_both_thresholds() {
    for (memory, utilization, is_available) in
        [(79.99, 0, true), (80.0, 0, false), (0.0, 89, true), (0.0, 90, false), (79.99, 89, true), (100.0, 100, false)]
    {
        let asked = books(&[(0, memory, utilization)]).ask(r#"{"queue":false}"#);
        assert_eq!(asked.is_ok(), is_available, "{memory} % and {utilization} %: {asked:?}");
    }
    let books = books(&[(0, 40.0, 40)]);
    assert_eq!(books.code(r#"{"queue":false,"memory_threshold":40}"#), "no_capacity");
    assert_eq!(books.code(r#"{"queue":false,"utilization_threshold":40}"#), "no_capacity");
    assert!(books.ask(r#"{"memory_threshold":40.01,"utilization_threshold":40.01,"queue":false}"#).is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_is_promised_is_not_foreign_and_what_is_more_is() {
    let books = idle(&[0]);
    let half = r#"{"fraction":0.5,"queue":false,"memory_threshold":50,"utilization_threshold":50}"#;
    books.ask(half).unwrap();
    advance(Duration::from_secs(1)).await;
    books.take_in(&summary(&[(0, 100.0, 99)]), None);
    assert_eq!(books.gpus()[0].foreign_memory_percent, Some(50.0));
    assert_eq!(books.code(half), "no_capacity");
    books.take_in(&summary(&[(0, 99.0, 99)]), None);
    let gpu = &books.gpus()[0];
    assert_eq!((gpu.memory_usage_percent, gpu.foreign_memory_percent), (Some(99.0), Some(49.0)));
    assert!(books.ask(half).is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_a_gpu_cannot_tell_is_not_judged() {
    let books = Books::new("server1", "ann", MAX_AGE);
    let mut told = summary(&[(0, 99.0, 99)]);
    told.gpus_summary[0].unsupported = vec!["utilization_percent".into(), "memory_usage_percent".into()];
    books.take_in(&told, None);
    let gpu = &books.gpus()[0];
    assert_eq!((gpu.memory_usage_percent, gpu.utilization_percent), (None, None));
    assert!(books.ask(r#"{"queue":false}"#).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_not_seen_or_is_away_gives_nothing_and_takes_nothing_back() {
    let books = Books::new("server1", "ann", MAX_AGE);
    books.away();
    let unseen = books.ask("{}").unwrap_err();
    assert!(unseen.code() == Some("not_seen") && unseen.is_transient(), "{unseen}");
    books.take_in(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    let held = books.ask("{}").unwrap();
    books.away();
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(books.gpus()[1].closed.as_deref(), Some("node_lost"));
    assert_eq!(books.state_of(&held), LeaseState::Active);
    let waiter = books.ask("{}").unwrap();
    books.take_in(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    assert_eq!(numbers(&books.lease(waiter.id).unwrap()), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_not_listed_takes_no_work_until_it_is_again() {
    let books = idle(&[0, 1]);
    books.ask("{}").unwrap();
    books.take_in(&summary(&[(0, 0.0, 0)]), None);
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(books.gpus()[1].closed.as_deref(), Some("lost"));
    books.take_in(&summary(&[(0, 0.0, 0), (1, 0.0, 0), (2, 0.0, 0)]), None);
    let (back, new) = (books.ask("{}").unwrap(), books.ask("{}").unwrap());
    assert_eq!((numbers(&back), numbers(&new)), (vec![1], vec![2]));
}

#[tokio::test(start_paused = true)]
async fn what_is_stale_or_failed_says_nothing_and_an_old_reading_closes() {
    let books = idle(&[0]);
    let busy = |change: fn(&mut SummaryBody)| {
        let mut told = summary(&[(0, 99.0, 99)]);
        change(&mut told);
        told
    };
    books.take_in(&busy(|told| told.stale = true), None);
    books.take_in(&busy(|told| told.error = Some("no driver".into())), None);
    advance(MAX_AGE).await;
    let lease = books.ask(r#"{"queue":false}"#).unwrap();
    books.release(lease.id);
    advance(Duration::from_millis(1)).await;
    let mut stale = summary(&[(0, 0.0, 0)]);
    stale.stale = true;
    books.take_in(&stale, None);
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(books.gpus()[0].closed.as_deref(), Some("stale"));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_lies_is_believed_only_what_can_be() {
    let gpus = [(0, f64::NAN, 0), (1, 101.0, 0), (2, -0.1, 0), (3, 0.0, 101), (4, 0.0, 0), (5, 0.0, 0), (5, 0.0, 0)];
    let mut told = summary(&gpus);
    told.gpus_summary.push(GpuSummary { gpu_id: u32::MAX, ..told.gpus_summary[4].clone() });
    told.gpus_summary[6].name = "AMD Instinct MI300X".into();
    told.gpu_count = 2;
    told.total_memory_mb = 7000;
    let books = Books::new("server1", "ann", MAX_AGE);
    books.take_in(&told, None);
    assert_eq!(numbers(&books.ask(r#"{"queue":false}"#).unwrap()), [4]);
    assert_eq!(books.code(r#"{"queue":false}"#), "no_capacity");
    let known: Vec<(u32, Option<u64>)> = books.gpus().iter().map(|gpu| (gpu.gpu_id, gpu.memory_mib)).collect();
    assert_eq!(known, [0, 1, 2, 3, 4, 5].map(|number| (number, Some(1000))));

    let many: Vec<(u32, f64, u32)> = (0..2000).map(|number| (number, 0.0, 0)).collect();
    books.take_in(&summary(&many), Some(&stats(&[(0, "GPU-a"), (0, "GPU-b")])));
    assert_eq!(books.gpus().len(), crate::limits::BOOKS_GPUS);
    for (gpu_count, total_memory_mb) in [(usize::MAX, 7000), (0, u64::MAX), (1, 0)] {
        books.take_in(&SummaryBody { gpu_count, total_memory_mb, ..summary(&[(0, 50.0, 0)]) }, None);
        assert_eq!(books.gpus()[0].closed.as_deref(), Some("unhealthy"), "{gpu_count} {total_memory_mb}");
    }
}

#[tokio::test(start_paused = true)]
async fn memory_is_what_the_server_tells_and_a_guess_where_it_does_not() {
    let books = idle(&[0]);
    assert_eq!(books.code(r#"{"memory_mib":1001}"#), "unsatisfiable");
    books.take_in(&summary(&[(0, 30.0, 0)]), Some(&stats(&[(0, "GPU-a")])));
    assert_eq!(books.gpus()[0].memory_mib, Some(1900));
    // 600 of 2000 are in use by others.
    assert_eq!(books.code(r#"{"memory_mib":1301,"queue":false}"#), "no_capacity");
    let lease = books.ask(r#"{"memory_mib":1300}"#).unwrap();
    assert_eq!(lease.devices[0].memory_mib, Some(1300));
    books.take_in(&summary(&[(0, 30.0, 0)]), None);
    assert_eq!(books.gpus()[0].memory_mib, Some(1900), "what was told holds");
}

#[tokio::test(start_paused = true)]
async fn uuids_are_learned_shown_and_can_be_asked_for() {
    let books = idle(&[0, 1]);
    let before = books.ask(r#"{"select":{"uuids":["server1/1"]}}"#).unwrap();
    assert_eq!((before.devices[0].uuid.as_str(), books.gpus()[1].uuid.as_deref()), ("server1/1", None));
    assert_eq!(before.env["CUDA_VISIBLE_DEVICES"].as_deref(), Some("1"));
    books.take_in(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), Some(&stats(&[(0, "GPU-a"), (1, "GPU-b")])));
    assert_eq!(books.lease(before.id).unwrap().devices[0].uuid, "GPU-b");
    let a = books.ask(r#"{"select":{"uuids":["GPU-a","GPU-x"]}}"#).unwrap();
    assert_eq!((numbers(&a), a.env["CUDA_VISIBLE_DEVICES"].as_deref()), (vec![0], Some("GPU-a")));
    assert_eq!((a.env["ROCR_VISIBLE_DEVICES"].as_ref(), a.env["GPUPOOL_GPU_IDS"].as_deref()), (None, Some("0")));
    assert_eq!(books.code(r#"{"select":{"uuids":["GPU-x"]}}"#), "unsatisfiable");
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_gets_another_number_is_not_given_twice() {
    let books = Books::new("server1", "ann", MAX_AGE);
    let all = [(0, 0.0, 0), (1, 0.0, 0), (2, 0.0, 0)];
    books.take_in(&summary(&all), Some(&stats(&[(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")])));
    let held = books.ask(r#"{"fraction":0.5,"select":{"uuids":["GPU-b"]}}"#).unwrap();
    // GPU-a died, and the others moved up.
    books.take_in(&summary(&all[..2]), Some(&stats(&[(0, "GPU-b"), (1, "GPU-c")])));
    assert_eq!(books.code(r#"{"fraction":0.5,"queue":false}"#), "no_capacity");
    assert_eq!(books.lease(held.id).unwrap().devices[0].uuid, "GPU-b");
    books.release(held.id);
    books.take_in(&summary(&all[..2]), None);
    let again = [books.ask(r#"{"queue":false}"#).unwrap(), books.ask(r#"{"queue":false}"#).unwrap()];
    assert_eq!(again.map(|lease| lease.devices[0].uuid.clone()), ["GPU-b", "GPU-c"]);
}

#[tokio::test(start_paused = true)]
async fn health_holds_until_it_is_told_anew_and_heat_only_while_it_is_told() {
    let books = idle(&[0]);
    let look = |change: fn(&mut stats::GpuBody)| {
        let mut told = stats(&[(0, "GPU-a")]);
        change(&mut told.gpus[0]);
        books.take_in(&summary(&[(0, 0.0, 0)]), Some(&told));
        books.gpus()[0].closed.clone()
    };
    let look_shortly = || {
        books.take_in(&summary(&[(0, 0.0, 0)]), None);
        books.gpus()[0].closed.clone()
    };
    assert_eq!(look(|gpu| gpu.health = "unhealthy".into()).as_deref(), Some("unhealthy"));
    assert_eq!(look_shortly().as_deref(), Some("unhealthy"));
    assert_eq!(look(|gpu| gpu.health = "healthy".into()), None);
    assert_eq!(look(|gpu| gpu.temperature_c = Some(95)).as_deref(), Some("hot"));
    assert_eq!(look_shortly(), None);
}

#[tokio::test(start_paused = true)]
async fn a_job_on_amds_gpus_is_shown_them_by_rocms_list() {
    let mut told = summary(&[(0, 0.0, 0), (1, 0.0, 0)]);
    for (gpu, name) in told.gpus_summary.iter_mut().zip(["AMD Instinct MI300X", "Intel(R) Arc(TM)"]) {
        gpu.name = name.into();
    }
    let books = Books::new("server1", "ann", MAX_AGE);
    books.take_in(&told, None);
    let lease = books.ask(r#"{"select":{"vendor":"amd"}}"#).unwrap();
    assert_eq!(lease.env["ROCR_VISIBLE_DEVICES"].as_deref(), Some("0"));
    assert_eq!(lease.env["CUDA_VISIBLE_DEVICES"], None);
    assert_eq!(books.gpus()[1].vendor, "intel");
}

#[tokio::test(start_paused = true)]
async fn several_gpus_are_granted_by_one_look_and_not_by_halves_of_two() {
    let books = books(&[(0, 99.0, 0), (1, 0.0, 0)]);
    let waiter = books.ask(r#"{"gpus":2}"#).unwrap();
    books.take_in(&summary(&[(0, 0.0, 0), (1, 99.0, 0)]), None);
    assert_eq!(books.state_of(&waiter), LeaseState::Queued);
    books.take_in(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    assert_eq!(books.state_of(&waiter), LeaseState::Active);
}
