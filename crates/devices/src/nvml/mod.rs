//! Source that reads NVIDIA's management library.
//!
//! The library is loaded at the first reading and stays open. Facts are read once per device, values with each reading.
//! Errors concern a field, a device or the driver. Only a driver error fails a reading; the others never hide another
//! device or field.
//!
//! Devices are opened again when their number changes, a device is lost, MIG or its instances change, and after an
//! empty result. A lost device is still reported with its known facts.

mod devices;
mod library;
pub(crate) mod xid;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpupool_core::{DeviceHealth, LinkKind, Vendor};

use crate::detect::SourcePaths;
use crate::detected_device::{DetectedDevice, worse};
use crate::nvml::devices::{DeviceReader, KnownDevices, OpenedDevice, ProcessBuffer, unreadable_device};
use crate::nvml::library::{ErrorScope, NvmlCode, NvmlEventSet, NvmlLibrary, NvmlResult, XidEvent};
use crate::nvml::xid::{XidDescription, XidSeverity};
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::{DetectedLink, SourceReading};
use crate::{limits, pci_bus};

/// Name of the library on Linux, and its name if only development files are installed.
const LIBRARY_NAME: &str = "libnvidia-ml.so.1";
const DEVELOPMENT_NAME: &str = "libnvidia-ml.so";

/// While a device is missing, the library is reopened at the first reading after that and again after this many
/// readings: it finds a returned device only at its start.
const READINGS_PER_OPENING: u32 = 16;

/// Source that reads NVIDIA's management library (NVML).
///
/// An Xid that blames a device makes it unhealthy until the device vanishes and returns, as with a reset, or until
/// [`release`](Self::release) is called.
pub struct NvmlSource {
    path: PathBuf,
    sys: PathBuf,
    session: Option<NvmlSession>,
    known: KnownDevices,
    /// Successive readings with a missing device.
    incomplete: u32,
}

impl NvmlSource {
    /// Creates the source for the library at `paths.nvml`, which is opened at the first reading.
    pub fn new(places: &SourcePaths) -> Self {
        Self {
            path: places.nvml.clone(),
            sys: places.sys.clone(),
            session: None,
            known: KnownDevices::default(),
            incomplete: 0,
        }
    }

    /// Closes the library until the next reading, so that devices can sleep, be reset or be passed to a virtual
    /// machine; an open library prevents that. Recorded Xids are forgotten.
    pub fn release(&mut self) {
        self.session = None;
        self.known.forget_xids();
    }

    fn read_session(&mut self) -> Result<SourceReading, NvmlReadError> {
        if self.session.is_none() {
            let library = open_library(&self.path).map_err(NvmlReadError::Opening)?;
            self.session = Some(NvmlSession::new(library, self.sys.clone()));
        }
        let Some(session) = &mut self.session else { return Err(NvmlReadError::Reading(NvmlCode::UNINITIALIZED)) };
        let reading = session.read(&mut self.known).map_err(NvmlReadError::Reading)?;
        self.incomplete = if session.lacks_devices() { self.incomplete.saturating_add(1) } else { 0 };
        Ok(reading)
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
        let mut result = self.read_session();
        if matches!(result, Err(NvmlReadError::Reading(NvmlCode::UNINITIALIZED))) {
            self.session = None;
            result = self.read_session();
        }
        result.map_err(|failure| {
            self.session = None;
            failure.into()
        })
    }
}

/// Returns the NVIDIA devices on the PCI bus, if there are any and all of them sleep to save power. Opening the library
/// would wake them and keep them awake.
fn all_asleep(sys: &Path) -> Option<SourceReading> {
    let mut bus = pci_bus::scan(sys).into_value()?;
    bus.gpus.retain(|gpu| gpu.vendor == Vendor::Nvidia);
    (!bus.gpus.is_empty() && bus.gpus.iter().all(|gpu| gpu.asleep)).then(|| bus.to_reading())
}

/// Reason why there is no reading.
enum NvmlReadError {
    Opening(SourceError),
    Reading(NvmlCode),
}

impl From<NvmlReadError> for SourceError {
    fn from(failure: NvmlReadError) -> Self {
        match failure {
            NvmlReadError::Opening(error) => error,
            NvmlReadError::Reading(code) => code.source_error("reading the devices from NVML"),
        }
    }
}

fn open_library(path: &Path) -> Result<NvmlLibrary, SourceError> {
    match NvmlLibrary::open(path.as_os_str()) {
        Err(missing @ SourceError::NotPresent { .. }) if path == Path::new(LIBRARY_NAME) => {
            NvmlLibrary::open(OsStr::new(DEVELOPMENT_NAME)).map_err(|second| match second {
                SourceError::NotPresent { .. } => missing,
                other => other,
            })
        }
        result => result,
    }
}

