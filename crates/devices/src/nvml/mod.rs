//! NVIDIA's management library as a source.
//!
//! The library is loaded when it is first read and stays open. What devices are is asked once; what they report, each
//! time. Its errors are of three kinds: a field that has no value, a device that is bad, and a driver that is bad. Only
//! the last one fails a reading; no other device and no other field is ever lost for one.
//!
//! Devices are looked for again when their number changes, when one is lost, when MIG was switched or its instances
//! changed, and after an empty answer. A lost one is still reported, by what it was.

mod devices;
mod library;
pub(crate) mod xid;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{DeviceHealth, LinkKind, Vendor};

use crate::detect::SourcePaths;
use crate::detected_device::{DetectedDevice, worse};
use crate::nvml::devices::{Opened, Remembered, Room, read, unreadable};
use crate::nvml::library::{Against, Answer, Code, EventSet, Library, XidEvent};
use crate::nvml::xid::{XidDescription, XidSeverity};
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{limits, pci_bus};

/// The name of the library on Linux, and the one it has where only development files are installed.
const USUAL: &str = "libnvidia-ml.so.1";
const UNUSUAL: &str = "libnvidia-ml.so";

/// While a device is missing, the library is opened anew at the first reading after that and at every so many more:
/// it only finds a device that came back when it starts.
const READINGS_PER_OPENING: u32 = 16;

/// NVIDIA's management library.
///
/// An Xid that speaks against a device makes it unhealthy until it went away and came back, as with a reset, or until
/// [`release`](Self::release) was called.
pub struct NvmlSource {
    path: PathBuf,
    sys: PathBuf,
    session: Option<Session>,
    remembered: Remembered,
    /// Readings in a row with a device missing.
    incomplete: u32,
}

impl NvmlSource {
    /// The library at `places.nvml`, opened when it is first read.
    pub fn new(places: &SourcePaths) -> Self {
        Self {
            path: places.nvml.clone(),
            sys: places.sys.clone(),
            session: None,
            remembered: Remembered::default(),
            incomplete: 0,
        }
    }

    /// Closes the library until the next reading, so that devices may sleep, be reset or be given to a virtual
    /// machine; an open library forbids that. What Xids said is forgotten.
    pub fn release(&mut self) {
        self.session = None;
        self.remembered.forget_judgements();
    }

    fn read_open(&mut self) -> Result<SourceReading, Failure> {
        if self.session.is_none() {
            let library = open(&self.path).map_err(Failure::Opening)?;
            self.session = Some(Session::new(library, self.sys.clone()));
        }
        let Some(session) = &mut self.session else { return Err(Failure::Reading(Code::UNINITIALIZED)) };
        let snapshot = session.read(&mut self.remembered).map_err(Failure::Reading)?;
        self.incomplete = if session.misses_devices() { self.incomplete.saturating_add(1) } else { 0 };
        Ok(snapshot)
    }
}

impl DeviceSource for NvmlSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Nvml
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        if self.incomplete % READINGS_PER_OPENING == 1 {
            self.session = None;
        }
        if self.session.is_none()
            && let Some(asleep) = all_asleep(&self.sys)
        {
            return Ok(asleep);
        }
        let mut answer = self.read_open();
        if matches!(answer, Err(Failure::Reading(Code::UNINITIALIZED))) {
            self.session = None;
            answer = self.read_open();
        }
        answer.map_err(|failure| {
            self.session = None;
            failure.into()
        })
    }
}

/// NVIDIA's devices as the bus knows them, where there are any and all of them sleep to save power. Opening the library
/// would wake them, and keep them awake.
fn all_asleep(sys: &Path) -> Option<SourceReading> {
    let mut bus = pci_bus::scan(sys).into_value()?;
    bus.gpus.retain(|gpu| gpu.vendor == Vendor::Nvidia);
    (!bus.gpus.is_empty() && bus.gpus.iter().all(|gpu| gpu.asleep)).then(|| bus.snapshot())
}

/// Why there is no reading.
enum Failure {
    Opening(SourceError),
    Reading(Code),
}

impl From<Failure> for SourceError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Opening(error) => error,
            Failure::Reading(code) => code.failure("reading the devices from NVML"),
        }
    }
}

fn open(path: &Path) -> Result<Library, SourceError> {
    match Library::open(path.as_os_str()) {
        Err(missing @ SourceError::NotPresent { .. }) if path == Path::new(USUAL) => Library::open(OsStr::new(UNUSUAL))
            .map_err(|second| match second {
                SourceError::NotPresent { .. } => missing,
                other => other,
            }),
        answer => answer,
    }
}

