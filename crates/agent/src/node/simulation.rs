//! Simulated devices of an agent (`--simulate`): leases put load on them, and injected faults make them fail.
//!
//! A handle of the devices: the sampler reads them like real ones. This module has no thread.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use gpupool_api::simulate::{DeviceFaultBody, FaultBody, FaultList};
use gpupool_core::{DeviceIdentity, GpuId, LeaseId};
use gpupool_devices::DeviceSource;
use gpupool_devices::simulated::{
    ControlError, DevicePosition, FaultTarget, SimulatedFault, SimulatedLoad, SimulatedSource, SimulationControl,
    SimulationSpec, SimulationSpecError, monotonic_clock,
};
use serde_json::Value;

use crate::messages::PreparedDevice;

/// The prefix of the names of processes that represent leases. Squatters have other names.
const LOAD: &str = "lease-";

/// A reason why a fault was not set or cleared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulationError {
    /// The device is unknown.
    #[error("gpu_id: {0} is no simulated device; allowed: a number of GET /v1/devices, or none for all of them")]
    NoSuchGpu(GpuId),
    /// The fault is unknown.
    #[error("fault: {value} is not allowed ({why}); allowed: null, or one of {}, by name or as an object", SimulatedFault::KINDS.join(", "))]
    NoSuchFault {
        /// The value in the request.
        value: String,
        /// The reason.
        why: String,
    },
    /// A number of the fault is out of range, or a device is absent.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

/// The simulated devices of an agent.
#[derive(Debug)]
pub(crate) struct Simulation {
    control: SimulationControl,
    places: BTreeMap<DeviceIdentity, DevicePosition>,
    /// The devices that each lease loads. A lock, because the authority starts and ends leases, and requests inject faults.
    loads: Mutex<BTreeMap<LeaseId, Vec<DevicePosition>>>,
}

impl Simulation {
    /// Returns the devices that a text or file describes, on a node of this name, and their source.
    pub(crate) fn new(text_or_path: &str, node: &str) -> Result<(Self, Box<dyn DeviceSource>), SimulationSpecError> {
        let spec = SimulationSpec::load(text_or_path)?.on_node(node);
        let (source, control) = SimulatedSource::new(&spec, monotonic_clock());
        let places = control.devices().into_iter().map(|device| (device.identity, device.place)).collect();
        Ok((Self { control, places, loads: Mutex::default() }, Box::new(source)))
    }

    /// Begins the load of a lease that was granted.
    pub(crate) fn lease_started(&self, lease: LeaseId, devices: &[PreparedDevice]) {
        for PreparedDevice { identity, share, memory } in devices {
            let Some(&place) = self.places.get(identity) else { continue };
            let name = Some(format!("{LOAD}{lease}").into());
            let load = SimulatedLoad { share: *share, memory: *memory, pid: None, name };
            if let Err(error) = self.control.set_load(place, lease.0, load) {
                tracing::warn!(%lease, %error, "cannot simulate the load of a lease");
                continue;
            }
            let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
            let places = loads.entry(lease).or_default();
            if !places.contains(&place) {
                places.push(place);
            }
        }
    }

    /// Ends the load of a lease that has ended.
    pub(crate) fn lease_gone(&self, lease: LeaseId) {
        let places = self.loads.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
        for place in places.unwrap_or_default() {
            self.control.clear_load(place, lease.0);
        }
    }

    /// Sets a fault or, with `null`, clears faults, as `POST /v1/simulate/faults` does. Returns the number of affected devices
    /// or of cleared faults. `identity_of` returns a device by its number.
    pub(crate) fn fault(
        &self,
        body: &FaultBody,
        identity_of: impl Fn(GpuId) -> Option<DeviceIdentity>,
    ) -> Result<usize, SimulationError> {
        let target = match body.gpu_id.map(GpuId) {
            None => FaultTarget::All,
            Some(gpu_id) => {
                let place = identity_of(gpu_id).and_then(|identity| self.places.get(&identity).copied());
                FaultTarget::Position(place.ok_or(SimulationError::NoSuchGpu(gpu_id))?)
            }
        };
        Ok(match fault_of(&body.fault)? {
            Some(fault) => self.control.inject_fault(&target, &fault)?,
            None => self.control.clear_faults(&target, None)?,
        })
    }

    /// Returns the body of `GET /v1/simulate/faults`. `gpu_id_of` returns the number of a device.
    pub(crate) fn faults(&self, gpu_id_of: impl Fn(&DeviceIdentity) -> Option<GpuId>) -> FaultList {
        let numbers: BTreeMap<DevicePosition, GpuId> =
            self.places.iter().filter_map(|(identity, place)| Some((*place, gpu_id_of(identity)?))).collect();
        let body_of = |fault: gpupool_devices::simulated::DeviceFault| {
            let gpu_id = numbers.get(&fault.place)?.0;
            Some(DeviceFaultBody { gpu_id, fault: serde_json::to_value(fault.fault).ok()? })
        };
        FaultList {
            faults: self.control.faults().into_iter().filter_map(body_of).collect(),
            known: SimulatedFault::KINDS.map(ToOwned::to_owned).to_vec(),
        }
    }

    /// Returns the control of the devices, for faults that HTTP cannot set.
    #[cfg(test)]
    pub(crate) const fn control(&self) -> &SimulationControl {
        &self.control
    }
}

/// Returns the lease that a process on a simulated device represents, by the name of the process.
pub(crate) fn lease_of(process: &str) -> Option<LeaseId> {
    process.strip_prefix(LOAD)?.parse().ok().map(LeaseId)
}

/// Returns the fault of a request; `None` clears faults.
fn fault_of(value: &Value) -> Result<Option<SimulatedFault>, SimulationError> {
    let refused =
        |why: String| SimulationError::NoSuchFault { value: value.to_string().chars().take(200).collect(), why };
    match value {
        Value::Null => Ok(None),
        Value::String(text) => {
            text.parse().map(Some).map_err(|error: gpupool_devices::simulated::FaultError| refused(error.to_string()))
        }
        Value::Object(_) => serde_json::from_value(value.clone()).map(Some).map_err(|error| refused(error.to_string())),
        _ => Err(refused("neither a name nor an object".to_owned())),
    }
}
