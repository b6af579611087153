//! A server: the real pool, with a disk that survives crashes, a clock of its own speed, and pauses. Its task ends with the
//! runtime.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use gpupool_core::{
    Bytes, CommandDenied, CommandReply, DeviceFacts, DeviceId, DeviceIdentity, DeviceMemory, DeviceReading,
    IsolationSupport, MilliCpus, NodeFacts, Percent, Policies, Pool, PoolCommand, PoolRow, PoolSettings, PoolTime,
    ReadingField, Vendor,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::audit::Audit;

/// Memory of every GPU here, in MiB.
pub const MEMORY_MIB: u64 = 16_000;
/// When the servers' clocks began: nothing here happens at zero.
const BOOTED: u64 = 1_000_000;
const READING_EVERY: Duration = Duration::from_secs(5);

/// What a server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It decides.
    Agent,
    /// It has statistics only.
    Statistics,
}

/// How a server's list of devices is not true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    AllFree,
    AllTaken,
    MoreThanThereAre,
}

#[derive(Debug)]
pub struct Server {
    pub number: usize,
    pub kind: Kind,
    pub gpus: u32,
    /// Seconds of its clock in a second.
    speed: f64,
    began: Instant,
    state: Mutex<State>,
    /// Whenever anything of it changed.
    pub changed: Notify,
    audit: Arc<Audit>,
}

#[derive(Debug)]
struct State {
    pool: Pool,
    disk: Vec<PoolRow>,
    /// Grows with every crash.
    life: u64,
    is_up: bool,
    is_paused: bool,
    lie: Option<Lie>,
    /// A GPU somebody else uses.
    busy: Option<u32>,
}

impl Server {
    pub fn start(number: usize, kind: Kind, gpus: u32, speed: f64, audit: Arc<Audit>) -> Arc<Self> {
        let pool = Pool::new(PoolSettings::default(), Policies::unlimited());
        let state = State { pool, disk: Vec::new(), life: 0, is_up: false, is_paused: false, lie: None, busy: None };
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
        tokio::spawn(server.clone().hear_the_clock());
        server
    }

    pub fn now(&self) -> PoolTime {
        PoolTime(BOOTED + (self.began.elapsed().as_secs_f64() * 1000.0 * self.speed) as u64)
    }

    pub fn is_fast(&self) -> bool {
        self.speed > 1.0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn look<T>(&self, look: impl FnOnce(&Pool) -> T) -> T {
        look(&self.lock().pool)
    }

    pub fn lie(&self) -> Option<Lie> {
        self.lock().lie
    }

    pub fn set_lie(&self, lie: Option<Lie>) {
        self.lock().lie = lie;
    }

    pub fn set_busy(&self, busy: Option<u32>) {
        self.lock().busy = busy;
    }

    pub fn busy(&self) -> Option<u32> {
        self.lock().busy
    }

    pub fn life(&self) -> u64 {
        self.lock().life
    }

    pub fn is_up(&self) -> bool {
        self.lock().is_up
    }

    /// Whether it works off what arrives.
    pub fn is_awake(&self) -> bool {
        let state = self.lock();
        state.is_up && !state.is_paused
    }

    pub fn crash(&self) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_up, false) {
            state.life += 1;
        }
        state.is_paused = false;
        drop(state);
        self.tell();
    }

    /// Comes back from its rows, as an agent does: every lease gets one full ttl.
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
        self.read();
        let name = format!("server{}", self.number);
        let facts = NodeFacts { name: name.into(), cpus: MilliCpus(1), memory: Bytes(1), labels: Default::default() };
        let devices = (0..self.gpus).map(|gpu| device(self.number, gpu)).collect();
        self.apply(PoolCommand::NodeSeen { facts, devices, numbers: Vec::new() }).unwrap();
        self.read();
    }

    pub fn pause(&self, is_paused: bool) {
        let mut state = self.lock();
        state.is_paused = is_paused && state.is_up;
        drop(state);
        self.tell();
    }

    /// Applies and commits in one step: what is not committed is never seen by anybody.
    pub fn apply(&self, command: PoolCommand) -> Result<CommandReply, CommandDenied> {
        let now = self.now();
        let mut state = self.lock();
        let (answer, outcome) = state.pool.apply(now, command);
        state.disk.extend(outcome.rows);
        let sane = state.pool.check_invariants();
        let (pool, life) = (&state.pool, state.life);
        self.audit.happened(self, life, pool, &outcome.effects, sane);
        drop(state);
        self.tell();
        answer
    }

    fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// What its devices report.
    fn read(&self) {
        let (at, busy) = (self.now(), self.busy());
        for gpu in 0..self.gpus {
            let mut reading = DeviceReading::idle(at);
            if busy == Some(gpu) {
                reading.utilization = ReadingField::Value(Percent(95_000));
            }
            // Unknown before the node was first seen.
            let _ = self.apply(PoolCommand::Observe { device: DeviceId(gpu), reading });
        }
    }

    async fn hear_the_clock(self: Arc<Self>) {
        let mut read = Instant::now();
        loop {
            if self.is_awake() {
                if read.elapsed() >= READING_EVERY {
                    read = Instant::now();
                    self.read();
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
            let next = (read + READING_EVERY).max(Instant::now() + Duration::from_millis(1));
            let next = if self.is_awake() { due.map_or(next, |due| due.min(next)) } else { next };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Waits until it works off what arrived in this life; `None` where that is over.
    pub async fn awake(&self, life: u64) -> Option<()> {
        loop {
            if self.life() != life {
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
