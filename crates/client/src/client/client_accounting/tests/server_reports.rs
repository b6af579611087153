//! Statistics of the server, and the checks on them.

use tokio::time::advance;

use super::*;

#[tokio::test(start_paused = true)]
async fn available_is_strictly_below_both_thresholds() {
    for (memory, utilization, is_available) in
        [(79.99, 0, true), (80.0, 0, false), (0.0, 89, true), (0.0, 90, false), (79.99, 89, true), (100.0, 100, false)]
    {
        let asked = accounting(&[(0, memory, utilization)]).request_json(r#"{"queue":false}"#);
        assert_eq!(asked.is_ok(), is_available, "{memory} % and {utilization} %: {asked:?}");
    }
    let accounting = accounting(&[(0, 40.0, 40)]);
    assert_eq!(accounting.refusal_code(r#"{"queue":false,"memory_threshold":40}"#), "no_capacity");
    assert_eq!(accounting.refusal_code(r#"{"queue":false,"utilization_threshold":40}"#), "no_capacity");
    assert!(
        accounting.request_json(r#"{"memory_threshold":40.01,"utilization_threshold":40.01,"queue":false}"#).is_ok()
    );
}

#[tokio::test(start_paused = true)]
async fn load_beyond_the_promised_share_is_foreign() {
    let accounting = idle_gpus(&[0]);
    let half = r#"{"fraction":0.5,"queue":false,"memory_threshold":50,"utilization_threshold":50}"#;
    accounting.request_json(half).unwrap();
    advance(Duration::from_secs(1)).await;
    accounting.apply_statistics(&summary(&[(0, 100.0, 99)]), None);
    assert_eq!(accounting.gpus()[0].foreign_memory_percent, Some(50.0));
    assert_eq!(accounting.refusal_code(half), "no_capacity");
    accounting.apply_statistics(&summary(&[(0, 99.0, 99)]), None);
    let gpu = &accounting.gpus()[0];
    assert_eq!((gpu.memory_usage_percent, gpu.foreign_memory_percent), (Some(99.0), Some(49.0)));
    assert!(accounting.request_json(half).is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_a_gpu_cannot_tell_is_not_judged() {
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    let mut reported = summary(&[(0, 99.0, 99)]);
    reported.gpus_summary[0].unsupported = vec!["utilization_percent".into(), "memory_usage_percent".into()];
    accounting.apply_statistics(&reported, None);
    let gpu = &accounting.gpus()[0];
    assert_eq!((gpu.memory_usage_percent, gpu.utilization_percent), (None, None));
    assert!(accounting.request_json(r#"{"queue":false}"#).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_not_seen_or_is_away_gives_nothing_and_takes_nothing_back() {
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    accounting.suspend_grants();
    let unseen = accounting.request_json("{}").unwrap_err();
    assert!(unseen.code() == Some("not_seen") && unseen.is_transient(), "{unseen}");
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    let held = accounting.request_json("{}").unwrap();
    accounting.suspend_grants();
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(accounting.gpus()[1].closed.as_deref(), Some("node_lost"));
    assert_eq!(accounting.state_of(&held), LeaseState::Active);
    let waiter = accounting.request_json("{}").unwrap();
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    assert_eq!(gpu_numbers(&accounting.lease(waiter.id).unwrap()), [1]);
}

#[tokio::test(start_paused = true)]
async fn an_unlisted_gpu_takes_no_work_until_it_is_listed_again() {
    let accounting = idle_gpus(&[0, 1]);
    accounting.request_json("{}").unwrap();
    accounting.apply_statistics(&summary(&[(0, 0.0, 0)]), None);
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(accounting.gpus()[1].closed.as_deref(), Some("lost"));
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 0.0, 0), (2, 0.0, 0)]), None);
    let (back, new) = (accounting.request_json("{}").unwrap(), accounting.request_json("{}").unwrap());
    assert_eq!((gpu_numbers(&back), gpu_numbers(&new)), (vec![1], vec![2]));
}

#[tokio::test(start_paused = true)]
async fn stale_or_failed_statistics_are_ignored_and_an_old_reading_closes_the_gpu() {
    let accounting = idle_gpus(&[0]);
    let busy = |change: fn(&mut SummaryBody)| {
        let mut reported = summary(&[(0, 99.0, 99)]);
        change(&mut reported);
        reported
    };
    accounting.apply_statistics(&busy(|reported| reported.stale = true), None);
    accounting.apply_statistics(&busy(|reported| reported.error = Some("no driver".into())), None);
    advance(MAX_AGE).await;
    let lease = accounting.request_json(r#"{"queue":false}"#).unwrap();
    accounting.release(lease.id);
    advance(Duration::from_millis(1)).await;
    let mut stale = summary(&[(0, 0.0, 0)]);
    stale.stale = true;
    accounting.apply_statistics(&stale, None);
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    assert_eq!(accounting.gpus()[0].closed.as_deref(), Some("stale"));
}

#[tokio::test(start_paused = true)]
async fn impossible_statistics_are_rejected() {
    let gpus = [(0, f64::NAN, 0), (1, 101.0, 0), (2, -0.1, 0), (3, 0.0, 101), (4, 0.0, 0), (5, 0.0, 0), (5, 0.0, 0)];
    let mut reported = summary(&gpus);
    reported.gpus_summary.push(GpuSummary { gpu_id: u32::MAX, ..reported.gpus_summary[4].clone() });
    reported.gpus_summary[6].name = "AMD Instinct MI300X".into();
    reported.gpu_count = 2;
    reported.total_memory_mb = 7000;
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    accounting.apply_statistics(&reported, None);
    assert_eq!(gpu_numbers(&accounting.request_json(r#"{"queue":false}"#).unwrap()), [4]);
    assert_eq!(accounting.refusal_code(r#"{"queue":false}"#), "no_capacity");
    let known: Vec<(u32, Option<u64>)> = accounting.gpus().iter().map(|gpu| (gpu.gpu_id, gpu.memory_mib)).collect();
    assert_eq!(known, [0, 1, 2, 3, 4, 5].map(|number| (number, Some(1000))));

    let many: Vec<(u32, f64, u32)> = (0..2000).map(|number| (number, 0.0, 0)).collect();
    accounting.apply_statistics(&summary(&many), Some(&stats(&[(0, "GPU-a"), (0, "GPU-b")])));
    assert_eq!(accounting.gpus().len(), crate::limits::MAX_ACCOUNTED_GPUS);
    for (gpu_count, total_memory_mb) in [(usize::MAX, 7000), (0, u64::MAX), (1, 0)] {
        accounting.apply_statistics(&SummaryBody { gpu_count, total_memory_mb, ..summary(&[(0, 50.0, 0)]) }, None);
        assert_eq!(accounting.gpus()[0].closed.as_deref(), Some("unhealthy"), "{gpu_count} {total_memory_mb}");
    }
}

#[tokio::test(start_paused = true)]
async fn memory_is_reported_by_the_server_or_estimated() {
    let accounting = idle_gpus(&[0]);
    assert_eq!(accounting.refusal_code(r#"{"memory_mib":1001}"#), "unsatisfiable");
    accounting.apply_statistics(&summary(&[(0, 30.0, 0)]), Some(&stats(&[(0, "GPU-a")])));
    assert_eq!(accounting.gpus()[0].memory_mib, Some(1900));
    // Other programs use 600 of 2000 MiB.
    assert_eq!(accounting.refusal_code(r#"{"memory_mib":1301,"queue":false}"#), "no_capacity");
    let lease = accounting.request_json(r#"{"memory_mib":1300}"#).unwrap();
    assert_eq!(lease.devices[0].memory_mib, Some(1300));
    accounting.apply_statistics(&summary(&[(0, 30.0, 0)]), None);
    assert_eq!(accounting.gpus()[0].memory_mib, Some(1900), "the reported size holds");
}

#[tokio::test(start_paused = true)]
async fn reported_uuids_are_shown_and_can_be_selected() {
    let accounting = idle_gpus(&[0, 1]);
    let before = accounting.request_json(r#"{"select":{"uuids":["server1/1"]}}"#).unwrap();
    assert_eq!((before.devices[0].uuid.as_str(), accounting.gpus()[1].uuid.as_deref()), ("server1/1", None));
    assert_eq!(before.env["CUDA_VISIBLE_DEVICES"].as_deref(), Some("1"));
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), Some(&stats(&[(0, "GPU-a"), (1, "GPU-b")])));
    assert_eq!(accounting.lease(before.id).unwrap().devices[0].uuid, "GPU-b");
    let a = accounting.request_json(r#"{"select":{"uuids":["GPU-a","GPU-x"]}}"#).unwrap();
    assert_eq!((gpu_numbers(&a), a.env["CUDA_VISIBLE_DEVICES"].as_deref()), (vec![0], Some("GPU-a")));
    assert_eq!((a.env["ROCR_VISIBLE_DEVICES"].as_ref(), a.env["GPUPOOL_GPU_IDS"].as_deref()), (None, Some("0")));
    assert_eq!(accounting.refusal_code(r#"{"select":{"uuids":["GPU-x"]}}"#), "unsatisfiable");
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_changes_its_number_is_not_granted_twice() {
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    let all = [(0, 0.0, 0), (1, 0.0, 0), (2, 0.0, 0)];
    accounting.apply_statistics(&summary(&all), Some(&stats(&[(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")])));
    let held = accounting.request_json(r#"{"fraction":0.5,"select":{"uuids":["GPU-b"]}}"#).unwrap();
    // GPU-a died, and the others got lower numbers.
    accounting.apply_statistics(&summary(&all[..2]), Some(&stats(&[(0, "GPU-b"), (1, "GPU-c")])));
    assert_eq!(accounting.refusal_code(r#"{"fraction":0.5,"queue":false}"#), "no_capacity");
    assert_eq!(accounting.lease(held.id).unwrap().devices[0].uuid, "GPU-b");
    accounting.release(held.id);
    accounting.apply_statistics(&summary(&all[..2]), None);
    let again = [
        accounting.request_json(r#"{"queue":false}"#).unwrap(),
        accounting.request_json(r#"{"queue":false}"#).unwrap(),
    ];
    assert_eq!(again.map(|lease| lease.devices[0].uuid.clone()), ["GPU-b", "GPU-c"]);
}

#[tokio::test(start_paused = true)]
async fn health_holds_until_the_next_report_and_temperature_does_not() {
    let accounting = idle_gpus(&[0]);
    let look = |change: fn(&mut stats::GpuBody)| {
        let mut reported = stats(&[(0, "GPU-a")]);
        change(&mut reported.gpus[0]);
        accounting.apply_statistics(&summary(&[(0, 0.0, 0)]), Some(&reported));
        accounting.gpus()[0].closed.clone()
    };
    let look_shortly = || {
        accounting.apply_statistics(&summary(&[(0, 0.0, 0)]), None);
        accounting.gpus()[0].closed.clone()
    };
    assert_eq!(look(|gpu| gpu.health = "unhealthy".into()).as_deref(), Some("unhealthy"));
    assert_eq!(look_shortly().as_deref(), Some("unhealthy"));
    assert_eq!(look(|gpu| gpu.health = "healthy".into()), None);
    assert_eq!(look(|gpu| gpu.temperature_c = Some(95)).as_deref(), Some("hot"));
    assert_eq!(look_shortly(), None);
}

#[tokio::test(start_paused = true)]
async fn a_job_on_amd_gpus_gets_the_rocm_variable() {
    let mut reported = summary(&[(0, 0.0, 0), (1, 0.0, 0)]);
    for (gpu, name) in reported.gpus_summary.iter_mut().zip(["AMD Instinct MI300X", "Intel(R) Arc(TM)"]) {
        gpu.name = name.into();
    }
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    accounting.apply_statistics(&reported, None);
    let lease = accounting.request_json(r#"{"select":{"vendor":"amd"}}"#).unwrap();
    assert_eq!(lease.env["ROCR_VISIBLE_DEVICES"].as_deref(), Some("0"));
    assert_eq!(lease.env["CUDA_VISIBLE_DEVICES"], None);
    assert_eq!(accounting.gpus()[1].vendor, "intel");
}

#[tokio::test(start_paused = true)]
async fn several_gpus_must_be_free_in_the_same_poll() {
    let accounting = accounting(&[(0, 99.0, 0), (1, 0.0, 0)]);
    let waiter = accounting.request_json(r#"{"gpus":2}"#).unwrap();
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 99.0, 0)]), None);
    assert_eq!(accounting.state_of(&waiter), LeaseState::Queued);
    accounting.apply_statistics(&summary(&[(0, 0.0, 0), (1, 0.0, 0)]), None);
    assert_eq!(accounting.state_of(&waiter), LeaseState::Active);
}
