//! The authority's thread while its disk hangs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpupool_core::{ProcessAttribution, ProcessUsage};
use gpupool_store::MemoryFault;

use super::*;
use crate::clock;
use crate::limits::MESSAGES;

const DEADLINE: Duration = Duration::from_secs(60);

/// Starts an authority with one idle GPU.
async fn with_one_gpu(disk: &MemoryDisk) -> (Authority, JoinHandle<()>) {
    let (authority, thread) = start_in_memory(disk);
    authority.report(sampled(Some(DeviceReading::idle(clock::now())))).unwrap();
    authority.query(|_| ()).await.unwrap();
    (authority, thread)
}

/// Makes the disk hang in the commit of a request.
async fn hang(disk: &MemoryDisk, authority: &Authority) -> tokio::task::JoinHandle<Result<Reply, Refusal>> {
    disk.set_fault(Some(MemoryFault::Hang));
    let asking = authority.clone();
    let asked = tokio::spawn(async move { asking.ask(user("bob"), request_command("bob", None)).await });
    let disk = disk.clone();
    tokio::task::spawn_blocking(move || disk.wait_until_hanging()).await.unwrap();
    asked
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_do_not_fill_the_channel_and_a_lease_keeps_its_devices_and_processes() {
    let disk = MemoryDisk::default();
    let (authority, _thread) = with_one_gpu(&disk).await;
    let Ok(Reply::Lease(lease)) = authority.ask(user("alice"), request_command("alice", None)).await else { panic!() };
    let lease = LeaseId(lease.id);
    let asked = hang(&disk, &authority).await;
    let running = || {
        let process = ProcessUsage { attribution: ProcessAttribution::Lease(lease), memory: None };
        let leases_as_of = Some(authority.snapshot().at.pool);
        DeviceReading { processes: Some(vec![process]), leases_as_of, ..DeviceReading::idle(clock::now()) }
    };
    for _ in 0..2 * MESSAGES {
        assert_eq!(authority.report(sampled(Some(running()))), Ok(()));
    }
    assert_eq!(authority.report(NodeReport::Drained { lease: LeaseId(99) }), Ok(()), "there is room for other reports");
    disk.set_fault(None);
    asked.await.unwrap().unwrap();
    let last = running();
    let read_at = last.at;
    authority.report(sampled(Some(last))).unwrap();
    let (state, draining, device) = authority
        .query(move |authority| {
            let known = authority.pool().lease(lease).unwrap();
            let device = authority.pool().devices().next().unwrap();
            (known.state, known.draining, device)
        })
        .await
        .unwrap();
    assert_eq!((state, draining, device.leases, device.closed), (LeaseState::Active, false, vec![lease], None));
    assert_eq!(device.read_at, Some(read_at), "the newest sample is applied");
    assert_eq!(device.foreign.map(|load| load.processes), Some(0), "no process is a squatter");
}

#[test]
fn a_sample_that_replaces_another_keeps_the_readings_that_it_lacks() {
    let samples = crate::authority::samples::LatestSamples::default();
    let mut announced = 0;
    let at = PoolTime(7);
    for reading in [Some(DeviceReading::idle(at)), None] {
        let NodeReport::Sampled(sample) = sampled(reading) else { unreachable!() };
        samples
            .put(sample, || {
                announced += 1;
                Ok(())
            })
            .unwrap();
    }
    let taken: Vec<_> = samples.take().collect();
    assert_eq!((announced, taken.len(), samples.take().count()), (1, 1, 0));
    assert_eq!(taken[0].devices[0].reading.as_ref().map(|reading| reading.at), Some(at));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_query_is_refused_in_time_and_none_runs_later() {
    let disk = MemoryDisk::default();
    let (authority, _thread) = with_one_gpu(&disk).await;
    let asked = hang(&disk, &authority).await;
    let ran = Arc::new(AtomicBool::new(false));
    let (by_query, by_store) = (ran.clone(), ran.clone());
    let start = Instant::now();
    let (query, store, single, several) = tokio::join!(
        authority.query(move |_| by_query.store(true, Ordering::Relaxed)),
        authority.read_store(move |_| by_store.store(true, Ordering::Relaxed)),
        authority.follow_lease(user("alice"), LeaseId(1), Duration::ZERO),
        authority.follow_leases(user("alice"), [LeaseId(1)].into(), Duration::from_millis(10)),
    );
    assert_eq!((query, store), (Err(Refusal::Busy), Err(Refusal::Busy)));
    assert_eq!((single.unwrap_err(), several.unwrap_err()), (Refusal::Busy, Refusal::Busy));
    assert!(start.elapsed() < DEADLINE);
    disk.set_fault(None);
    asked.await.unwrap().unwrap();
    authority.query(|_| ()).await.unwrap();
    assert!(!ran.load(Ordering::Relaxed), "its caller is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_with_a_full_channel_can_be_stopped_and_takes_the_messages_before() {
    let disk = MemoryDisk::default();
    let (authority, thread) = with_one_gpu(&disk).await;
    let asked = hang(&disk, &authority).await;
    let mut sent_before = Box::pin(authority.ask(user("eve"), request_command("eve", None)));
    poll_once(&mut sent_before).await;
    while authority.report(NodeReport::Drained { lease: LeaseId(99) }).is_ok() {}
    authority.stop();
    assert!(authority.is_alive(), "it waits for its disk");
    disk.set_fault(None);
    asked.await.unwrap().unwrap();
    sent_before.await.unwrap();
    let start = Instant::now();
    while !thread.is_finished() {
        assert!(start.elapsed() < DEADLINE, "it does not end");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(authority.query(|_| ()).await, Err(Refusal::Stopping));
}
