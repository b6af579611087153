//! Starting everything in order, and ending it in the reverse order.
//!
//! The store is opened first (nobody else may have it), then the owner thread goes on from its rows, devices are read,
//! and only then the sockets open: whoever is answered is answered from what is known. SIGTERM and SIGINT drain: running
//! answers are finished, leases stay. SIGHUP reads the configuration and the certificates again.

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpupool_config::{Config, Loaded, Problems};
use gpupool_core::device::NodeFacts;
use gpupool_core::lease::Holder;
use gpupool_core::row::Counters;
use gpupool_core::{Bytes, Drain, LeaseId, MilliCpus, Millis, Row, Settings, Time};
use gpupool_devices::GpuIds;
use gpupool_store::{LeaseStore, LoadedRows, SqliteStore};
use tokio::sync::mpsc;

use crate::error::AgentError;
use crate::events::Events;
use crate::groups::Groups;
use crate::holders::Holders;
use crate::http::{self, App};
use crate::leaving::{self, Leave};
use crate::metrics::Metrics;
use crate::net::{self, Net, Shutdown, Tls};
use crate::owner::{self, Owner, OwnerSpec, OwnerThread};
use crate::sampler::Sampler;
use crate::sources::Sources;
use crate::stats::{Filter, Statistics};
use crate::watching::Watching;
use crate::{clock, housekeeping, notify, signals};

/// How long devices may go unread, apart from three refresh intervals, before their readings say nothing any more.
const UNREAD_AT_MOST: Duration = Duration::from_secs(10);

/// What an agent is started with.
pub struct AgentSpec {
    /// Its configuration.
    pub loaded: Loaded,
    /// Reads the configuration again.
    pub reread: Box<dyn Fn() -> Result<Loaded, Problems> + Send>,
    /// Makes a new log level take effect.
    pub set_log_level: Box<dyn Fn(gpupool_config::LogLevel) + Send>,
    /// Comes back when what was logged is written: the process ends right after.
    pub finish_log: Box<dyn Fn() + Send>,
}

/// Runs an agent until it is told to stop.
pub fn serve(spec: AgentSpec) -> Result<(), AgentError> {
    net::raise_open_files();
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(AgentError::Start)?;
    runtime.block_on(run(spec))
}

async fn run(spec: AgentSpec) -> Result<(), AgentError> {
    let started = Instant::now();
    let config = Arc::new(spec.loaded.config.clone());
    let opened = open(&config)?;
    let trail = Arc::new(tokio::sync::Mutex::new(opened.0.trail_reader()));
    let sources = Sources::of(&config)?;
    let events = Arc::new(Events::new(run_id().into()));
    let metrics = Arc::new(Metrics::new());
    let groups = Arc::new(Groups::detect(&config.server.state_dir));
    tracing::info!("jobs are held by: {}", groups.describe());
    let refresh = config.monitoring.refresh_interval;
    let filter = Filter::new(config.monitoring.cuda_visible_devices.clone());
    let statistics = Arc::new(Statistics::new(filter, refresh, config.monitoring.max_history as usize));

    let (leaves, leaving) = mpsc::unbounded_channel();
    let watching = Watching::new(events.clone(), metrics.clone(), sources.simulation.clone(), leaves.clone());
    let (owner, owner_thread) = start_owner(&config, opened, &sources, watching.watcher())?;
    let holders = Holders::new(owner.clone());
    watching.know(holders.clone());
    let ids = go_on(&owner, &holders, &groups, &leaves, &config).await?;
    let leaving = tokio::spawn(leaving::run(leaving, groups.clone(), owner.clone()));

    let simulation = sources.simulation.clone();
    let sampler =
        sources.start(ids, &config, &owner, statistics.clone(), metrics.clone()).map_err(AgentError::Start)?;

    let tls = tls(&config)?;
    let net = bind(&config, tls.clone()).await?;
    let port = net.addresses().first().map_or(config.server.port, std::net::SocketAddr::port);
    let shutdown = Shutdown::new();
    let router = http::router(App {
        owner: owner.clone(),
        trail,
        statistics,
        events,
        config: config.clone(),
        port,
        routes: Vec::new(),
        metrics,
        holders,
        groups,
        simulation,
        callers: http::Callers::default(),
        shutdown: shutdown.clone(),
        node_id: gpupool_api::node::this_machine().unwrap_or_default(),
        started,
    })?;
    announce(&net, &config, started);
    notify::ready();
    let signals = tokio::spawn(signals::run(spec, tls, owner.clone(), shutdown.clone()));
    let housekeeping = tokio::spawn(housekeeping::run(owner.clone(), config.leases.history_retention_days));
    let ended = net.serve(router, shutdown).await;
    notify::stopping();
    tracing::info!(?ended, "no more connections");

    signals.abort();
    housekeeping.abort();
    leaving.abort();
    finish(sampler, &owner, owner_thread).await;
    Ok(())
}