// The library while it is open, with the handles of its devices.

/// The most events taken in one reading; more come with the next.
const EVENTS: usize = 256;

/// An open library. Its devices are looked for again whenever what is known of them may be wrong.
struct Session {
    sys: PathBuf,
    driver: Option<Arc<str>>,
    /// How many devices the library counted when they were last looked for.
    count: u32,
    opened: Vec<Opened>,
    closed: Vec<Closed>,
    links: Vec<(usize, usize, LinkKind)>,
    events: Option<EventSet>,
    room: Room,
    stale: bool,
    library: Library,
}

/// A device that is counted, or was here before, and could not be opened.
struct Closed {
    index: Option<u32>,
    code: Code,
    /// It and its instances, as they were last known; at least one.
    known: Vec<DetectedDevice>,
}

impl Session {
    fn new(library: Library, sys: PathBuf) -> Self {
        let driver = library.driver_version().ok().map(Into::into);
        Self {
            sys,
            driver,
            count: 0,
            opened: Vec::new(),
            closed: Vec::new(),
            links: Vec::new(),
            events: None,
            room: Room::default(),
            stale: true,
            library,
        }
    }

    /// Every device there is now. An error only where the driver as a whole is bad.
    fn read(&mut self, remembered: &mut Remembered) -> Answer<SourceReading> {
        let mut snapshot = SourceReading::default();
        let count = self.library.device_count()?;
        // First, because looking for devices throws away what was not heard.
        self.hear_events(remembered, &mut snapshot);
        if self.stale || count != self.count || self.is_any_back() || self.is_any_cut_differently()? {
            self.look_for_devices(count, remembered)?;
            self.hear_events(remembered, &mut snapshot);
        }
        let mut places = Vec::with_capacity(self.opened.len());
        let mut closed = self.closed.iter().peekable();
        for device in &self.opened {
            while let Some(before) =
                closed.next_if(|closed| closed.index < device.facts.index && closed.index.is_some())
            {
                before.add_to(&mut snapshot);
            }
            let (found, against) = read(&self.library, device, &mut self.room)?;
            remembered.note(&device.facts, against == Against::Field);
            self.stale |= against == Against::Presence;
            places.push(snapshot.devices.len());
            let judged = remembered.judgement(&device.facts).map(|text| DeviceHealth::Unhealthy(text.clone()));
            for mut part in found {
                part.health = worse(part.health, judged.clone());
                snapshot.push(part);
            }
        }
        for device in closed {
            device.add_to(&mut snapshot);
        }
        for device in &self.closed {
            remembered.note(&device.known[0], false);
        }
        // Each pair was found once, and places grow with the order of devices.
        let placed = |&(a, b, kind): &(usize, usize, LinkKind)| {
            let (one, other) = (*places.get(a)?, *places.get(b)?);
            Some(DetectedLink { a: one.min(other), b: one.max(other), kind })
        };
        snapshot.links = self.links.iter().filter_map(placed).collect();
        // A library that knows no device may just have looked too early, as may have a device that cannot say who it is.
        self.stale |= count == 0 || self.opened.iter().any(|device| device.is_unsure);
        Ok(snapshot)
    }

    /// Whether a device is missing that opening the library again may bring back.
    fn misses_devices(&self) -> bool {
        self.stale || self.closed.iter().any(|device| device.code.against_at_opening() != Against::Field)
    }

    /// Whether a device that could not be opened can be now.
    fn is_any_back(&self) -> bool {
        let mut counted = self.closed.iter().filter_map(|device| device.index);
        counted.any(|index| self.library.device(index).is_ok())
    }

