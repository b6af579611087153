//! The attribution of processes on devices to leases. Pure: takes evidence and holdings, returns an attribution.
//!
//! A process belongs to a lease if it is in the lease's control group, if it is the holder or descends from the holder,
//! or if its environment has the number and token of the lease and it runs as the lease's user (or as root, who may run
//! it for that user). Several leases may match, because one program may hold many. The lease that holds this very
//! device wins, then the one with stronger evidence (among leases of one holder, the one that the environment names),
//! then the newer one.

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_api::pool::ProcessBody;
use gpupool_core::{DeviceId, GpuId, LeaseId, LeaseState, PoolTime, ProcessAttribution, Token, escape_text};
use gpupool_devices::{DeviceProcess, HostProcessLookup};

use crate::authority::Snapshot;

use super::attachments::AttachmentTable;
use super::evidence::{Evidence, LeaseEnvironment, ProcessKey};
use super::job_cgroups::path_in_proc;
use super::simulation;

/// The devices that leases hold on a node, and the marks by which their processes are recognized.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    /// The active leases, and those whose processes still drain.
    pub leases: Vec<Holding>,
    /// The time as of which the leases are listed.
    pub as_of: PoolTime,
    /// The time at which a change of the leases on a device was last published.
    pub changed_at: HashMap<GpuId, PoolTime>,
}

/// The devices that one lease holds, and the marks by which its processes are recognized.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Holding {
    /// The lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: Token,
    /// The devices it holds, or drains on.
    pub devices: Vec<GpuId>,
    /// The process that holds it, by number and start.
    pub holder_pid: Option<ProcessKey>,
    /// The control group of its job, as `/proc/PID/cgroup` spells it.
    pub cgroup: Option<String>,
    /// The local user it was granted to.
    pub uid: Option<u32>,
}

/// The evidence that ties a process to a lease, from weak to strong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvidenceKind {
    Environment,
    Descent,
    DescentAndEnvironment,
    ControlGroup,
}

impl Holdings {
    /// Returns the holdings of a node's leases in a snapshot, with their attachments.
    pub(super) fn of(snapshot: &Snapshot, node: &str, table: &AttachmentTable) -> Self {
        let devices: HashMap<DeviceId, GpuId> =
            snapshot.devices_of(node).map(|state| (state.view.device, state.view.gpu_id)).collect();
        let changed_at =
            snapshot.devices_of(node).map(|state| (state.view.gpu_id, state.leases_published_at)).collect();
        let leases = snapshot.leases().filter(|lease| lease.state == LeaseState::Active || lease.draining);
        let here = leases.filter(|lease| lease.node.is_some_and(|of| snapshot.node_name(of) == node));
        let holding = |lease: &gpupool_core::LeaseRow| {
            let attachment = table.get(lease.id).unwrap_or_default();
            Some(Holding {
                lease: lease.id,
                token: lease.token?,
                devices: lease.promises.iter().filter_map(|promise| devices.get(&promise.device).copied()).collect(),
                holder_pid: attachment.process.map(|process| (process.pid, process.started)),
                cgroup: attachment.cgroup.as_deref().map(path_in_proc),
                uid: attachment.uid,
            })
        };
        Self { leases: here.filter_map(holding).collect(), as_of: snapshot.at.pool, changed_at }
    }

    /// Returns the time as of which the leases on a device are known for a reading that was taken at `read_at`. A
    /// reading from before their last published change shows a mixture, and gets the earliest possible time.
    pub(super) fn leases_as_of(&self, device: GpuId, read_at: PoolTime) -> PoolTime {
        let is_mixture = self.changed_at.get(&device).is_some_and(|changed| read_at <= *changed);
        if is_mixture { PoolTime(0) } else { self.as_of }
    }

    /// Attributes a process on a device.
    pub(super) fn attribute(&self, evidence: &Evidence, device: GpuId) -> ProcessAttribution {
        let fits = self.leases.iter().filter_map(|holding| Some((holding.matching_evidence(evidence)?, holding)));
        let best = fits.max_by_key(|(by, holding)| (holding.holds(device), *by, holding.token));
        match best {
            Some((_, holding)) => ProcessAttribution::Lease(holding.lease),
            None if self.could_belong_to_lease(evidence, device) => ProcessAttribution::Unknown,
            None => ProcessAttribution::Foreign,
        }
    }

    /// Whether a lease holds the device.
    pub(super) fn is_held_by(&self, device: GpuId, lease: LeaseId) -> bool {
        self.leases.iter().any(|holding| holding.lease == lease && holding.holds(device))
    }

    /// Whether the process may belong to a lease on the device, because its environment cannot be read.
    fn could_belong_to_lease(&self, evidence: &Evidence, device: GpuId) -> bool {
        let may_be_of = |holding: &Holding| holding.holds(device) && holding.is_user(evidence.uid);
        evidence.environment == LeaseEnvironment::Hidden && self.leases.iter().any(may_be_of)
    }
}