fn open(config: &Config) -> Result<(SqliteStore, LoadedRows), AgentError> {
    let store = SqliteStore::open(&config.server.state_dir)?;
    let mut loaded = store.load().map_err(AgentError::Read)?;
    if !loaded.rows.iter().any(|row| matches!(row, Row::Counters(_))) {
        // Leases and tokens count from 1: many languages take 0 for "none".
        loaded.rows.push(Row::Counters(Counters { next_lease: 1, next_token: 1, ..Counters::default() }));
    }
    let anchor = store.anchor().map_err(AgentError::Read)?;
    let latest = loaded.rows.iter().filter_map(latest).max().unwrap_or(Time(0));
    clock::go_on(anchor.as_ref(), latest);
    Ok((store, loaded))
}

/// The last time a row tells of, apart from times that are still to come.
fn latest(row: &Row) -> Option<Time> {
    match row {
        Row::Lease(lease) => [Some(lease.created_at), lease.granted_at, lease.ended_at].into_iter().flatten().max(),
        Row::Usage(usage) => Some(usage.settled_at),
        _ => None,
    }
}

fn start_owner(
    config: &Config,
    (store, loaded): (SqliteStore, LoadedRows),
    sources: &Sources,
    watcher: Box<dyn owner::Watcher>,
) -> Result<(Owner, JoinHandle<()>), AgentError> {
    let settings = Settings {
        drain: Drain::WhenGone { patience: millis(config.leases.drain_patience_secs) },
        // Who reads no devices any more knows nothing about who else uses them.
        reading_max_age: Some(millis(config.monitoring.refresh_interval * 3 + UNREAD_AT_MOST)),
    };
    let (owner, thread, complaints) = owner::start(OwnerSpec {
        store: Box::new(store),
        loaded,
        settings,
        policies: config.policies.clone(),
        node: node_facts(&config.server.node_name),
        waiters_per_owner: config.leases.waiters_per_owner as usize,
        real_processes: sources.simulation.is_none(),
        watcher,
    })
    .map_err(AgentError::Start)?;
    for complaint in complaints {
        tracing::warn!("{complaint}");
    }
    Ok((owner, thread))
}

