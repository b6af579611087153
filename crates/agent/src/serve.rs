//! The life of an agent: everything starts in order and ends in the reverse order.
//!
//! The store is opened first, which locks out other agents of the same state directory. Then the authority continues from
//! the rows, the node takes over running jobs and reads its devices, and only then do the sockets open: every response
//! comes from known state. SIGTERM and SIGINT drain: open requests are finished, leases stay. SIGHUP reads the
//! configuration and the certificates again.

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpupool_config::{Config, ConfigProblems, LoadedConfig};
use gpupool_core::{DrainMode, LeaseId, Millis, PoolCounters, PoolRow, PoolSettings, PoolTime};
use gpupool_store::{LeaseStore, LoadedRows, SqliteStore};
use tokio::runtime::{self, Runtime};

use crate::authority::{self, Authority, AuthoritySpec, run_housekeeping, save_clock};
use crate::error::AgentError;
use crate::events::Events;
use crate::http::{self, AppState};
use crate::messages::NodeLink;
use crate::metrics::Metrics;
use crate::net::{self, NetListeners, Shutdown, Tls};
use crate::node::statistics::{DeviceFilter, Statistics};
use crate::node::{self, JobCgroups, Node, NodeSpec, ReadingSources, RunningNode};
use crate::{clock, service_manager, signals};

/// The time, in addition to three refresh intervals, after which the last reading of a device is no longer valid.
const UNREAD_AT_MOST: Duration = Duration::from_secs(10);

/// The time that blocking work may take after everything else has ended.
const END_AT_MOST: Duration = Duration::from_secs(1);

/// Everything that an agent starts with.
pub struct AgentSpec {
    /// The configuration.
    pub loaded: LoadedConfig,
    /// Reads the configuration again.
    pub reread: Box<dyn Fn() -> Result<LoadedConfig, ConfigProblems> + Send>,
    /// Makes a new log level take effect.
    pub set_log_level: Box<dyn Fn(gpupool_config::LogLevel) + Send>,
    /// Returns when the log is written: the process ends right afterwards.
    pub finish_log: Box<dyn Fn() + Send>,
}

/// Runs an agent until a signal stops it.
pub fn serve(spec: AgentSpec) -> Result<(), AgentError> {
    net::raise_open_files();
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8));
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(AgentError::Start)?;
    run_bounded(runtime, run(spec))
}

/// Runs a future and ends the runtime in bounded time, also while a thread of it waits for a disk that hangs.
fn run_bounded<T>(runtime: Runtime, future: impl Future<Output = T>) -> T {
    let result = runtime.block_on(future);
    runtime.shutdown_timeout(END_AT_MOST);
    result
}

async fn run(spec: AgentSpec) -> Result<(), AgentError> {
    let started = Instant::now();
    let config = Arc::new(spec.loaded.config.clone());
    let (store, rows) = open_store(&config)?;
    check_node_name(&config.server.node_name, &rows)?;
    let sources = ReadingSources::open(&config)?;
    let events = Arc::new(Events::new(run_id().into()));
    let metrics = Arc::new(Metrics::new());
    let cgroups = Arc::new(JobCgroups::detect(&config.server.state_dir));
    tracing::info!("jobs are held by: {}", cgroups.describe());
    let filter = DeviceFilter::new(config.monitoring.cuda_visible_devices.clone());
    let (refresh, history) = (config.monitoring.refresh_interval, config.monitoring.max_history as usize);
    let statistics = Arc::new(Statistics::new(filter, refresh, history));

    let is_simulated = sources.simulation.is_some();
    let (link, orders) = node::local_link(sources.simulation.clone());
    let (authority, authority_thread) =
        start_authority(&config, store, rows, link, is_simulated, events.clone(), metrics.clone())?;
    let spec_of_node = NodeSpec {
        config: &config,
        sources,
        authority: authority.clone(),
        orders,
        cgroups,
        statistics,
        metrics: metrics.clone(),
    };
    let (node, running_node) = Node::start(spec_of_node).await.map_err(AgentError::Start)?;
    // The first response shows the devices of the first reading. A disk that hangs delays the start for a moment only.
    let _ = authority.query(|_| ()).await;

    let tls = tls(&config)?;
    let net = bind(&config, tls.clone()).await?;
    let port = net.addresses().first().map_or(config.server.port, std::net::SocketAddr::port);
    let shutdown = Shutdown::new();
    let router = http::router(AppState {
        authority: authority.clone(),
        node,
        events,
        config: config.clone(),
        own_names: http::OwnNames::read(&config),
        port,
        routes: Vec::new(),
        metrics,
        held_connections: http::HeldConnections::default(),
        shutdown: shutdown.clone(),
        node_id: gpupool_api::node::machine_id().unwrap_or_default(),
        started,
    })?;
    announce(&net, &config, started);
    service_manager::ready();
    let tasks = [
        tokio::spawn(signals::run(spec, tls, authority.clone(), shutdown.clone())),
        tokio::spawn(run_housekeeping(authority.clone(), config.leases.history_retention_days)),
        tokio::spawn(service_manager::feed_watchdog(authority.clone())),
        tokio::spawn(reply_to_calls_at_shutdown(authority.clone(), shutdown.clone())),
    ];
    let ended = net.serve(router, shutdown).await;
    service_manager::stopping();
    tracing::info!(?ended, "no more connections");

    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    finish(running_node, &authority, authority_thread).await;
    Ok(())
}

