//! The node: everything that touches this machine's devices, processes and control groups.
//!
//! It samples devices ([`sampler`]), attributes the processes on them to leases ([`attribution`]), prepares the statistics
//! routes ([`statistics`]), watches the holders of leases and owns the control groups of their jobs ([`attachments`],
//! [`job_cgroups`]), and tears both down when a lease ends ([`teardown`]). It reports facts to the authority and carries out
//! its orders ([`crate::messages`]); file descriptors never leave it.

mod attachments;
mod attribution;
mod device_claims;
mod evidence;
mod job_cgroups;
mod sampler;
mod simulation;
mod sources;
pub(crate) mod statistics;
mod tasks;
mod teardown;
#[cfg(test)]
mod tests;

pub(crate) use attachments::AttachError;
pub(crate) use job_cgroups::JobCgroups;
pub(crate) use simulation::{Simulation, SimulationError};
pub(crate) use sources::ReadingSources;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Weak};

use gpupool_api::lease::{AttachBody, AttachResponse};
use gpupool_config::Config;
use gpupool_core::{Bytes, GpuId, LeaseId, MilliCpus, NodeFacts};
use gpupool_devices::{GpuIdRegistry, JobEnvironment};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::authority::{Authority, Refusal};
use crate::identity::Caller;
use crate::limits::ORDERS;
use crate::messages::{NodeLink, NodeOrder, NodeReport};
use crate::metrics::Metrics;
use crate::net::PeerProcess;

use attachments::{AttachmentTable, Attachments};
use attribution::Holdings;
use sampler::{Sampler, SamplerSpec};
use statistics::Statistics;
use tasks::{OwnedTask, OwnedTasks};
use teardown::remove_cgroup;

/// The node's end of the link from the authority.
pub(crate) struct NodeOrders {
    orders: mpsc::Receiver<NodeOrder>,
    table: Arc<AttachmentTable>,
}

/// The authority's end of the link to the node of the same process.
struct LocalLink {
    orders: mpsc::Sender<NodeOrder>,
    table: Arc<AttachmentTable>,
    simulation: Option<Arc<Simulation>>,
}

/// Returns both ends of the link between an authority and a node of one process.
pub(crate) fn local_link(simulation: Option<Arc<Simulation>>) -> (Box<dyn NodeLink>, NodeOrders) {
    let (sender, orders) = mpsc::channel(ORDERS);
    let table: Arc<AttachmentTable> = Arc::default();
    (Box::new(LocalLink { orders: sender, table: table.clone(), simulation }), NodeOrders { orders, table })
}

impl NodeLink for LocalLink {
    fn send(&mut self, order: NodeOrder) -> Result<(), NodeOrder> {
        // Simulated load begins and ends with its lease, before a reading can show otherwise.
        match (&order, &self.simulation) {
            (NodeOrder::Prepare { lease, devices }, Some(simulation)) => {
                simulation.lease_started(*lease, devices);
                return Ok(());
            }
            (NodeOrder::End { lease, .. }, Some(simulation)) => simulation.lease_gone(*lease),
            _ => {}
        }
        if let NodeOrder::End { lease, awaited: false, .. } = order
            && !self.table.contains(lease)
        {
            return Ok(());
        }
        self.orders.try_send(order).or_else(|error| match error {
            mpsc::error::TrySendError::Full(order) => Err(order),
            // The node has ended, and orders no longer matter.
            mpsc::error::TrySendError::Closed(_) => Ok(()),
        })
    }

    fn prepares_devices(&self) -> bool {
        self.simulation.is_some()
    }
}

/// Everything that a node starts with.
pub(crate) struct NodeSpec<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The sources of readings.
    pub sources: ReadingSources,
    /// The authority that it reports to.
    pub authority: Authority,
    /// Its end of the link.
    pub orders: NodeOrders,
    /// The control groups of jobs.
    pub cgroups: Arc<JobCgroups>,
    /// The statistics to publish.
    pub statistics: Arc<Statistics>,
    /// The metrics that the node updates.
    pub metrics: Arc<Metrics>,
}

/// A handle of the node. Clones refer to the same node.
#[derive(Clone)]
pub(crate) struct Node {
    attachments: Attachments,
    /// The attachments in progress; `None` once the node has ended.
    attaching: Weak<OwnedTasks>,
    statistics: Arc<Statistics>,
    cgroups: Arc<JobCgroups>,
    simulation: Option<Arc<Simulation>>,
    name: Arc<str>,
}

/// The threads and tasks of a node. The tasks end when it is dropped.
pub(crate) struct RunningNode {
    sampler: Sampler,
    /// Carries out the orders of the authority.
    _orders: OwnedTask,
    _attaching: Arc<OwnedTasks>,
}