impl Holding {
    fn holds(&self, device: GpuId) -> bool {
        self.devices.contains(&device)
    }

    fn matching_evidence(&self, evidence: &Evidence) -> Option<EvidenceKind> {
        let in_cgroup = |cgroup: &String| evidence.cgroups.iter().any(|path| is_within(path, cgroup));
        if self.cgroup.as_ref().is_some_and(in_cgroup) {
            return Some(EvidenceKind::ControlGroup);
        }
        let descends = self.holder_pid.is_some_and(|holder| evidence.ancestry.contains(&holder));
        let named =
            evidence.environment == LeaseEnvironment::Names(self.lease, self.token) && self.is_user(evidence.uid);
        match (descends, named) {
            (true, true) => Some(EvidenceKind::DescentAndEnvironment),
            (true, false) => Some(EvidenceKind::Descent),
            (false, true) => Some(EvidenceKind::Environment),
            (false, false) => None,
        }
    }

    fn is_user(&self, uid: u32) -> bool {
        uid == 0 || self.uid.is_none_or(|user| user == uid)
    }
}

/// Attributes the processes of one round of readings.
pub(super) struct LeaseAttributor {
    /// The holdings of the leases.
    pub holdings: Holdings,
    /// The evidence about processes, by source.
    pub evidence: Vec<Arc<HashMap<ProcessKey, Evidence>>>,
    /// Whether processes are simulated.
    pub simulated: bool,
}

impl LeaseAttributor {
    /// Attributes a process on a device.
    pub(super) fn attribute(&self, process: &DeviceProcess, device: GpuId) -> ProcessAttribution {
        if self.simulated {
            // The pid is invented and may belong to a real process, so no evidence is looked up.
            let lease = process.name.as_deref().and_then(simulation::lease_of);
            return lease.map_or(ProcessAttribution::Foreign, ProcessAttribution::Lease);
        }
        let HostProcessLookup::Known(facts) = &process.host_lookup else { return ProcessAttribution::Unknown };
        let key = (process.pid, facts.start_ticks);
        let evidence = self.evidence.iter().find_map(|board| board.get(&key));
        evidence.map_or(ProcessAttribution::Unknown, |evidence| self.holdings.attribute(evidence, device))
    }

    /// Describes a process for people and programs, in plain text: a process chooses its command line itself.
    pub(super) fn describe(&self, process: &DeviceProcess, device: GpuId) -> ProcessBody {
        let known = match &process.host_lookup {
            HostProcessLookup::Known(facts) => Some(facts),
            HostProcessLookup::NotInspected | HostProcessLookup::Unattributed(_) => None,
        };
        let (lease, squatter) = match self.attribute(process, device) {
            ProcessAttribution::Lease(lease) => (Some(lease.0), !self.holdings.is_held_by(device, lease)),
            ProcessAttribution::Foreign => (None, true),
            ProcessAttribution::Unknown => (None, false),
        };
        let text = |text: &Arc<str>| escape_text(text).into_owned();
        ProcessBody {
            pid: Some(process.pid),
            user: known.and_then(|facts| facts.user.as_ref()).map(text),
            command: known.map(|facts| &facts.command).or(process.name.as_ref()).map(text),
            memory_mib: process.memory.value().map(|bytes| bytes.as_mib()),
            lease,
            squatter,
        }
    }
}