fn millis(duration: Duration) -> Millis {
    Millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

fn node_facts(name: &str) -> NodeFacts {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    let memory = Bytes(total.unwrap_or(0_u64).saturating_mul(1024));
    NodeFacts { name: name.into(), cpus: MilliCpus(cpus * 1000), memory, labels: Default::default() }
}

/// Takes up what a run before left: holders, groups, leases that still drain; and the rules of today.
async fn go_on(
    owner: &Owner,
    holders: &Holders,
    groups: &Arc<Groups>,
    leaves: &mpsc::UnboundedSender<Leave>,
    config: &Config,
) -> Result<GpuIds, AgentError> {
    let kept = owner.look(left_behind).await?;
    if kept.policies != config.policies {
        owner.tell(gpupool_core::Command::SetPolicies { policies: Box::new(config.policies.clone()) })?;
    }
    let mut with_group: Vec<LeaseId> = groups.leases();
    for lease in &with_group {
        if let Some(path) = groups.path(*lease) {
            owner.tie(*lease, move |tie| tie.group = Some(path))?;
        }
    }
    holders.resume(kept.held.clone(), groups, millis(config.leases.hold_grace_secs));
    // Groups of leases nobody knows any more, and of those that are over, go.
    with_group.retain(|lease| !kept.active.contains(lease));
    let over = kept.draining.iter().copied().chain(with_group);
    for lease in over {
        let tie = owner::Tie { group: groups.path(lease), ..owner::Tie::default() };
        // The receiver lives as long as the agent.
        let _ = leaves.send(Leave { lease, tie, was_taken: false });
    }
    Ok(GpuIds::restore(kept.numbers))
}

struct LeftBehind {
    policies: gpupool_core::policy::Policies,
    held: Vec<(LeaseId, Holder)>,
    active: Vec<LeaseId>,
    draining: Vec<LeaseId>,
    numbers: Vec<(gpupool_core::device::DeviceIdentity, gpupool_core::GpuId)>,
}

fn left_behind(owner: &OwnerThread) -> LeftBehind {
    let pool = owner.pool();
    let active = || pool.leases().filter(|lease| lease.state.is_granted());
    LeftBehind {
        policies: pool.policies().clone(),
        held: active().filter_map(|lease| Some((lease.id, lease.holder.clone()?))).collect(),
        active: active().map(|lease| lease.id).collect(),
        draining: pool.leases().filter(|lease| lease.draining).map(|lease| lease.id).collect(),
        numbers: pool.devices().map(|view| (view.facts.identity.clone(), view.gpu_id)).collect(),
    }
}

fn tls(config: &Config) -> Result<Option<Tls>, AgentError> {
    match (&config.server.tls_cert, &config.server.tls_key) {
        (Some(cert), Some(key)) => Ok(Some(Tls::load(cert, key)?)),
        _ => Ok(None),
    }
}

async fn bind(config: &Config, tls: Option<Tls>) -> Result<Net, AgentError> {
    let server = &config.server;
    let limits = net::Limits {
        connections: config.limits.connections as usize,
        header_time: config.limits.header_secs,
        body_time: config.limits.request_secs,
        shutdown_grace: server.shutdown_grace_secs,
        ..net::Limits::default()
    };
    let unix = net::UnixBind { path: gpupool_config::socket_path(&server.state_dir), mode: server.socket_mode.0 };
    let tcp = vec![net::TcpBind { host: server.host.clone(), port: server.port }];
    Ok(Net::bind(net::Bind { tcp, unix: Some(unix), tls, limits }).await?)
}

/// Says on standard output where it listens: programs that start an agent wait for these lines.
fn announce(net: &Net, config: &Config, started: Instant) {
    let scheme = if config.server.tls_cert.is_some() { "https" } else { "http" };
    let prefix = &config.api.api_prefix;
    let mut lines: Vec<String> =
        net.addresses().iter().map(|address| format!("gpupool is listening on {scheme}://{address}{prefix}")).collect();
    lines.extend(net.unix_path().map(|path| format!("gpupool is listening on unix://{}", path.display())));
    let mut out = std::io::stdout().lock();
    for line in lines {
        // Nobody may be reading, which is no reason to stop.
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
    if config.server.open {
        tracing::warn!("--open: anybody who can reach this agent may take and release GPUs");
    }
    let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(millis, "ready");
}

async fn finish(sampler: Sampler, owner: &Owner, owner_thread: JoinHandle<()>) {
    let _ = owner.work(housekeeping::keep_clock).await;
    owner.stop();
    let ended = tokio::task::spawn_blocking(move || {
        sampler.stop();
        owner_thread.join().is_ok()
    });
    if !tokio::time::timeout(Duration::from_secs(5), ended).await.is_ok_and(|joined| joined.unwrap_or(false)) {
        tracing::warn!("the owner thread or the sampler did not end in time");
    }
    tracing::info!("stopped; leases are kept");
}

fn run_id() -> String {
    let mut bytes = [0_u8; 8];
    // Without random bytes two runs could share an id only if they began in the same millisecond.
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
        bytes = clock::now().0.to_le_bytes();
    }
    format!("{:016x}", u64::from_le_bytes(bytes))
}
