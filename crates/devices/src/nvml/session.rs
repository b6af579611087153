//! The library while it is open, with the handles of its devices.

use std::path::PathBuf;
use std::sync::Arc;

use gpupool_core::device::{Health, LinkKind, Vendor};

use super::code::{Against, Answer, Code};
use super::library::{EventSet, Library, XidEvent};
use super::links;
use super::opened::Opened;
use super::processes::Room;
use super::reading::{Seen, read, unreadable};
use super::remembered::Remembered;
use super::xid::{Severity, Verdict, XidPolicy};
use crate::found::{Found, worse};
use crate::limits;
use crate::snapshot::{FoundLink, Snapshot};

/// The most events taken in one reading; more come with the next.
const EVENTS: usize = 256;

/// An open library. Its devices are looked for again whenever what is known of them may be wrong.
pub(super) struct Session {
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
    known: Vec<Found>,
}

impl Session {
    pub fn new(library: Library, sys: PathBuf) -> Self {
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
    pub fn read(&mut self, remembered: &mut Remembered, policy: &XidPolicy) -> Answer<Snapshot> {
        let mut snapshot = Snapshot::default();
        let count = self.library.device_count()?;
        // First, because looking for devices throws away what was not heard.
        self.hear_events(remembered, policy, &mut snapshot);
        if self.stale || count != self.count || self.is_any_back() || self.is_any_cut_differently()? {
            self.look_for_devices(count, remembered)?;
            self.hear_events(remembered, policy, &mut snapshot);
        }
        let mut places = Vec::with_capacity(self.opened.len());
        let mut closed = self.closed.iter().peekable();
        for device in &self.opened {
            while let Some(before) =
                closed.next_if(|closed| closed.index < device.facts.index && closed.index.is_some())
            {
                before.add_to(&mut snapshot);
            }
            let Seen { found, against } = read(&self.library, device, &mut self.room)?;
            remembered.note(&device.facts, against == Against::Field);
            self.stale |= against == Against::Presence;
            places.push(snapshot.devices.len());
            let judged = remembered.judgement(&device.facts).map(|text| Health::Unhealthy(text.clone()));
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
            Some(FoundLink { a: one.min(other), b: one.max(other), kind })
        };
        snapshot.links = self.links.iter().filter_map(placed).collect();
        // A library that knows no device may just have looked too early, as may have a device that cannot say who it is.
        self.stale |= count == 0 || self.opened.iter().any(|device| device.is_unsure);
        Ok(snapshot)
    }

    /// Whether a device is missing that opening the library again may bring back.
    pub fn misses_devices(&self) -> bool {
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
        self.links = links::between(&self.library, &self.opened);
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

    fn hear_events(&self, remembered: &mut Remembered, policy: &XidPolicy, snapshot: &mut Snapshot) {
        let Some(events) = self.events else { return };
        for _ in 0..EVENTS {
            match self.library.next_event(events) {
                Ok(Some(event)) => self.hear(event, remembered, policy, snapshot),
                Ok(None) => return,
                // That events cannot be heard says nothing about the devices.
                Err(code) => return snapshot.warn(format!("events of the driver cannot be heard: {}", code.words())),
            }
        }
    }

    fn hear(&self, event: XidEvent, remembered: &mut Remembered, policy: &XidPolicy, snapshot: &mut Snapshot) {
        let device = self.opened.iter().find(|device| device.handle == event.device);
        let name = device.map_or_else(|| "a GPU that is not known".into(), |device| spoken(&device.facts));
        let Verdict { severity, meaning, remedy } = policy.judge(event.xid.try_into().unwrap_or(u32::MAX));
        let then = if remedy.is_empty() { String::new() } else { format!(": {remedy}") };
        match (severity, device) {
            (Severity::Application, _) => {}
            (Severity::Unhealthy, Some(device)) => {
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
    fn add_to(&self, snapshot: &mut Snapshot) {
        let Self { index, code, known } = self;
        let health = match code.against_at_opening() {
            Against::Presence => Some(Health::Lost),
            Against::Device => Some(Health::Unhealthy(code.words().into())),
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
    let present: Vec<&Found> = opened.iter().map(|device| &device.facts).collect();
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
                None => vec![Found { index: Some(index), ..Found::new(Vendor::Nvidia) }],
            };
            Closed { index: Some(index), code, known }
        })
        .collect();
    closed.append(&mut missing);
    closed
}

/// A device as people know it.
fn spoken(facts: &Found) -> String {
    match (&facts.uuid, facts.pci, facts.index) {
        (Some(uuid), ..) => format!("GPU {uuid}"),
        (None, Some(pci), _) => format!("GPU at {pci}"),
        (None, None, Some(index)) => format!("GPU number {index}"),
        (None, None, None) => "a GPU".into(),
    }
}
