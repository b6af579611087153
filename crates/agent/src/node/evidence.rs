//! The evidence that ties a process to a lease: its control groups, its ancestors, its environment.
//!
//! The thread that reads the source gathers it, because a process that hangs in a driver can hang the reader of its
//! environment or command line. Evidence is retained while the process is on a device: an ancestor that has ended since
//! still counts.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpupool_api::job_environment;
use gpupool_core::{LeaseId, Token};
use gpupool_devices::{
    DeviceSource, HostProcessLookup, HostProcessResolver, SourceError, SourceKind, SourcePaths, SourceReading,
};

/// The number of ancestors of a process that are read.
const ANCESTORS: usize = 64;
/// The bytes that are read of the environment of a process.
const ENVIRONMENT_BYTES: u64 = 1 << 20;
/// The bytes that are read of another file about a process.
const PROC_BYTES: u64 = 64 << 10;
/// The time after which a process is inspected again: it may have replaced its program, and with it its environment.
const INSPECT_AGAIN: Duration = Duration::from_secs(10);

/// The identity of a process: its pid and its start time, in clock ticks since boot.
pub(super) type ProcessKey = (u32, u64);

/// Evidence about the lease of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Evidence {
    /// Its control groups, in every hierarchy.
    pub cgroups: Vec<String>,
    /// The process and its ancestors, nearest first.
    pub ancestry: Vec<ProcessKey>,
    /// The lease that its environment names.
    pub environment: LeaseEnvironment,
    /// Its user id.
    pub uid: u32,
}

/// The lease that the environment of a process names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum LeaseEnvironment {
    /// It names this lease with this token.
    Names(LeaseId, Token),
    /// It names no lease.
    #[default]
    Silent,
    /// It may not be read.
    Hidden,
}

/// The evidence about the processes of one source. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct EvidenceBoard {
    /// A lock rather than a message: readers need the newest only, and it is held for the copy of a pointer.
    posted: Arc<Mutex<Arc<HashMap<ProcessKey, Evidence>>>>,
}

impl EvidenceBoard {
    /// Returns the newest evidence.
    pub(super) fn current(&self) -> Arc<HashMap<ProcessKey, Evidence>> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn post(&self, evidence: HashMap<ProcessKey, Evidence>) {
        *self.posted.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(evidence);
    }
}

/// A source that gathers evidence about the processes on its devices, on the thread that reads it.
pub(super) struct EvidenceSource {
    source: Box<dyn DeviceSource>,
    resolver: HostProcessResolver,
    gatherer: EvidenceGatherer,
    board: EvidenceBoard,
}

impl EvidenceSource {
    /// Returns the source, which looks up its processes at these paths and publishes the evidence on the board.
    pub(super) fn new(source: Box<dyn DeviceSource>, places: &SourcePaths, board: EvidenceBoard) -> Self {
        let (resolver, gatherer) = (HostProcessResolver::new(places), EvidenceGatherer::new(places));
        Self { source, resolver, gatherer, board }
    }
}

impl DeviceSource for EvidenceSource {
    fn kind(&self) -> SourceKind {
        self.source.kind()
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut snapshot = self.source.read()?;
        self.resolver.resolve_processes(&mut snapshot);
        self.board.post(self.gatherer.gather(&snapshot));
        Ok(snapshot)
    }
}

/// Inspects processes, and caches those that are still on a device.
#[derive(Debug)]
struct EvidenceGatherer {
    proc: PathBuf,
    known: HashMap<ProcessKey, (Instant, Evidence)>,
}

impl EvidenceGatherer {
    fn new(places: &SourcePaths) -> Self {
        Self { proc: places.proc.clone(), known: HashMap::new() }
    }

    fn gather(&mut self, snapshot: &SourceReading) -> HashMap<ProcessKey, Evidence> {
        let mut known = std::mem::take(&mut self.known);
        let processes = snapshot.devices.iter().filter_map(|device| device.processes.value()).flatten();
        for process in processes {
            let HostProcessLookup::Known(facts) = &process.host_lookup else { continue };
            let key = (process.pid, facts.start_ticks);
            if self.known.contains_key(&key) {
                continue;
            }
            let seen = match known.remove(&key) {
                Some((at, seen)) if at.elapsed() < INSPECT_AGAIN => (at, seen),
                before => (Instant::now(), self.evidence(key, facts.uid, before.map(|(_, seen)| seen))),
            };
            self.known.insert(key, seen);
        }
        self.known.iter().map(|(key, (_, seen))| (*key, seen.clone())).collect()
    }

    fn evidence(&self, key: ProcessKey, uid: u32, before: Option<Evidence>) -> Evidence {
        let folder = self.proc.join(key.0.to_string());
        let mut ancestry = self.ancestry(key);
        // A process whose parent ended gets another parent, but still descends from the first.
        let earlier = before.map(|before| before.ancestry).unwrap_or_default();
        for ancestor in earlier {
            if ancestry.len() < ANCESTORS && !ancestry.contains(&ancestor) {
                ancestry.push(ancestor);
            }
        }
        let cgroups = read(&folder.join("cgroup"), PROC_BYTES).map(|text| cgroups(&text)).unwrap_or_default();
        let environment = match read(&folder.join("environ"), ENVIRONMENT_BYTES) {
            Ok(text) => environment(&text),
            Err(_) => LeaseEnvironment::Hidden,
        };
        Evidence { cgroups, ancestry, environment, uid }
    }

