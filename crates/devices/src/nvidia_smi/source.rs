//! The tool as a source of devices.

use gpupool_core::device::{DeviceIdentity, Health};

use super::{apps, csv, errors, help, list, mig, topo, xml};
use crate::found::{Found, Partition};
use crate::snapshot::Snapshot;
use crate::source::{Source, SourceError, SourceKind};
use crate::told::Told;
use crate::tool::{Output, Tool};

/// Fields asked for where the tool does not print XML, as far as it knows them.
const WANTED: [&str; 19] = [
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "count",
    "mig.mode.current",
    "memory.total",
    "memory.reserved",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "enforced.power.limit",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "gpu_recovery_action",
];

/// How many GPUs are asked one by one where one of them keeps the tool from telling of the others.
const ASKED_ONE_BY_ONE: u32 = 64;

/// NVIDIA's command line tool.
#[derive(Debug)]
pub struct NvidiaSmi {
    tool: Tool,
    /// Fields to ask for without XML; looked up once.
    fields: Option<Vec<String>>,
    /// What does not change while the devices stay the same.
    lasting: Option<Lasting>,
    /// The devices of the last answer, to say which one was lost.
    known: Vec<Found>,
}

#[derive(Debug)]
struct Lasting {
    /// The devices this was asked for.
    of: Vec<DeviceIdentity>,
    /// How they are joined.
    matrix: Snapshot,
    /// Their list, where some are instances: only there are the UUIDs of these.
    list: Snapshot,
}

impl Source for NvidiaSmi {
    fn kind(&self) -> SourceKind {
        SourceKind::NvidiaSmi
    }

    fn read(&mut self) -> Result<Snapshot, SourceError> {
        let mut snapshot = self.devices()?;
        self.name_lost(&mut snapshot);
        let of = snapshot.identities();
        if self.lasting.as_ref().is_none_or(|lasting| lasting.of != of) {
            self.lasting = Some(self.ask_lasting(&snapshot, of));
        }
        if let Some(lasting) = &self.lasting {
            mig::merge_list(&mut snapshot, lasting.list.clone());
            topo::join(&mut snapshot, &lasting.matrix);
        }
        self.known.clone_from(&snapshot.devices);
        Ok(snapshot)
    }
}

impl NvidiaSmi {
    /// A source that runs this tool.
    pub fn new(tool: Tool) -> Self {
        Self { tool, fields: None, lasting: None, known: Vec::new() }
    }

    fn run(&mut self, arguments: &[&str]) -> Result<String, SourceError> {
        self.tool.run(arguments).map(said)
    }

    /// The devices and what they report, from one run of the tool where that works.
    fn devices(&mut self) -> Result<Snapshot, SourceError> {
        let answer = xml::parse(&self.run(&["-q", "-x"])?);
        match answer {
            Err(SourceError::Malformed { .. }) => self.devices_without_xml(),
            Ok(snapshot) if is_silenced(&snapshot) => self.one_by_one(snapshot),
            answer => answer,
        }
    }

    /// Asks for each GPU alone: one that does not answer can keep the tool from telling of any other.
    fn one_by_one(&mut self, mut snapshot: Snapshot) -> Result<Snapshot, SourceError> {
        for number in 0..ASKED_ONE_BY_ONE {
            let text = self.run(&["-q", "-x", "-i", &number.to_string()])?;
            match xml::parse(&text) {
                Ok(alone) if alone.devices.is_empty() => break,
                Ok(alone) => {
                    let mut alone = Snapshot { devices: alone.devices, ..Snapshot::default() };
                    // It shows one of many, so it does not number it.
                    let gpus = alone.devices.iter_mut().filter(|device| device.partition.is_none());
                    gpus.for_each(|device| device.index = Some(number));
                    snapshot.merge(alone);
                }
                Err(_) => break,
            }
        }
        Ok(snapshot)
    }

