//! GPUs leased for a run of many workers: each is used as soon as it is granted, a revoked GPU costs only its own
//! workers, and all GPUs are released however the run ends.
use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};

use gpupool_api::RequestBody;
use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_api::simulate::FaultBody;
use gpupool_client::AgentClient;
use gpupool_client::local::LocalAgent;
use gpupool_confine::Signal;
use gpupool_dispatch::gpu_leases::{GpuError, GpuEvent, GpuLeaseManager, GpuRequest, GrantedLease};
use gpupool_testkit::{DEADLINE, TestAgent, eventually};

use crate::support::{
    BackgroundCommand, ObservedProcess, agent_of, lease_end, live_leases, take_gpus, without_variables,
};

/// Leased GPUs of a run with their events.
struct LeaseRun {
    lease_manager: GpuLeaseManager,
    events: Receiver<GpuEvent>,
    /// Received events that no test step has taken yet.
    skipped_events: Vec<GpuEvent>,
}

impl LeaseRun {
    fn start(client: AgentClient, request: GpuRequest) -> Self {
        let (lease_manager, mut reader) = GpuLeaseManager::start(LocalAgent::from_client(client), request).unwrap();
        let (sender, events) = channel();
        // The thread ends with the lease manager.
        std::thread::spawn(move || {
            while let Some(event) = reader.blocking_next() {
                let _ = sender.send(event);
            }
        });
        Self { lease_manager, events, skipped_events: Vec::new() }
    }

    /// Takes the first matching event, or waits for one.
    fn wait_for_event<T>(&mut self, what: &str, wanted: impl Fn(&GpuEvent) -> Option<T>) -> T {
        let mut looked_at = 0;
        loop {
            for index in looked_at..self.skipped_events.len() {
                if let Some(found) = wanted(&self.skipped_events[index]) {
                    self.skipped_events.remove(index);
                    return found;
                }
            }
            looked_at = self.skipped_events.len();
            let events = self.events.recv_timeout(DEADLINE);
            self.skipped_events.push(
                events.unwrap_or_else(|error| panic!("{error} before {what}; received: {:#?}", self.skipped_events)),
            );
        }
    }

    /// Releases all GPUs and returns the events that were not taken.
    fn remaining_events(self) -> Vec<GpuEvent> {
        let Self { lease_manager, events, skipped_events } = self;
        lease_manager.release_all();
        skipped_events.into_iter().chain(events).collect()
    }

    fn next_grant(&mut self) -> GrantedLease {
        self.wait_for_event("a grant", |event| match event {
            GpuEvent::Granted(granted) => Some(granted.clone()),
            _ => None,
        })
    }

    /// Waits for several grants and sorts them by slot.
    fn next_grants(&mut self, count: usize) -> Vec<GrantedLease> {
        let mut granted: Vec<GrantedLease> = (0..count).map(|_| self.next_grant()).collect();
        granted.sort_by_key(|granted| granted.slot);
        granted
    }

    fn next_loss(&mut self) -> (usize, String) {
        self.wait_for_event("a loss", |event| match event {
            GpuEvent::Lost { slot, why } => Some((*slot, why.clone())),
            _ => None,
        })
    }

    fn next_refusal(&mut self) -> (usize, String) {
        self.wait_for_event("a refusal", |event| match event {
            GpuEvent::Refused { slot, why } => Some((*slot, why.clone())),
            _ => None,
        })
    }

    fn next_wait(&mut self) -> (usize, String) {
        self.wait_for_event("waiting", |event| match event {
            GpuEvent::Waiting { slot, text } => Some((*slot, text.clone())),
            _ => None,
        })
    }

    fn wait_for_note(&mut self, part: &str) {
        self.wait_for_event(part, |event| matches!(event, GpuEvent::Note(text) if text.contains(part)).then_some(()));
    }
}

/// Requests whole GPUs.
fn whole_gpus(leases: usize) -> GpuRequest {
    GpuRequest { leases, ..GpuRequest::default() }
}

/// Process that acts as a worker under a lease; killed on drop.
struct WorkerProcess(Child);