    /// Returns the process and its visible ancestors.
    fn ancestry(&self, key: ProcessKey) -> Vec<ProcessKey> {
        let mut ancestry = vec![key];
        let mut pid = key.0;
        while ancestry.len() < ANCESTORS {
            let Some((parent, _)) = self.stat(pid) else { break };
            let Some((_, start)) = self.stat(parent).filter(|_| parent != 0) else { break };
            if ancestry.contains(&(parent, start)) {
                break;
            }
            ancestry.push((parent, start));
            pid = parent;
        }
        ancestry
    }

    /// Returns the parent of a process and its own start time.
    fn stat(&self, pid: u32) -> Option<(u32, u64)> {
        let text = read(&self.proc.join(pid.to_string()).join("stat"), PROC_BYTES).ok()?;
        let text = String::from_utf8_lossy(&text);
        // The command may hold blanks and brackets, so fields count from its end.
        let (_, after_command) = text.rsplit_once(')')?;
        let mut fields = after_command.split_whitespace();
        let parent = fields.nth(1)?.parse().ok()?;
        let start = fields.nth(17)?.parse().ok()?;
        Some((parent, start))
    }
}

fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn cgroups(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let path = |line: &str| line.splitn(3, ':').nth(2).filter(|path| *path != "/").map(ToOwned::to_owned);
    text.lines().filter_map(path).collect()
}

fn environment(text: &[u8]) -> LeaseEnvironment {
    fn number(text: &[u8], name: &str) -> Option<u64> {
        let value =
            text.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        std::str::from_utf8(value?).ok()?.parse().ok()
    }
    match (number(text, job_environment::LEASE), number(text, job_environment::FENCING_TOKEN)) {
        (Some(lease), Some(token)) => LeaseEnvironment::Names(LeaseId(lease), Token(token)),
        _ => LeaseEnvironment::Silent,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use gpupool_core::Vendor;
    use gpupool_devices::{DetectedDevice, DeviceProcess, ProcessFacts, Reported};

    use super::*;

    fn on_a_device(pid: u32, start_ticks: u64) -> SourceReading {
        let facts = ProcessFacts { start_ticks, uid: 5, user: None, command: "".into(), cgroup: None };
        let process =
            DeviceProcess { pid, host_lookup: HostProcessLookup::Known(Arc::new(facts)), ..DeviceProcess::default() };
        let device =
            DetectedDevice { processes: Reported::Value(vec![process]), ..DetectedDevice::new(Vendor::Nvidia) };
        SourceReading { devices: vec![device], ..SourceReading::default() }
    }

    #[test]
    fn a_process_is_inspected_once_while_it_is_on_a_device_and_forgotten_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::create_dir_all(dir.path().join("42")).unwrap();
            fs::write(dir.path().join("42").join(name), text).unwrap();
        };
        write("environ", "GPUPOOL_LEASE=7\0GPUPOOL_FENCING_TOKEN=9\0");
        write("cgroup", "0::/job/7\n");
        let mut gatherer = EvidenceGatherer { proc: dir.path().to_owned(), known: HashMap::new() };
        let names = LeaseEnvironment::Names(LeaseId(7), Token(9));
        let expected = Evidence { cgroups: vec!["/job/7".into()], ancestry: vec![(42, 1)], environment: names, uid: 5 };
        assert_eq!(gatherer.gather(&on_a_device(42, 1)), HashMap::from([((42, 1), expected)]));
        write("environ", "");
        assert_eq!(gatherer.gather(&on_a_device(42, 1))[&(42, 1)].environment, names, "inspected again too soon");
        assert_eq!(
            gatherer.gather(&on_a_device(42, 2))[&(42, 2)].environment,
            LeaseEnvironment::Silent,
            "another process with its pid"
        );
        assert!(gatherer.gather(&SourceReading::default()).is_empty());
    }

    #[test]
    fn the_ancestry_survives_the_end_of_an_ancestor() {
        let dir = tempfile::tempdir().unwrap();
        let stat = |pid: u32, parent: u32, start: u64| {
            fs::create_dir_all(dir.path().join(pid.to_string())).unwrap();
            let text = format!("{pid} (a) b) S {parent} 1 1 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 1 0 {start} 1 1\n");
            fs::write(dir.path().join(pid.to_string()).join("stat"), text).unwrap();
        };
        stat(1, 0, 1);
        stat(40, 1, 400);
        stat(41, 40, 410);
        let gatherer = EvidenceGatherer { proc: dir.path().to_owned(), known: HashMap::new() };
        let first = gatherer.evidence((41, 410), 0, None);
        assert_eq!(first.ancestry, [(41, 410), (40, 400), (1, 1)]);
        assert_eq!(first.environment, LeaseEnvironment::Hidden);
        stat(41, 1, 410);
        let later = gatherer.evidence((41, 410), 0, Some(first));
        assert_eq!(later.ancestry, [(41, 410), (1, 1), (40, 400)]);
        stat(1, 41, 1);
        assert_eq!(gatherer.evidence((41, 410), 0, None).ancestry.len(), 2, "a loop ends");
    }

    #[test]
    fn an_environment_names_a_lease_with_its_token_or_none() {
        let named = environment(b"PATH=/bin\0GPUPOOL_FENCING_TOKEN=3\0GPUPOOL_LEASE=12\0");
        assert_eq!(named, LeaseEnvironment::Names(LeaseId(12), Token(3)));
        for silent in [&b"GPUPOOL_LEASE=12\0"[..], b"GPUPOOL_LEASE=x\0GPUPOOL_FENCING_TOKEN=3", b"", b"\xff\0"] {
            assert_eq!(environment(silent), LeaseEnvironment::Silent);
        }
        assert_eq!(cgroups(b"5:memory:/m\n0::/\n12:cpu:/a:b\nodd"), ["/m", "/a:b"]);
    }
}