// The open library with the handles of its devices.

/// Maximum events taken in one reading; the rest follows with the next.
const MAX_EVENTS: usize = 256;

/// An open library. Its devices are opened again whenever the known ones may be outdated.
struct NvmlSession {
    sys: PathBuf,
    driver: Option<Arc<str>>,
    /// Number of devices that the library reported when they were last opened.
    count: u32,
    opened: Vec<OpenedDevice>,
    unopened: Vec<UnopenedDevice>,
    links: Vec<(usize, usize, LinkKind)>,
    events: Option<NvmlEventSet>,
    buffer: ProcessBuffer,
    needs_rescan: bool,
    library: NvmlLibrary,
}

/// A known or counted device that could not be opened.
struct UnopenedDevice {
    index: Option<u32>,
    code: NvmlCode,
    /// Last known facts of the device and its instances; never empty.
    known: Vec<DetectedDevice>,
}

impl NvmlSession {
    fn new(library: NvmlLibrary, sys: PathBuf) -> Self {
        let driver = library.driver_version().ok().map(Into::into);
        Self {
            sys,
            driver,
            count: 0,
            opened: Vec::new(),
            unopened: Vec::new(),
            links: Vec::new(),
            events: None,
            buffer: ProcessBuffer::default(),
            needs_rescan: true,
            library,
        }
    }

    /// Reads all present devices. Fails only if the driver as a whole fails.
    fn read(&mut self, known: &mut KnownDevices) -> NvmlResult<SourceReading> {
        let mut reading = SourceReading::default();
        let count = self.library.device_count()?;
        // Events come first, because opening devices discards unread events.
        self.poll_events(known, &mut reading);
        if self.needs_rescan || count != self.count || self.has_returned_device() || self.has_mig_changed()? {
            self.open_devices(count, known)?;
            self.poll_events(known, &mut reading);
        }
        let mut places = Vec::with_capacity(self.opened.len());
        let mut unopened = self.unopened.iter().peekable();
        for device in &self.opened {
            while let Some(before) =
                unopened.next_if(|unopened| unopened.index < device.facts.index && unopened.index.is_some())
            {
                before.add_to(&mut reading);
            }
            let reader = DeviceReader { library: &self.library, buffer: &mut self.buffer, worst: None };
            let (found, scope) = reader.read(device)?;
            known.note_presence(&device.facts, scope == ErrorScope::Field);
            self.needs_rescan |= scope == ErrorScope::Presence;
            places.push(reading.devices.len());
            let xid_health = known.xid_reason(&device.facts).map(|text| DeviceHealth::Unhealthy(text.clone()));
            for mut part in found {
                part.health = worse(part.health, xid_health.clone());
                reading.push(part);
            }
        }
        for device in unopened {
            device.add_to(&mut reading);
        }
        for device in &self.unopened {
            known.note_presence(&device.known[0], false);
        }
        // Each pair occurs once, and positions grow with the order of devices.
        let link = |&(a, b, kind): &_| Some(DetectedLink::new(*places.get(a)?, *places.get(b)?, kind));
        reading.links = self.links.iter().filter_map(link).collect();
        // A library without devices may have been opened too early, as may a device whose facts are incomplete.
        self.needs_rescan |= count == 0 || self.opened.iter().any(|device| device.is_incomplete);
        Ok(reading)
    }

    /// Whether a device is missing that reopening the library may bring back.
    fn lacks_devices(&self) -> bool {
        self.needs_rescan || self.unopened.iter().any(|device| device.code.scope_at_opening() != ErrorScope::Field)
    }

    /// Whether a device that could not be opened can be opened now.
    fn has_returned_device(&self) -> bool {
        let mut counted = self.unopened.iter().filter_map(|device| device.index);
        counted.any(|index| self.library.device(index).is_ok())
    }