/// Opens the store, and continues the pool's clock from its saved time.
fn open_store(config: &Config) -> Result<(Box<dyn LeaseStore>, Vec<PoolRow>), AgentError> {
    let store = SqliteStore::open(&config.server.state_dir)?;
    let LoadedRows { mut rows, warnings } = store.load().map_err(AgentError::Read)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    if !rows.iter().any(|row| matches!(row, PoolRow::Counters(_))) {
        // Leases and tokens count from 1: many languages take 0 for "none".
        rows.push(PoolRow::Counters(PoolCounters { next_lease: 1, next_token: 1, ..PoolCounters::default() }));
    }
    let anchor = store.clock_anchor().map_err(AgentError::Read)?;
    let latest = rows.iter().filter_map(latest_time).max().unwrap_or(PoolTime(0));
    clock::continue_from(anchor.as_ref(), latest);
    Ok((Box::new(store), rows))
}

/// Returns the last time in a row, without times in the future.
fn latest_time(row: &PoolRow) -> Option<PoolTime> {
    match row {
        PoolRow::Lease(lease) => [Some(lease.created_at), lease.granted_at, lease.ended_at].into_iter().flatten().max(),
        PoolRow::Usage(usage) => Some(usage.settled_at),
        _ => None,
    }
}

/// Refuses a state with live leases of a node of another name. This node would end their jobs as those of unknown leases,
/// grant their devices again, and not watch their holders.
fn check_node_name(name: &str, rows: &[PoolRow]) -> Result<(), AgentError> {
    let others = rows.iter().filter_map(|row| match row {
        PoolRow::Node(row) if *row.facts.name != *name => Some(row),
        _ => None,
    });
    for other in others {
        let is_its_lease = |row: &PoolRow| match row {
            PoolRow::Lease(lease) if lease.node == Some(other.node) && (lease.state.is_granted() || lease.draining) => {
                Some(lease.id)
            }
            _ => None,
        };
        let leases: Vec<LeaseId> = rows.iter().filter_map(is_its_lease).collect();
        if !leases.is_empty() {
            let leases = leases.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(AgentError::NodeRenamed { old: other.facts.name.to_string(), new: name.to_owned(), leases });
        }
    }
    Ok(())
}