impl Node {
    /// Starts a node: takes over the leases of the previous run, then reads its devices. Returns after the first
    /// reading, or a little later.
    pub(crate) async fn start(spec: NodeSpec<'_>) -> io::Result<(Self, RunningNode)> {
        let NodeSpec { config, sources, authority, mut orders, cgroups, statistics, metrics } = spec;
        let simulation = sources.simulation.clone();
        let name: Arc<str> = config.server.node_name.as_str().into();
        let attaching = Arc::<OwnedTasks>::default();
        let node = Self {
            attachments: Attachments::new(name.clone(), authority.clone(), cgroups.clone(), orders.table.clone()),
            attaching: Arc::downgrade(&attaching),
            statistics: statistics.clone(),
            cgroups,
            simulation,
            name: name.clone(),
        };
        // The first order of an authority is a fence. The teardowns that it causes may take any time, and are not
        // awaited.
        let leases_over = match orders.orders.recv().await {
            Some(NodeOrder::Fence { leases }) => node.attachments.fence(leases),
            _ => Vec::new(),
        };
        let (of_snapshot, reporter) = (authority.clone(), authority);
        let table = orders.table.clone();
        let numbers: Vec<_> = {
            let snapshot = of_snapshot.snapshot();
            let devices = snapshot.devices_of(&name);
            devices.map(|state| (state.view.facts.identity.clone(), state.view.gpu_id)).collect()
        };
        let sampler = sources.start(SamplerSpec {
            ids: GpuIdRegistry::restore(numbers),
            refresh: config.monitoring.refresh_interval,
            node: node_facts(&name),
            holdings: Box::new(move || Holdings::of(&of_snapshot.snapshot(), &name, &table)),
            sample_sink: Box::new(move |sample, failures| {
                metrics.sampled(failures);
                // A sample that finds no room waits for the next one, and both are announced together.
                let _ = reporter.report(NodeReport::Sampled(Box::new(sample)));
            }),
            statistics,
        })?;
        let orders = OwnedTask::spawn(carry_out_orders(node.attachments.clone(), orders.orders, leases_over));
        Ok((node, RunningNode { sampler, _orders: orders, _attaching: attaching }))
    }

    /// Attaches a lease to the calling process and puts its job into a control group. Runs to its end even if the caller
    /// hangs up.
    pub(crate) async fn attach(
        &self,
        caller: Caller,
        process: PeerProcess,
        lease: LeaseId,
        body: AttachBody,
    ) -> Result<AttachResponse, AttachError> {
        let attachments = self.attachments.clone();
        let (node, devices) = (self.name(), attachments.devices_of(lease));
        let span = tracing::info_span!("attach", lease = lease.0, node, devices);
        let attach = async move { attachments.attach(caller, process, lease, body).await };
        let attached = self.attaching.upgrade().map(|tasks| tasks.spawn(attach.instrument(span)));
        let stopping = || Err(Refusal::Stopping.into());
        let Some(attached) = attached else { return stopping() };
        attached.await.unwrap_or_else(|_| stopping())
    }

    /// Returns the statistics of the devices.
    pub(crate) fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Returns the simulated devices, if devices are simulated.
    pub(crate) fn simulation(&self) -> Option<&Simulation> {
        self.simulation.as_deref()
    }

    /// Describes in a sentence how jobs are confined here.
    pub(crate) fn confinement(&self) -> String {
        self.cgroups.describe()
    }

    /// Returns the name of the node.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the variables that show a job the given devices and no others.
    pub(crate) fn environment(&self, gpu_ids: &[GpuId]) -> BTreeMap<String, Option<String>> {
        let current = self.statistics.current();
        let present: Vec<_> = current.round.present().collect();
        let given: Vec<usize> =
            gpu_ids.iter().filter_map(|gpu_id| present.iter().position(|device| device.gpu_id == *gpu_id)).collect();
        let variables = JobEnvironment::new(present.iter().map(|device| &*device.found), &given).variables;
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl RunningNode {
    /// Ends the sampler and the tasks. Blocks until the sampler has ended.
    pub(crate) fn stop(self) {
        let Self { sampler, .. } = self;
        sampler.stop();
    }
}

/// Carries out orders until the authority is gone, after removing the control groups of ended leases. Each teardown is
/// a task of its own, which ends with this one.
async fn carry_out_orders(
    attachments: Attachments,
    mut orders: mpsc::Receiver<NodeOrder>,
    mut leases_over: Vec<LeaseId>,
) {
    let mut running = JoinSet::new();
    loop {
        for lease in leases_over.drain(..) {
            let (cgroups, span) = (attachments.cgroups().clone(), teardown_span(&attachments, lease));
            running.spawn(async move { remove_cgroup(lease, &cgroups).await }.instrument(span));
        }
        let order = tokio::select! {
            order = orders.recv() => order,
            Some(_) = running.join_next() => continue,
        };
        match order {
            Some(NodeOrder::Fence { leases }) => leases_over = attachments.fence(leases),
            Some(NodeOrder::End { lease, taken_back, awaited }) => {
                let (attachments, span) = (attachments.clone(), teardown_span(&attachments, lease));
                running.spawn(async move { attachments.end(lease, taken_back, awaited).await }.instrument(span));
            }
            // Real devices need no preparation, and the link has prepared simulated ones.
            Some(NodeOrder::Prepare { .. }) => {}
            None => return,
        }
    }
}

fn teardown_span(attachments: &Attachments, lease: LeaseId) -> tracing::Span {
    tracing::info_span!("teardown", lease = lease.0, node = attachments.node(), devices = attachments.devices_of(lease))
}

fn node_facts(name: &str) -> NodeFacts {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    let memory = Bytes(total.unwrap_or(0_u64).saturating_mul(1024));
    NodeFacts { name: name.into(), cpus: MilliCpus(cpus * 1000), memory, labels: Default::default() }
}