impl WorkerProcess {
    fn start(granted: &GrantedLease) -> Self {
        let mut command = Command::new("sleep");
        command.arg("600");
        for (name, value) in &granted.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn observe(&self) -> ObservedProcess {
        ObservedProcess::of(&self.pid().to_string())
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn each_gpu_is_used_as_soon_as_it_is_granted() {
    let agent = agent_of("3xH100").start().await;
    let client = agent.client_unix();
    let other = take_gpus(&client, 1).await;
    let mut run = LeaseRun::start(agent.client_unix(), whole_gpus(3));
    let first = run.next_grants(2);
    let (slot, text) = run.next_wait();
    assert!(text.contains("number 1"), "{text}");
    client.release(other.id).await.unwrap();
    let last = run.next_grant();
    assert_eq!(last.slot, slot);

    let all: Vec<&GrantedLease> = first.iter().chain([&last]).collect();
    assert_eq!(all.iter().map(|granted| granted.slot).collect::<BTreeSet<_>>(), BTreeSet::from([0, 1, 2]));
    assert_eq!(all.iter().flat_map(|granted| granted.gpu_ids()).collect::<BTreeSet<_>>(), BTreeSet::from([0, 1, 2]));
    for granted in all {
        let is_set = |name: &str, value: &str| granted.env.contains(&(name.into(), Some(value.into())));
        assert!(is_set("GPUPOOL_LEASE", &granted.lease.to_string()), "{granted:#?}");
        assert!(is_set("GPUPOOL_FENCING_TOKEN", &granted.token.to_string()), "{granted:#?}");
        assert!(is_set("CUDA_VISIBLE_DEVICES", &granted.devices[0].uuid), "{granted:#?}");
    }
    run.lease_manager.release_all();
    assert_eq!(live_leases(&client).await, []);
}

#[tokio::test]
async fn an_agent_found_on_another_runtime_can_be_used() {
    for way in [AgentAddress::Socket, AgentAddress::Tcp] {
        let agent = agent_of("1xH100").start().await;
        let client = way.client(&agent);
        let find = {
            let client = client.clone();
            move || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(client.pool())
        };
        std::thread::spawn(find).join().unwrap().unwrap();
        let mut run = LeaseRun::start(client, whole_gpus(1));
        assert_eq!(run.next_grant().gpu_ids(), [0]);
    }
}

#[tokio::test]
async fn fractions_fill_one_gpu_and_no_more() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let body = RequestBody { fraction: Some(0.25), ..RequestBody::default() };
    let mut run = LeaseRun::start(agent.client_unix(), GpuRequest { body, leases: 5, gpu_ids: vec![] });
    for granted in run.next_grants(4) {
        let [device] = granted.devices.as_slice() else { panic!("{granted:#?}") };
        assert_eq!((device.gpu_id, device.fraction), (0, 0.25));
    }
    run.next_wait();
    assert_eq!(live_leases(&client).await.iter().filter(|lease| lease.state == LeaseState::Queued).count(), 1);
    run.lease_manager.release_all();
    assert_eq!(live_leases(&client).await, []);
}

#[tokio::test]
async fn selected_gpus_are_used_and_a_missing_one_is_refused() {
    let agent = agent_of("3xH100").start().await;
    let mut run = LeaseRun::start(agent.client_unix(), GpuRequest { gpu_ids: vec![2, 9, 0], ..GpuRequest::default() });
    let (slot, why) = run.next_refusal();
    assert_eq!(slot, 1, "{why}");
    let granted = run.next_grants(2);
    let reported: Vec<_> = granted.iter().map(|granted| (granted.slot, granted.gpu_ids())).collect();
    assert_eq!(reported, [(0, vec![2]), (2, vec![0])]);
}

#[tokio::test]
async fn a_revoked_gpu_costs_only_its_workers_and_is_requested_again() {
    for way in [AgentAddress::Socket, AgentAddress::Tcp] {
        let agent = agent_of("2xH100").start().await;
        let mut run = LeaseRun::start(way.client(&agent), whole_gpus(2));
        let [taken, kept] = <[GrantedLease; 2]>::try_from(run.next_grants(2)).unwrap();
        agent.client_unix().revoke(taken.lease, 0.0).await.unwrap();
        let (slot, why) = run.next_loss();
        assert_eq!(slot, taken.slot);
        assert!(why.contains("administrator"), "{why}");
        let again = run.next_grant();
        assert_eq!((again.slot, again.gpu_ids()), (taken.slot, taken.gpu_ids()));
        assert!(again.token > taken.token && again.lease != taken.lease, "{again:#?}");
        let old = run.lease_manager.attach_process(&taken, std::process::id());
        assert!(matches!(old, Err(GpuError::NotHeld { lease }) if lease == taken.lease), "{old:?}");
        assert_eq!(lease_end(&agent.client_unix(), kept.lease).await.0, LeaseState::Active);
        assert_eq!(run.remaining_events(), []);
        assert_eq!(live_leases(&agent.client_unix()).await, []);
    }
}

#[tokio::test]
async fn the_agent_kills_only_the_workers_on_a_lost_gpu() {
    let mut agent = agent_of("2xH100").start().await;
    let mut run = LeaseRun::start(agent.client_unix(), whole_gpus(2));
    let [taken, kept] = <[GrantedLease; 2]>::try_from(run.next_grants(2)).unwrap();
    let (one, two, other) = (WorkerProcess::start(&taken), WorkerProcess::start(&taken), WorkerProcess::start(&kept));
    let ends = [one.observe(), two.observe()];
    let group = |granted: &GrantedLease, worker: &WorkerProcess| {
        run.lease_manager.attach_process(granted, worker.pid()).unwrap().expect("the agent watches this process").cgroup
    };
    let groups = [group(&taken, &one), group(&taken, &two), group(&kept, &other)];
    assert_eq!(groups[0], groups[1], "both workers of a lease are in its group, where there is one");
    assert!(groups[0].is_none() || groups[0] != groups[2], "{groups:?}");
    // A restarted agent knows the workers by their control group and does not end this test process.
    if groups[0].is_some() {
        agent.restart().await;
    }
    agent.client_unix().revoke(taken.lease, 0.0).await.unwrap();
    run.next_loss();
    ends.iter().for_each(ObservedProcess::wait_for_exit);
    assert_eq!(run.next_grant().slot, taken.slot);
    assert!(other.observe().is_alive());
    drop(other);
    run.lease_manager.release_all();
    assert_eq!(live_leases(&agent.client_unix()).await, []);
}

#[tokio::test]
async fn a_restart_of_the_agent_loses_nothing() {
    for way in [AgentAddress::Socket, AgentAddress::Tcp] {
        let mut agent = agent_of("3xH100").start().await;
        let other = take_gpus(&agent.client_unix(), 1).await;
        let mut run = LeaseRun::start(way.client(&agent), whole_gpus(3));
        let before = run.next_grants(2);
        run.next_wait();
        agent.restart().await;
        if matches!(way, AgentAddress::Tcp) {
            run.wait_for_note("the agent is back");
        }
        let client = agent.client_unix();
        client.release(other.id).await.unwrap();
        run.next_grant();
        for granted in before {
            let now = client.follow(granted.lease, std::time::Duration::ZERO).await.unwrap();
            assert_eq!((now.state, now.token), (LeaseState::Active, Some(granted.token)));
            let is_held = match (&way, now.holder) {
                (AgentAddress::Socket, Some(HolderBody::Process { pid: Some(pid) })) => pid == std::process::id(),
                (AgentAddress::Tcp, holder) => holder == Some(HolderBody::Connection),
                _ => false,
            };
            assert!(is_held, "{granted:#?}");
        }
        let reported = run.remaining_events();
        assert!(!reported.iter().any(|event| matches!(event, GpuEvent::Lost { .. })), "{reported:#?}");
        assert_eq!(live_leases(&client).await, []);
    }
}

#[tokio::test]
async fn a_run_that_stops_while_waiting_leaves_nothing_in_the_queue() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let other = take_gpus(&client, 1).await;
    let mut run = LeaseRun::start(agent.client_unix(), whole_gpus(3));
    run.next_grant();
    let first = run.next_wait();
    let second = run.next_wait();
    assert_ne!(first.0, second.0);
    drop(run);
    assert_eq!(live_leases(&client).await.iter().map(|lease| lease.id).collect::<Vec<_>>(), [other.id]);
}

#[tokio::test]
async fn a_run_that_cannot_wait_is_refused() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    take_gpus(&client, 1).await;
    let body = RequestBody { queue: Some(false), ..RequestBody::default() };
    let mut run = LeaseRun::start(agent.client_unix(), GpuRequest { body, leases: 1, gpu_ids: vec![] });
    run.next_refusal();
    let body = RequestBody { wait_limit_secs: Some(0.1), ..RequestBody::default() };
    let mut run = LeaseRun::start(agent.client_unix(), GpuRequest { body, leases: 1, gpu_ids: vec![] });
    assert!(run.next_refusal().1.contains("reached its wait limit"));
    assert_eq!(live_leases(&client).await.len(), 1);
}