fn start_authority(
    config: &Config,
    store: Box<dyn LeaseStore>,
    rows: Vec<PoolRow>,
    link: Box<dyn NodeLink>,
    is_simulated: bool,
    events: Arc<Events>,
    metrics: Arc<Metrics>,
) -> Result<(Authority, JoinHandle<()>), AgentError> {
    let settings = PoolSettings {
        drain: DrainMode::WhenGone { patience: millis(config.leases.drain_patience_secs) },
        // Without readings for this long, nothing is known about the other users of a device.
        reading_max_age: Some(millis(config.monitoring.refresh_interval * 3 + UNREAD_AT_MOST)),
    };
    let tokens = store.token_owners().map_err(AgentError::Read)?;
    let spec = AuthoritySpec {
        store,
        rows,
        tokens,
        settings,
        policies: config.policies.clone(),
        links: vec![(config.server.node_name.as_str().into(), link)],
        waiters_per_owner: config.leases.waiters_per_owner as usize,
        reconnect_grace: millis(config.leases.hold_grace_secs),
        real_processes: !is_simulated,
        events,
        metrics,
    };
    let (authority, thread, warnings) = authority::start(spec).map_err(AgentError::Start)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok((authority, thread))
}

fn millis(duration: Duration) -> Millis {
    Millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

fn tls(config: &Config) -> Result<Option<Tls>, AgentError> {
    match (&config.server.tls_cert, &config.server.tls_key) {
        (Some(cert), Some(key)) => Ok(Some(Tls::load(cert, key)?)),
        _ => Ok(None),
    }
}

async fn bind(config: &Config, tls: Option<Tls>) -> Result<NetListeners, AgentError> {
    let server = &config.server;
    let limits = net::NetLimits {
        connections: config.limits.connections as usize,
        header_time: config.limits.header_secs,
        body_time: config.limits.request_secs,
        shutdown_grace: server.shutdown_grace_secs,
        ..net::NetLimits::default()
    };
    let unix = net::UnixBind { path: gpupool_config::socket_path(&server.state_dir), mode: server.socket_mode.0 };
    let tcp = vec![net::TcpBind { host: server.host.clone(), port: server.port }];
    Ok(NetListeners::bind(net::ListenSpec { tcp, unix: Some(unix), tls, limits }).await?)
}

/// Prints the addresses on standard output: programs that start an agent wait for these lines.
fn announce(net: &NetListeners, config: &Config, started: Instant) {
    let scheme = if config.server.tls_cert.is_some() { "https" } else { "http" };
    let prefix = &config.api.api_prefix;
    let mut lines: Vec<String> =
        net.addresses().iter().map(|address| format!("gpupool is listening on {scheme}://{address}{prefix}")).collect();
    lines.extend(net.unix_path().map(|path| format!("gpupool is listening on unix://{}", path.display())));
    let mut out = std::io::stdout().lock();
    for line in lines {
        // A closed standard output is no reason to stop.
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
    if config.server.open {
        tracing::warn!("--open: every client that can reach this agent may take and release GPUs");
    }
    let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(millis, "ready");
}

/// Replies to open long polls when the agent stops, so that their connections can end.
async fn reply_to_calls_at_shutdown(authority: Authority, shutdown: Shutdown) {
    shutdown.begun().await;
    authority.reply_to_open_calls().await;
}

async fn finish(node: RunningNode, authority: &Authority, authority_thread: JoinHandle<()>) {
    // A disk that hangs must not keep the agent from ending.
    let _ = tokio::time::timeout(Duration::from_secs(2), authority.with_store(save_clock)).await;
    authority.stop();
    let ended = tokio::task::spawn_blocking(move || {
        node.stop();
        authority_thread.join().is_ok()
    });
    if !tokio::time::timeout(Duration::from_secs(5), ended).await.is_ok_and(|joined| joined.unwrap_or(false)) {
        tracing::warn!("the authority or the sampler did not end in time");
    }
    tracing::info!("stopped; leases stay");
}

fn run_id() -> String {
    let mut bytes = [0_u8; 8];
    // Without random bytes two runs could share an id only if they began in the same millisecond.
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
        bytes = clock::now().0.to_le_bytes();
    }
    format!("{:016x}", u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_does_not_keep_the_agent_from_ending() {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (unblock, hangs) = std::sync::mpsc::channel::<()>();
        let ended = std::thread::spawn(move || {
            run_bounded(runtime, async move { drop(tokio::task::spawn_blocking(move || hangs.recv().is_err())) });
        });
        let start = Instant::now();
        while !ended.is_finished() {
            assert!(start.elapsed() < Duration::from_secs(60), "it waits for a thread that hangs");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(unblock);
    }
}
