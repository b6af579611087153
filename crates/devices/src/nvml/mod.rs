//! NVIDIA's management library as a source.
//!
//! The library is loaded when it is first read and stays open. What devices are is asked once; what they report, each
//! time. Its errors are of three kinds: a field that has no value, a device that is bad, and a driver that is bad. Only
//! the last one fails a reading; no other device and no other field is ever lost for one.
//!
//! Devices are looked for again when their number changes, when one is lost, when MIG was switched or its instances
//! changed, and after an empty answer. A lost one is still reported, by what it was.

mod code;
mod library;
mod links;
mod opened;
mod processes;
mod reading;
mod remembered;
mod session;
pub mod xid;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use gpupool_core::device::Vendor;

use self::code::Code;
use self::library::Library;
use self::remembered::Remembered;
use self::session::Session;
use self::xid::XidPolicy;
use crate::pci_bus;
use crate::places::Places;
use crate::snapshot::Snapshot;
use crate::source::{Source, SourceError, SourceKind};

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
pub struct Nvml {
    path: PathBuf,
    sys: PathBuf,
    policy: XidPolicy,
    session: Option<Session>,
    remembered: Remembered,
    /// Readings in a row with a device missing.
    incomplete: u32,
}

impl Nvml {
    /// The library at `places.nvml`, opened when it is first read.
    pub fn new(places: &Places) -> Self {
        Self {
            path: places.nvml.clone(),
            sys: places.sys.clone(),
            policy: XidPolicy::default(),
            session: None,
            remembered: Remembered::default(),
            incomplete: 0,
        }
    }

    /// The same, judging Xids by this policy.
    #[must_use]
    pub fn with_policy(self, policy: XidPolicy) -> Self {
        Self { policy, ..self }
    }

    /// Closes the library until the next reading, so that devices may sleep, be reset or be given to a virtual
    /// machine; an open library forbids that. What Xids said is forgotten.
    pub fn release(&mut self) {
        self.session = None;
        self.remembered.forget_judgements();
    }

    fn read_open(&mut self) -> Result<Snapshot, Failure> {
        if self.session.is_none() {
            let library = open(&self.path).map_err(Failure::Opening)?;
            self.session = Some(Session::new(library, self.sys.clone()));
        }
        let Some(session) = &mut self.session else { return Err(Failure::Reading(Code::UNINITIALIZED)) };
        let snapshot = session.read(&mut self.remembered, &self.policy).map_err(Failure::Reading)?;
        self.incomplete = if session.misses_devices() { self.incomplete.saturating_add(1) } else { 0 };
        Ok(snapshot)
    }
}

impl Source for Nvml {
    fn kind(&self) -> SourceKind {
        SourceKind::Nvml
    }

    fn read(&mut self) -> Result<Snapshot, SourceError> {
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
fn all_asleep(sys: &Path) -> Option<Snapshot> {
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
        Err(missing @ SourceError::NotHere { .. }) if path == Path::new(USUAL) => Library::open(OsStr::new(UNUSUAL))
            .map_err(|second| match second {
                SourceError::NotHere { .. } => missing,
                other => other,
            }),
        answer => answer,
    }
}