/// Whether a path is that of a control group or below it. The root belongs to no lease: every process is below it.
fn is_within(path: &str, cgroup: &str) -> bool {
    let cgroup = cgroup.trim_end_matches('/');
    !cgroup.is_empty() && path.strip_prefix(cgroup).is_some_and(|below| below.is_empty() || below.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: GpuId = GpuId(0);

    fn holding(lease: u64) -> Holding {
        Holding { lease: LeaseId(lease), token: Token(lease * 10), devices: vec![HERE], ..Holding::default() }
    }

    fn names(lease: u64, uid: u32) -> Evidence {
        let environment = LeaseEnvironment::Names(LeaseId(lease), Token(lease * 10));
        Evidence { environment, uid, ancestry: vec![(50, 5), (40, 4), (1, 1)], cgroups: vec!["/job/7/step".into()] }
    }

    fn attributed(leases: &[Holding], evidence: &Evidence) -> ProcessAttribution {
        Holdings { leases: leases.to_vec(), ..Holdings::default() }.attribute(evidence, HERE)
    }

    fn of(lease: u64) -> ProcessAttribution {
        ProcessAttribution::Lease(LeaseId(lease))
    }

    #[test]
    fn each_kind_of_evidence_is_enough_by_itself() {
        let by_cgroup = Holding { cgroup: Some("/job/7".into()), ..holding(1) };
        let by_descent = Holding { holder_pid: Some((40, 4)), ..holding(1) };
        let nameless = Evidence { environment: LeaseEnvironment::Silent, ..names(1, 1000) };
        assert_eq!(attributed(&[by_cgroup], &nameless), of(1));
        assert_eq!(attributed(&[by_descent], &nameless), of(1));
        assert_eq!(attributed(&[holding(1)], &names(1, 1000)), of(1));
        assert_eq!(attributed(&[holding(1)], &nameless), ProcessAttribution::Foreign);
        assert_eq!(attributed(&[], &names(1, 0)), ProcessAttribution::Foreign);
    }

    #[test]
    fn evidence_that_only_looks_alike_proves_nothing() {
        let nameless = Evidence { environment: LeaseEnvironment::Silent, ..names(1, 1000) };
        for cgroup in ["/job/70", "/job/7/step/more", "/", "", "job/7"] {
            let holding = Holding { cgroup: Some(cgroup.into()), ..holding(1) };
            assert_eq!(attributed(&[holding], &nameless), ProcessAttribution::Foreign, "{cgroup:?}");
        }
        let reused_number = Holding { holder_pid: Some((40, 3)), ..holding(1) };
        assert_eq!(attributed(&[reused_number], &nameless), ProcessAttribution::Foreign);
        let old_token = Holding { token: Token(11), ..holding(1) };
        assert_eq!(attributed(&[old_token], &names(1, 0)), ProcessAttribution::Foreign);
    }

    #[test]
    fn another_user_does_not_hide_behind_a_lease_it_names() {
        let alices = Holding { uid: Some(1000), ..holding(1) };
        assert_eq!(attributed(std::slice::from_ref(&alices), &names(1, 1000)), of(1));
        assert_eq!(attributed(std::slice::from_ref(&alices), &names(1, 0)), of(1));
        assert_eq!(attributed(std::slice::from_ref(&alices), &names(1, 1001)), ProcessAttribution::Foreign);
    }

    #[test]
    fn a_program_that_holds_many_leases_is_under_the_one_that_holds_the_device() {
        let mine = |lease, gpu| Holding { holder_pid: Some((40, 4)), devices: vec![GpuId(gpu)], ..holding(lease) };
        let holdings = Holdings { leases: vec![mine(1, 0), mine(2, 1), mine(3, 2)], ..Holdings::default() };
        let evidence = names(9, 1000);
        let attributed_on = |gpu| holdings.attribute(&evidence, GpuId(gpu));
        assert_eq!([attributed_on(0), attributed_on(1), attributed_on(2)], [of(1), of(2), of(3)]);
        assert_eq!(attributed_on(5), of(3), "on a device that none of its leases holds it still belongs to a lease");
        assert!(holdings.is_held_by(GpuId(1), LeaseId(2)) && !holdings.is_held_by(GpuId(5), LeaseId(3)));
    }

    #[test]
    fn a_command_line_is_described_in_plain_text() {
        let facts = gpupool_devices::ProcessFacts {
            start_ticks: 1,
            uid: 5,
            user: Some("ali\u{200b}ce".into()),
            command: "python \u{202e}yp.niart\n".into(),
            cgroup: None,
        };
        let process = DeviceProcess {
            pid: 7,
            host_lookup: HostProcessLookup::Known(Arc::new(facts)),
            ..DeviceProcess::default()
        };
        let attributor = LeaseAttributor { holdings: Holdings::default(), evidence: Vec::new(), simulated: false };
        let body = attributor.describe(&process, HERE);
        assert_eq!(body.user.as_deref(), Some("ali<U+200B>ce"));
        assert_eq!(body.command.as_deref(), Some("python <U+202E>yp.niart<U+000A>"));
    }

    #[test]
    fn a_worker_of_a_program_with_several_parts_of_a_device_is_under_the_one_it_names() {
        let mine = |lease| Holding { holder_pid: Some((40, 4)), ..holding(lease) };
        let parts = [mine(1), mine(2), mine(3)];
        assert_eq!([attributed(&parts, &names(1, 0)), attributed(&parts, &names(2, 0))], [of(1), of(2)]);
        assert_eq!(
            attributed(&parts, &names(9, 0)),
            of(3),
            "a worker that names none of them still belongs to its holder"
        );
    }

    #[test]
    fn a_process_with_a_hidden_environment_is_unknown_only_where_it_could_belong_to_a_lease() {
        let hidden = |uid| Evidence { environment: LeaseEnvironment::Hidden, ..names(1, uid) };
        let alices = Holding { uid: Some(1000), ..holding(1) };
        assert_eq!(attributed(std::slice::from_ref(&alices), &hidden(1000)), ProcessAttribution::Unknown);
        assert_eq!(attributed(std::slice::from_ref(&alices), &hidden(1001)), ProcessAttribution::Foreign);
        let elsewhere = Holding { devices: vec![GpuId(3)], ..alices };
        assert_eq!(attributed(&[elsewhere], &hidden(1000)), ProcessAttribution::Foreign);
    }
}
