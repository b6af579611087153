//! The authority without its thread, on a clock of the test's own, with one GPU and a store in memory.

mod attaching;
mod following;
mod holders;
mod housekeeping;
mod hung_disk;
mod publishing;

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::SystemTime;

use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseBody;
use gpupool_core::{
    Bytes, DeviceHealth, DeviceIdentity, DeviceReading, DrainMode, GpuId, LeaseHolder, LeaseId, LeaseState, MilliCpus,
    Millis, NodeFacts, Policies, PoolCommand, PoolSettings, PoolTime, Request, Token,
};
use gpupool_store::{ClockReading, LeaseStore, MemoryDisk, TokenOwners};
use tokio::sync::oneshot;

use super::handle::{AuthorityMessage, CallId, CallerCommand, FollowCall, Refusal, Reply};
use super::{Authority, AuthoritySpec, AuthorityThread};
use crate::events::Events;
use crate::identity::{Caller, Role};
use crate::messages::{DeviceSample, LeaseAttachment, NodeLink, NodeOrder, NodeReport, NodeSample, test_facts};
use crate::metrics::Metrics;

type ReplyReceiver = oneshot::Receiver<Result<Reply, Refusal>>;

/// A node that remembers its orders, and can be made to take none.
#[derive(Clone, Default)]
struct RecordingNode(Arc<Mutex<(Vec<NodeOrder>, bool)>>);

impl NodeLink for RecordingNode {
    fn send(&mut self, order: NodeOrder) -> Result<(), NodeOrder> {
        let mut inner = self.0.lock().unwrap();
        if inner.1 {
            return Err(order);
        }
        inner.0.push(order);
        Ok(())
    }

    fn prepares_devices(&self) -> bool {
        false
    }
}

impl RecordingNode {
    /// Returns the orders since the last call.
    fn take_orders(&self) -> Vec<NodeOrder> {
        std::mem::take(&mut self.0.lock().unwrap().0)
    }

    fn set_busy(&self, is_busy: bool) {
        self.0.lock().unwrap().1 = is_busy;
    }
}

struct AuthorityStage {
    authority: AuthorityThread,
    disk: MemoryDisk,
    node: RecordingNode,
    now: PoolTime,
    calls: u64,
}

impl AuthorityStage {
    fn new() -> Self {
        let mut stage = Self::on(MemoryDisk::default());
        stage.sample(DeviceReading::idle(stage.now));
        assert_eq!(stage.node.take_orders(), [NodeOrder::Fence { leases: Vec::new() }]);
        stage
    }

    /// Creates an authority that continues from the rows on a disk.
    fn on(disk: MemoryDisk) -> Self {
        let node = RecordingNode::default();
        let spec = spec(&disk, &node);
        let now = PoolTime(1_000_000);
        let (authority, complaints) = AuthorityThread::new(spec, ClockReading { pool: now, wall: SystemTime::now() });
        assert!(complaints.is_empty(), "{complaints:?}");
        Self { authority, disk, node, now, calls: 0 }
    }

    /// Creates a new authority on the rows of this one, as after a restart.
    fn restarted(self) -> Self {
        Self::on(self.disk)
    }

    fn receive(&mut self, messages: Vec<AuthorityMessage>) {
        self.authority.process_batch(ClockReading { pool: self.now, wall: SystemTime::now() }, messages);
    }

    /// Reports a reading of the node's GPU.
    fn sample(&mut self, reading: DeviceReading) {
        self.receive(vec![AuthorityMessage::Report(sampled(Some(reading)))]);
    }

    /// Advances the time, as the thread would notice it without messages.
    fn pass(&mut self, millis: Millis) {
        for _ in 0..millis.0 / 1000 {
            self.now = self.now.after(Millis(1000));
            self.receive(Vec::new());
        }
    }

    /// Takes the GPU.
    fn take(&mut self) -> LeaseBody {
        let lease = self.request("alice");
        assert_eq!(lease.state, LeaseState::Active, "{lease:?}");
        lease
    }

    fn request(&mut self, owner: &str) -> LeaseBody {
        match self.try_request(owner).unwrap() {
            Reply::Lease(lease) => *lease,
            other => panic!("{other:?}"),
        }
    }

    fn try_request(&mut self, owner: &str) -> Result<Reply, Refusal> {
        let (message, mut answer) = request(owner, None, None);
        self.receive(vec![message]);
        answer.try_recv().unwrap()
    }

    fn follow(&mut self, owner: &str, leases: &[u64], until: PoolTime) -> ReplyReceiver {
        self.follow_as(true, owner, leases, until)
    }