    /// The devices by a table of fields, leaving out those the tool does not know.
    fn devices_without_xml(&mut self) -> Result<Snapshot, SourceError> {
        let mut fields = match self.fields.take() {
            Some(fields) => fields,
            None => self.known_fields()?,
        };
        let mut snapshot = loop {
            let query = format!("--query-gpu={}", fields.join(","));
            match csv::parse(&self.run(&[&query, "--format=csv"])?) {
                Err(error) => {
                    let unknown = errors::unknown_field(&error);
                    let place = unknown.and_then(|unknown| fields.iter().position(|field| field == unknown));
                    match place {
                        Some(place) if fields.len() > 1 => drop(fields.remove(place)),
                        _ => return Err(error),
                    }
                }
                Ok(snapshot) => break snapshot,
            }
        };
        self.fields = Some(fields);
        self.add_processes(&mut snapshot)?;
        Ok(snapshot)
    }

    fn known_fields(&mut self) -> Result<Vec<String>, SourceError> {
        let text = self.run(&["--help-query-gpu"])?;
        let known = help::fields(&text);
        let wanted = WANTED.iter().filter(|field| known.is_empty() || known.contains(field));
        Ok(wanted.map(|field| (*field).to_owned()).collect())
    }

    fn add_processes(&mut self, snapshot: &mut Snapshot) -> Result<(), SourceError> {
        let query = "--query-compute-apps=gpu_uuid,gpu_bus_id,pid,process_name,used_memory";
        match apps::parse(&self.run(&[query, "--format=csv"])?) {
            Ok(processes) => {
                snapshot.merge(processes);
                for device in snapshot.devices.iter_mut().filter(|device| device.processes.is_absent()) {
                    device.processes = Told::Value(Vec::new());
                }
            }
            Err(error) => snapshot.warn(format!("processes: {error}")),
        }
        Ok(())
    }

    /// A GPU that was lost is named by its place only; what it was is known from before.
    fn name_lost(&self, snapshot: &mut Snapshot) {
        let nameless = |device: &&mut Found| device.uuid.is_none() && device.partition.is_none();
        for device in snapshot.devices.iter_mut().filter(nameless) {
            let same = |known: &&Found| known.partition.is_none() && known.pci.is_some() && known.pci == device.pci;
            if let Some(known) = self.known.iter().find(same) {
                device.uuid = known.uuid.clone();
                device.name = device.name.take().or_else(|| known.name.clone());
                device.index = device.index.or(known.index);
                device.minor = device.minor.or(known.minor);
            }
        }
    }

    fn ask_lasting(&mut self, snapshot: &Snapshot, of: Vec<DeviceIdentity>) -> Lasting {
        let mut ask = |arguments: &[&str], parse: fn(&str) -> Result<Snapshot, SourceError>| {
            self.run(arguments).and_then(|text| parse(&text)).unwrap_or_else(|error| {
                let mut failed = Snapshot::default();
                failed.warn(format!("nvidia-smi {}: {error}", arguments.join(" ")));
                failed
            })
        };
        let is_instance = |device: &Found| matches!(device.partition, Some(Partition::Mig { .. }));
        let has_instances = snapshot.devices.iter().any(is_instance);
        Lasting {
            of,
            matrix: if snapshot.devices.is_empty() { Snapshot::default() } else { ask(&["topo", "-m"], topo::parse) },
            list: if has_instances { ask(&["-L"], list::parse) } else { Snapshot::default() },
        }
    }
}

/// Whether an answer tells only of GPUs that do not answer.
fn is_silenced(snapshot: &Snapshot) -> bool {
    let is_bad = |device: &Found| matches!(device.health, Some(Health::Lost | Health::Unhealthy(_)));
    !snapshot.devices.is_empty() && snapshot.devices.iter().all(|device| device.name.is_none() && is_bad(device))
}

/// What the tool said: its output, and messages it wrote elsewhere.
fn said(output: Output) -> String {
    if output.stdout.trim().is_empty() {
        return output.stderr;
    }
    let messages = output.stderr.lines().filter(|line| errors::looks_like(line));
    messages.fold(output.stdout, |text, line| text + "\n" + line)
}