    fn is_any_cut_differently(&self) -> Answer<bool> {
        for device in &self.opened {
            match device.is_cut_differently(&self.library) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(code) if code.against() == Against::Driver => return Err(code),
                // The reading that follows finds out what is wrong with the device.
                Err(_) => {}
            }
        }
        Ok(false)
    }

    fn look_for_devices(&mut self, count: u32, remembered: &mut Remembered) -> Answer<()> {
        self.let_go();
        let mut refused = Vec::new();
        for index in 0..count.min(limits::DEVICES as u32) {
            match Opened::open(&self.library, index, self.driver.as_ref(), &self.sys) {
                Ok(device) => self.opened.push(device),
                Err(code) if code.against() == Against::Driver => return Err(code),
                Err(code) => refused.push((index, code)),
            }
        }
        // Where no device can be opened for a reason nobody can name, it is the library or this container.
        if self.opened.is_empty() && !refused.is_empty() && refused.iter().all(|(_, code)| *code == Code::UNKNOWN) {
            return Err(Code::UNKNOWN);
        }
        for device in &mut self.opened {
            let instances = device.instances.iter().map(|instance| instance.facts.clone()).collect();
            remembered.keep(&mut device.facts, instances);
        }
        self.closed = closed(&self.opened, refused, remembered);
        self.links = devices::between(&self.library, &self.opened);
        self.events = self.library.new_event_set().ok();
        if let Some(events) = self.events {
            for device in &self.opened {
                // A device that cannot tell of Xids is none the worse for it.
                let _ = self.library.register_xids(device.handle, events);
            }
        }
        self.count = count;
        self.stale = false;
        Ok(())
    }

    fn hear_events(&self, remembered: &mut Remembered, snapshot: &mut SourceReading) {
        let Some(events) = self.events else { return };
        for _ in 0..EVENTS {
            match self.library.next_event(events) {
                Ok(Some(event)) => self.hear(event, remembered, snapshot),
                Ok(None) => return,
                // That events cannot be heard says nothing about the devices.
                Err(code) => return snapshot.warn(format!("events of the driver cannot be heard: {}", code.words())),
            }
        }
    }

    fn hear(&self, event: XidEvent, remembered: &mut Remembered, snapshot: &mut SourceReading) {
        let device = self.opened.iter().find(|device| device.handle == event.device);
        let name = device.map_or_else(|| "a GPU that is not known".into(), |device| spoken(&device.facts));
        let XidDescription { severity, meaning, remedy } = xid::describe_xid(event.xid.try_into().unwrap_or(u32::MAX));
        let then = if remedy.is_empty() { String::new() } else { format!(": {remedy}") };
        match (severity, device) {
            (XidSeverity::Application, _) => {}
            (XidSeverity::Unhealthy, Some(device)) => {
                remembered.judge(&device.facts, format!("Xid {}: {meaning}{then}", event.xid));
            }
            _ => snapshot.warn(format!("{name}: Xid {}: {meaning}{then}", event.xid)),
        }
    }

    fn let_go(&mut self) {
        if let Some(events) = self.events.take() {
            self.library.free_event_set(events);
        }
        self.opened.clear();
        self.closed.clear();
        self.links.clear();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Closed {
    fn add_to(&self, snapshot: &mut SourceReading) {
        let Self { index, code, known } = self;
        let health = match code.against_at_opening() {
            Against::Presence => Some(DeviceHealth::Lost),
            Against::Device => Some(DeviceHealth::Unhealthy(code.words().into())),
            // That this process may not open it says nothing about the device.
            Against::Field | Against::Driver => None,
        };
        match index {
            Some(_) => snapshot.warn(format!("{} cannot be opened: {}", spoken(&known[0]), code.words())),
            None => snapshot.warn(format!("{} was here and is gone", spoken(&known[0]))),
        }
        for facts in known {
            snapshot.push(unreadable(facts.clone(), *code, health.clone()));
        }
    }
}

/// The devices that could not be opened, by number, and then those that were here before and are not counted any more.
///
/// A device that cannot be opened cannot say who it is; it is taken for the one that last had its number, if that one
/// is not here.
fn closed(opened: &[Opened], refused: Vec<(u32, Code)>, remembered: &Remembered) -> Vec<Closed> {
    let present: Vec<&DetectedDevice> = opened.iter().map(|device| &device.facts).collect();
    let mut missing: Vec<Closed> = remembered
        .missing(&present)
        .map(|device| {
            let known = std::iter::once(&device.facts).chain(&device.instances).cloned().collect();
            Closed { index: None, code: Code::LOST, known }
        })
        .collect();
    let mut closed: Vec<Closed> = refused
        .into_iter()
        .map(|(index, code)| {
            let known = match missing.iter().position(|device| device.known[0].index == Some(index)) {
                Some(place) => missing.remove(place).known,
                None => vec![DetectedDevice { index: Some(index), ..DetectedDevice::new(Vendor::Nvidia) }],
            };
            Closed { index: Some(index), code, known }
        })
        .collect();
    closed.append(&mut missing);
    closed
}

/// A device as people know it.
fn spoken(facts: &DetectedDevice) -> String {
    match (&facts.uuid, facts.pci, facts.index) {
        (Some(uuid), ..) => format!("GPU {uuid}"),
        (None, Some(pci), _) => format!("GPU at {pci}"),
        (None, None, Some(index)) => format!("GPU number {index}"),
        (None, None, None) => "a GPU".into(),
    }
}