    fn follow_as(&mut self, is_poll: bool, owner: &str, leases: &[u64], until: PoolTime) -> ReplyReceiver {
        let (reply, receiver) = oneshot::channel();
        let leases = leases.iter().copied().map(LeaseId).collect();
        let call = FollowCall {
            id: self.next_call(),
            caller: user(owner),
            leases,
            until,
            is_single: false,
            is_poll,
            releases: false,
            reply,
        };
        self.receive(vec![AuthorityMessage::Follow(call)]);
        receiver
    }

    fn next_call(&mut self) -> CallId {
        self.calls += 1;
        CallId(self.calls)
    }

    fn release(&mut self, lease: &LeaseBody) {
        let (message, mut answer) = asked("alice", PoolCommand::Release { lease: LeaseId(lease.id) });
        self.receive(vec![message]);
        answer.try_recv().unwrap().unwrap();
    }

    fn state(&self, lease: u64) -> LeaseState {
        self.authority.pool().lease(LeaseId(lease)).unwrap().state
    }
}

/// Returns everything that an authority over one node starts with, on the rows of a disk.
fn spec(disk: &MemoryDisk, node: &RecordingNode) -> AuthoritySpec {
    let store = disk.open();
    AuthoritySpec {
        rows: store.load().unwrap().rows,
        store: Box::new(store),
        tokens: TokenOwners::default(),
        settings: PoolSettings { drain: DrainMode::WhenGone { patience: Millis(30_000) }, ..PoolSettings::default() },
        policies: Policies::unlimited(),
        links: vec![("node".into(), Box::new(node.clone()))],
        waiters_per_owner: 1_000,
        reconnect_grace: Millis(10_000),
        real_processes: true,
        events: Arc::new(Events::new("run".into())),
        metrics: Arc::new(Metrics::new()),
    }
}

/// Starts an authority with its thread on a disk in memory. The disk makes its commits fail or hang.
pub(crate) fn start_in_memory(disk: &MemoryDisk) -> (Authority, JoinHandle<()>) {
    let (authority, thread, complaints) = super::start(spec(disk, &RecordingNode::default())).unwrap();
    assert!(complaints.is_empty(), "{complaints:?}");
    (authority, thread)
}

/// Lets a future begin, which must not be ready yet.
async fn poll_once<T>(future: &mut (impl Future<Output = T> + Unpin)) {
    tokio::select! {
        biased;
        _ = future => panic!("it is ready"),
        () = std::future::ready(()) => {}
    }
}

/// Returns the report of a node with one GPU.
pub(crate) fn sampled(reading: Option<DeviceReading>) -> NodeReport {
    let facts = Arc::new(test_facts(DeviceIdentity::Uuid("GPU-0".into())));
    let device = DeviceSample { gpu_id: GpuId(0), facts, health: DeviceHealth::Healthy, reading };
    let labels = Default::default();
    let node = NodeFacts { name: "node".into(), cpus: MilliCpus(1000), memory: Bytes::ZERO, labels };
    NodeReport::Sampled(Box::new(NodeSample { node, devices: vec![device], links: Vec::new() }))
}

/// Returns the command that requests one GPU.
pub(crate) fn request_command(owner: &str, key: Option<&str>) -> PoolCommand {
    let body = RequestBody { owner: Some(owner.into()), ttl_secs: Some(3600.0), ..RequestBody::default() };
    PoolCommand::Request {
        request: Arc::new(Request::try_from(body).unwrap()),
        key: key.map(Into::into),
        by_admin: false,
    }
}

fn asked(owner: &str, command: PoolCommand) -> (AuthorityMessage, ReplyReceiver) {
    let (reply, receiver) = oneshot::channel();
    (AuthorityMessage::Command(CallerCommand { command, caller: user(owner), wait_until: None, reply }), receiver)
}

/// Returns a request for the GPU, with an idempotency key or a time until which its reply may wait.
fn request(
    owner: &str,
    key: Option<&str>,
    wait_until: Option<(CallId, PoolTime)>,
) -> (AuthorityMessage, ReplyReceiver) {
    let command = request_command(owner, key);
    let (reply, receiver) = oneshot::channel();
    (AuthorityMessage::Command(CallerCommand { command, caller: user(owner), wait_until, reply }), receiver)
}

pub(crate) fn user(owner: &str) -> Caller {
    Caller { owner: owner.into(), role: Role::User, uid: None }
}

fn attach(lease: &LeaseBody, token: u64, holder: LeaseHolder) -> (AuthorityMessage, ReplyReceiver) {
    let (reply, receiver) = oneshot::channel();
    let has_cgroup = matches!(holder, LeaseHolder::Cgroup(_));
    let attachment =
        LeaseAttachment { lease: LeaseId(lease.id), token: Token(token), holder, has_process: true, has_cgroup };
    (AuthorityMessage::Attach(attachment, user("alice"), reply), receiver)
}