#[tokio::test]
async fn a_run_that_is_killed_leaves_no_lease() {
    for way in [AgentAddress::Socket, AgentAddress::Tcp] {
        let agent = agent_of("2xH100").start().await;
        let mut watch = agent.watch_events().await;
        let mut line = without_variables(Command::new(std::env::current_exe().unwrap()));
        line.args(["--ignored", "--exact", "--nocapture", "gpu_leases::holds_two_gpus_until_it_is_killed"]);
        line.env(ENDPOINT, way.client(&agent).endpoint().to_string());
        let mut running = BackgroundCommand::start(line);
        let mut leases: BTreeSet<u64> = (0..2).map(|_| running.wait_for_output("holds ").parse().unwrap()).collect();
        running.signal(Signal::KILL);
        while !leases.is_empty() {
            let ended = watch.wait_for("the end of both leases", |event| event.kind == "ended").await;
            assert!(ended.lease.is_some_and(|lease| leases.remove(&lease)), "{ended:#?}");
        }
        assert_eq!(live_leases(&agent.client_unix()).await, []);
    }
}

const ENDPOINT: &str = "GPUPOOL_TEST_ENDPOINT";

#[test]
#[ignore = "only started by a_run_that_is_killed_leaves_no_lease"]
fn holds_two_gpus_until_it_is_killed() {
    let endpoint = std::env::var(ENDPOINT).unwrap().parse().unwrap();
    let mut run = LeaseRun::start(AgentClient::new(endpoint).unwrap(), whole_gpus(2));
    // The test harness has started a line.
    println!();
    for granted in run.next_grants(2) {
        println!("holds {}", granted.lease);
    }
    std::thread::sleep(DEADLINE);
}

