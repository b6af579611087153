//! A server: the real pool, with a disk that survives crashes, a clock with its own speed, and pauses. Its task ends
//! with the runtime.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use gpupool_core::{
    Bytes, CommandDenied, CommandReply, DeviceFacts, DeviceId, DeviceIdentity, DeviceMemory, DeviceReading,
    IsolationSupport, MilliCpus, NodeFacts, Percent, Policies, Pool, PoolCommand, PoolRow, PoolSettings, PoolTime,
    ReadingField, Vendor,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::audit::InvariantAudit;

/// Memory of every simulated GPU, in MiB.
pub const MEMORY_MIB: u64 = 16_000;
/// Start of the servers' clocks: not zero.
const CLOCK_START: u64 = 1_000_000;
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Kind of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    /// The server decides.
    Agent,
    /// The server only serves statistics.
    Statistics,
}

/// Misreport in the server's list of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misreport {
    AllFree,
    AllTaken,
    MoreThanThereAre,
}

#[derive(Debug)]
pub struct SimulatedServer {
    pub number: usize,
    pub kind: ServerKind,
    pub gpus: u32,
    /// Seconds of its clock per second.
    speed: f64,
    began: Instant,
    state: Mutex<ServerState>,
    /// Notified after every change.
    pub changed: Notify,
    audit: Arc<InvariantAudit>,
}

#[derive(Debug)]
struct ServerState {
    pool: Pool,
    disk: Vec<PoolRow>,
    /// Number of crashes so far.
    generation: u64,
    is_up: bool,
    is_paused: bool,
    misreport: Option<Misreport>,
    /// GPU in use by other programs.
    busy: Option<u32>,
}

impl SimulatedServer {
    pub fn start(number: usize, kind: ServerKind, gpus: u32, speed: f64, audit: Arc<InvariantAudit>) -> Arc<Self> {
        let pool = Pool::new(PoolSettings::default(), Policies::unlimited());
        let state = ServerState {
            pool,
            disk: Vec::new(),
            generation: 0,
            is_up: false,
            is_paused: false,
            misreport: None,
            busy: None,
        };
        let server = Arc::new(Self {
            number,
            kind,
            gpus,
            speed,
            began: Instant::now(),
            state: Mutex::new(state),
            changed: Notify::new(),
            audit,
        });
        server.restart();
        tokio::spawn(server.clone().run_clock());
        server
    }

    pub fn now(&self) -> PoolTime {
        PoolTime(CLOCK_START + (self.began.elapsed().as_secs_f64() * 1000.0 * self.speed) as u64)
    }

    pub fn is_fast(&self) -> bool {
        self.speed > 1.0
    }

    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap()
    }

    pub fn inspect<T>(&self, look: impl FnOnce(&Pool) -> T) -> T {
        look(&self.lock().pool)
    }

    pub fn misreport(&self) -> Option<Misreport> {
        self.lock().misreport
    }

    pub fn set_misreport(&self, misreport: Option<Misreport>) {
        self.lock().misreport = misreport;
    }

    pub fn set_busy(&self, busy: Option<u32>) {
        self.lock().busy = busy;
    }

    pub fn busy(&self) -> Option<u32> {
        self.lock().busy
    }

    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    pub fn is_up(&self) -> bool {
        self.lock().is_up
    }

    /// Whether the server processes requests.
    pub fn is_awake(&self) -> bool {
        let state = self.lock();
        state.is_up && !state.is_paused
    }

    pub fn crash(&self) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_up, false) {
            state.generation += 1;
        }
        state.is_paused = false;
        drop(state);
        self.notify();
    }

    /// Restarts from the stored rows as an agent does: every lease gets one full ttl.
    pub fn restart(&self) {
        let now = self.now();
        let mut state = self.lock();
        if state.is_up {
            return;
        }
        let rows = state.disk.clone();
        let (pool, bad) = Pool::restore(PoolSettings::default(), Policies::unlimited(), now, rows);
        assert!(bad.is_empty(), "{bad:?}");
        (state.pool, state.is_up) = (pool, true);
        drop(state);
        self.sample_devices();
        let name = format!("server{}", self.number);
        let facts = NodeFacts { name: name.into(), cpus: MilliCpus(1), memory: Bytes(1), labels: Default::default() };
        let devices = (0..self.gpus).map(|gpu| device(self.number, gpu)).collect();
        self.apply(PoolCommand::NodeSeen { facts, devices, numbers: Vec::new() }).unwrap();
        self.sample_devices();
    }

    pub fn pause(&self, is_paused: bool) {
        let mut state = self.lock();
        state.is_paused = is_paused && state.is_up;
        drop(state);
        self.notify();
    }

    /// Applies and commits in one step: no client sees uncommitted state.
    pub fn apply(&self, command: PoolCommand) -> Result<CommandReply, CommandDenied> {
        let now = self.now();
        let mut state = self.lock();
        let (reply, outcome) = state.pool.apply(now, command);
        state.disk.extend(outcome.rows);
        let invariants = state.pool.check_invariants();
        let (pool, generation) = (&state.pool, state.generation);
        self.audit.check_step(self, generation, pool, &outcome.effects, invariants);
        drop(state);
        self.notify();
        reply
    }

    fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Reports readings of all devices.
    fn sample_devices(&self) {
        let (at, busy) = (self.now(), self.busy());
        for gpu in 0..self.gpus {
            let mut reading = DeviceReading::idle(at);
            if busy == Some(gpu) {
                reading.utilization = ReadingField::Value(Percent(95_000));
            }
            // Unknown before the node is first seen.
            let _ = self.apply(PoolCommand::Observe { device: DeviceId(gpu), reading });
        }
    }

    async fn run_clock(self: Arc<Self>) {
        let mut read = Instant::now();
        loop {
            if self.is_awake() {
                if read.elapsed() >= SAMPLE_INTERVAL {
                    read = Instant::now();
                    self.sample_devices();
                }
                let due = self.lock().pool.next_deadline();
                if due.is_some_and(|due| due <= self.now()) {
                    self.apply(PoolCommand::Tick).unwrap();
                }
            }
            let due = self.lock().pool.next_deadline().map(|due| {
                let away = due.since(self.now()).0 as f64 / self.speed;
                Instant::now() + Duration::from_millis(away as u64 + 1)
            });
            let next = (read + SAMPLE_INTERVAL).max(Instant::now() + Duration::from_millis(1));
            let next = if self.is_awake() { due.map_or(next, |due| due.min(next)) } else { next };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Waits until the server processes requests; `None` if it has crashed since.
    pub async fn wait_until_awake(&self, generation: u64) -> Option<()> {
        loop {
            if self.generation() != generation {
                return None;
            }
            if self.is_awake() {
                return Some(());
            }
            self.changed.notified().await;
        }
    }
}

fn device(server: usize, gpu: u32) -> DeviceFacts {
    let total = Bytes::from_mib(MEMORY_MIB).unwrap();
    DeviceFacts {
        identity: DeviceIdentity::Uuid(format!("GPU-{server}-{gpu}").into()),
        vendor: Vendor::Nvidia,
        model: "NVIDIA H100".into(),
        memory: Some(DeviceMemory { total, reserved: Bytes::ZERO }),
        partition: None,
        isolation: IsolationSupport::BASIC,
        labels: Default::default(),
    }
}