    fn has_mig_changed(&self) -> NvmlResult<bool> {
        for device in &self.opened {
            match device.has_mig_changed(&self.library) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(code) if code.scope() == ErrorScope::Driver => return Err(code),
                // The reading that follows reports the device's error.
                Err(_) => {}
            }
        }
        Ok(false)
    }

    fn open_devices(&mut self, count: u32, known: &mut KnownDevices) -> NvmlResult<()> {
        self.close_handles();
        let mut failures = Vec::new();
        for index in 0..count.min(limits::DEVICES as u32) {
            match OpenedDevice::open(&self.library, index, self.driver.as_ref(), &self.sys) {
                Ok(device) => self.opened.push(device),
                Err(code) if code.scope() == ErrorScope::Driver => return Err(code),
                Err(code) => failures.push((index, code)),
            }
        }
        // If no device can be opened for an unknown reason, the library or this container is at fault.
        let all_unknown = failures.iter().all(|failure| failure.1 == NvmlCode::UNKNOWN);
        if self.opened.is_empty() && !failures.is_empty() && all_unknown {
            return Err(NvmlCode::UNKNOWN);
        }
        for device in &mut self.opened {
            let instances = device.instances.iter().map(|instance| instance.facts.clone()).collect();
            known.update(&mut device.facts, instances);
        }
        self.unopened = list_unopened(&self.opened, failures, known);
        self.links = devices::links_between(&self.library, &self.opened);
        self.events = self.library.new_event_set().ok();
        if let Some(events) = self.events {
            for device in &self.opened {
                // A device without Xid events is still usable.
                let _ = self.library.register_xids(device.handle, events);
            }
        }
        self.count = count;
        self.needs_rescan = false;
        Ok(())
    }

    fn poll_events(&self, known: &mut KnownDevices, reading: &mut SourceReading) {
        let Some(events) = self.events else { return };
        for _ in 0..MAX_EVENTS {
            match self.library.next_event(events) {
                Ok(Some(event)) => self.handle_xid(event, known, reading),
                Ok(None) => return,
                // A failure to read events is no fault of the devices.
                Err(code) => return reading.warn(format!("cannot read driver events: {}", code.description())),
            }
        }
    }

    fn handle_xid(&self, event: XidEvent, known: &mut KnownDevices, reading: &mut SourceReading) {
        let device = self.opened.iter().find(|device| device.handle == event.device);
        let name = device.map_or_else(|| "an unknown GPU".into(), |device| display_name(&device.facts));
        let XidDescription { severity, meaning, remedy } = xid::describe_xid(event.xid.try_into().unwrap_or(u32::MAX));
        let then = if remedy.is_empty() { String::new() } else { format!(": {remedy}") };
        match (severity, device) {
            (XidSeverity::Application, _) => {}
            (XidSeverity::Unhealthy, Some(device)) => {
                known.record_xid(&device.facts, format!("Xid {}: {meaning}{then}", event.xid));
            }
            _ => reading.warn(format!("{name}: Xid {}: {meaning}{then}", event.xid)),
        }
    }

    fn close_handles(&mut self) {
        if let Some(events) = self.events.take() {
            self.library.free_event_set(events);
        }
        self.opened.clear();
        self.unopened.clear();
        self.links.clear();
    }
}

impl Drop for NvmlSession {
    fn drop(&mut self) {
        self.close_handles();
    }
}

impl UnopenedDevice {
    fn add_to(&self, reading: &mut SourceReading) {
        let Self { index, code, known } = self;
        let health = match code.scope_at_opening() {
            ErrorScope::Presence => Some(DeviceHealth::Lost),
            ErrorScope::Device => Some(DeviceHealth::Unhealthy(code.description().into())),
            // Missing permission is no fault of the device.
            ErrorScope::Field | ErrorScope::Driver => None,
        };
        match index {
            Some(_) => reading.warn(format!("{} cannot be opened: {}", display_name(&known[0]), code.description())),
            None => reading.warn(format!("{} is gone", display_name(&known[0]))),
        }
        for facts in known {
            reading.push(unreadable_device(facts.clone(), *code, health.clone()));
        }
    }
}

/// Returns the devices that could not be opened, by index, and then the known devices that are no longer counted.
///
/// A device that cannot be opened has no identity; it is taken for the missing device that last had its index.
fn list_unopened(opened: &[OpenedDevice], failures: Vec<(u32, NvmlCode)>, known: &KnownDevices) -> Vec<UnopenedDevice> {
    let present: Vec<&DetectedDevice> = opened.iter().map(|device| &device.facts).collect();
    let mut missing: Vec<UnopenedDevice> = known
        .missing(&present)
        .map(|device| {
            let known = std::iter::once(&device.facts).chain(&device.instances).cloned().collect();
            UnopenedDevice { index: None, code: NvmlCode::LOST, known }
        })
        .collect();
    let mut unopened: Vec<UnopenedDevice> = failures
        .into_iter()
        .map(|(index, code)| {
            let known = match missing.iter().position(|device| device.known[0].index == Some(index)) {
                Some(place) => missing.remove(place).known,
                None => vec![DetectedDevice { index: Some(index), ..DetectedDevice::new(Vendor::Nvidia) }],
            };
            UnopenedDevice { index: Some(index), code, known }
        })
        .collect();
    unopened.append(&mut missing);
    unopened
}

/// Returns the name of a device for people.
fn display_name(facts: &DetectedDevice) -> String {
    match (&facts.uuid, facts.pci, facts.index) {
        (Some(uuid), ..) => format!("GPU {uuid}"),
        (None, Some(pci), _) => format!("GPU at {pci}"),
        (None, None, Some(index)) => format!("GPU {index}"),
        (None, None, None) => "a GPU".into(),
    }
}