#[tokio::test]
async fn the_gpu_memory_of_workers_is_reported() {
    let agent = agent_of("2xH100").variable("REFRESH_INTERVAL", "0.05").start().await;
    let client = agent.client_unix();
    let mut run = LeaseRun::start(agent.client_unix(), whole_gpus(2));
    let granted = run.next_grants(2);
    let workers: Vec<WorkerProcess> = (0..2).map(|_| WorkerProcess::start(&granted[0])).collect();
    let pids: Vec<u32> = workers.iter().map(WorkerProcess::pid).collect();
    let used = |slot, pids: &[u32]| run.lease_manager.read_gpu_memory().unwrap().used_by(slot, pids);
    eventually("a look at the devices", async || used(0, &pids).filter(|bytes| *bytes == 0)).await;
    for (pid, mib) in pids.iter().zip([1_024, 2_048]) {
        let fault = format!("squatter:{pid}:{mib}").into();
        client.set_fault(&FaultBody { gpu_id: Some(granted[0].gpu_ids()[0]), fault }).await.unwrap();
    }
    eventually("the memory of both", async || used(0, &pids).filter(|bytes| *bytes == 3_072 << 20)).await;
    assert_eq!(used(0, &pids[..1]), Some(1_024 << 20));
    assert_eq!(used(1, &pids), Some(0), "on the other GPU they use nothing");
    assert_eq!(used(2, &pids), None, "there is no such slot");
    let fault = serde_json::Value::String("failed_field:processes".into());
    client.set_fault(&FaultBody { gpu_id: Some(granted[0].gpu_ids()[0]), fault }).await.unwrap();
    eventually("an unknown value", async || used(0, &pids).is_none().then_some(())).await;
}

#[tokio::test]
async fn a_run_that_ends_while_the_agent_is_away_releases_its_lease_later() {
    let mut agent = agent_of("1xH100").start().await;
    let mut run = LeaseRun::start(agent.client_unix(), whole_gpus(1));
    let granted = run.next_grant();
    agent.kill9().await;
    assert!(run.lease_manager.attach_process(&granted, std::process::id()).is_err());
    let reported = run.remaining_events();
    let printed = format!("lease {} could not be released", granted.lease);
    assert!(
        reported.iter().any(|event| matches!(event, GpuEvent::Note(text) if text.contains(&printed))),
        "{reported:#?}"
    );
    agent.restart().await;
    let client = agent.client_unix();
    eventually("the end of the lease", async || live_leases(&client).await.is_empty().then_some(())).await;
}

enum AgentAddress {
    Socket,
    Tcp,
}

impl AgentAddress {
    fn client(&self, agent: &TestAgent) -> AgentClient {
        match self {
            Self::Socket => agent.client_unix(),
            Self::Tcp => agent.client(),
        }
    }
}
