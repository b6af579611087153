//! Workers of several clients compete for the GPUs of several agents while agents are killed and paused and proxies
//! fail at random. Afterwards every request was served or refused, no GPU was leased twice, and nothing is left.
//!
//! `GPUPOOL_CHAOS_CLIENTS`, `GPUPOOL_CHAOS_SECS` and `GPUPOOL_CHAOS_SEED` set size, duration and seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_client::{Balancing, Client, ClientError};
use gpupool_testkit::audit::fetch_all_records;
use gpupool_testkit::{ChaosRun, ProxyMode, SeededRng, within_deadline};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::common::{Fleet, quick_polling, wait_for_health};

const FLEET: [&str; 4] = ["4xH100", "2xH100", "2xA100", "1xH100"];
const STRATEGIES: [Balancing; 3] = [Balancing::Availability, Balancing::RoundRobin, Balancing::Weighted];

/// Results of all requests.
#[derive(Debug, Default)]
struct ChaosTally {
    granted: u64,
    too_long: u64,
    unavailable: u64,
    full: u64,
    given_up: u64,
    lost: u64,
    /// Granted leases by endpoint, with their worker.
    held: BTreeMap<(String, u64), String>,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_served_or_refused_and_nothing_is_leased_twice() {
    let chaos = ChaosRun::new("fleet", 30, 6);
    let ChaosRun { clients: workers, secs, seed, .. } = chaos;
    let mut chance = SeededRng::new(seed);
    let mut fleet = Fleet::start(&FLEET).await;
    let tally = Arc::new(Mutex::new(ChaosTally::default()));
    let until = Instant::now() + Duration::from_secs(secs);
    let mut running = JoinSet::new();
    let mut clients = Vec::new();
    for strategy in STRATEGIES {
        let client = quick_polling(Client::builder().endpoints(fleet.addresses())).strategy(strategy).build().unwrap();
        client.start().await.unwrap();
        clients.push(client);
    }
    for number in 0..workers {
        let client = clients[(number % 3) as usize].clone();
        running.spawn(work(client, number, chance.fork(), tally.clone(), until));
    }
    let faults = break_at_random(&mut fleet, &mut chance, until).await;
    while let Some(ended) = within_deadline("every worker to be served or told", running.join_next()).await {
        ended.unwrap();
    }
    for client in &clients {
        for path in &fleet.paths {
            client.trigger_endpoint_recovery(path.address()).await.unwrap();
        }
        for number in 0..FLEET.len() {
            wait_for_health(client, number, true).await;
        }
        assert_eq!(client.pool_status().unwrap().active_workers, 0);
    }
    fleet.wait_until_empty().await;
    fleet.check_audit().await;
    let granted = all_grants(&fleet, &clients[0]).await;
    let tally = tally.lock().unwrap();
    for (lease, worker) in &tally.held {
        assert_eq!(granted.get(lease), Some(worker), "{lease:?} was handed out and never granted");
    }
    assert!(tally.granted > workers && faults > 0, "{tally:?}");
    eprintln!(
        "{faults} faults; {} granted, {} waited too long, {} found no endpoint, {} reported that all is full, {} gave \
         up, {} lost; {} grants without a response; seed {seed}",
        tally.granted,
        tally.too_long,
        tally.unavailable,
        tally.full,
        tally.given_up,
        tally.lost,
        granted.len() - tally.held.len()
    );
}

/// Returns every lease that was ever active, with its owner.
async fn all_grants(fleet: &Fleet, client: &Client) -> BTreeMap<(String, u64), String> {
    let mut granted = BTreeMap::new();
    for (agent, endpoint) in fleet.agents.iter().zip(client.endpoints_info().unwrap()) {
        for record in fetch_all_records(&agent.client()).await.unwrap() {
            if record.event == "granted" {
                granted.insert((endpoint.endpoint_id.clone(), record.lease), record.worker_id.unwrap_or_default());
            }
        }
    }
    granted
}

async fn work(client: Client, number: u64, mut chance: SeededRng, tally: Arc<Mutex<ChaosTally>>, until: Instant) {
    let mut received = 0;
    while Instant::now() < until {
        received += 1;
        let worker = format!("worker-{number}-{received}");
        let body = RequestBody {
            worker_id: Some(worker.as_str().into()),
            fraction: [None, None, Some(0.5), Some(0.1)][chance.below(4) as usize],
            queue: Some(!chance.percent_chance(10)),
            wait_limit_secs: Some(*chance.pick(&[0.05, 1.0, 20.0])),
            ttl_secs: Some(3.0),
            ..RequestBody::default()
        };
        let request = client.request(body);
        let answer = if chance.percent_chance(10) {
            match tokio::time::timeout(Duration::from_millis(chance.below(50)), request).await {
                Ok(answer) => answer,
                Err(_) => {
                    tally.lock().unwrap().given_up += 1;
                    continue;
                }
            }
        } else {
            request.await
        };
        let lease = match answer {
            Ok(lease) => lease,
            Err(error) => {
                tally.lock().unwrap().note(&error);
                tokio::time::sleep(Duration::from_millis(chance.below(100))).await;
                continue;
            }
        };
        {
            let mut tally = tally.lock().unwrap();
            tally.granted += 1;
            let before = tally.held.insert((lease.endpoint_id().into(), lease.id()), worker);
            assert_eq!(before, None, "lease {} of {} was handed out twice", lease.id(), lease.endpoint_id());
        }
        tokio::select! {
            _ = lease.wait_until_lost() => tally.lock().unwrap().lost += 1,
            () = tokio::time::sleep(Duration::from_millis(chance.below(60))) => {}
        }
        if chance.percent_chance(80) {
            // An unreachable agent gets the release later, or ends the lease on its own.
            let _ = lease.release().await;
        }
    }
}

impl ChaosTally {
    fn note(&mut self, error: &ClientError) {
        match error {
            ClientError::WaitedTooLong { .. } => self.too_long += 1,
            ClientError::AllEndpointsUnavailable { .. } => self.unavailable += 1,
            error if error.code() == Some("no_capacity") => self.full += 1,
            error if error.is_transient() => self.unavailable += 1,
            error => panic!("nothing a healthy client says: {error}"),
        }
    }
}

/// Injects and clears faults until the time is up; everything works afterwards.
async fn break_at_random(fleet: &mut Fleet, chance: &mut SeededRng, until: Instant) -> u32 {
    let mut faults = 0;
    while Instant::now() < until {
        let number = chance.below(FLEET.len() as u64) as usize;
        let pause = Duration::from_millis(50 + chance.below(600));
        faults += 1;
        match chance.below(10) {
            0..=2 => {
                fleet.agents[number].kill9().await;
                tokio::time::sleep(pause).await;
                fleet.agents[number].restart().await;
            }
            3 => {
                fleet.agents[number].pause();
                tokio::time::sleep(pause).await;
                fleet.agents[number].resume();
            }
            other => {
                let paths = [
                    ProxyMode::Silent,
                    ProxyMode::Reset,
                    ProxyMode::Garbage,
                    ProxyMode::HalfAnswers,
                    ProxyMode::Status(500),
                    ProxyMode::Slow(Duration::from_millis(40)),
                ];
                fleet.set_proxy_mode(number, paths[(other - 4) as usize]);
                tokio::time::sleep(pause).await;
                fleet.set_proxy_mode(number, ProxyMode::Good);
            }
        }
    }
    faults
}
