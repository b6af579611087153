//! Faults on simulated devices.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The body of `POST /v1/simulate/faults`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FaultBody {
    /// Which device, by number; all where it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_id: Option<u32>,
    /// Which fault, by name or as an object with its parameters; `null` mends the device.
    #[cfg_attr(feature = "schema", schema(value_type = Object, nullable))]
    pub fault: Value,
}

/// The body of `GET /v1/simulate/faults`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Faults {
    /// The faults in force.
    pub faults: Vec<DeviceFault>,
    /// The names of faults there are.
    pub known: Vec<String>,
}

/// A fault in force.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceFault {
    /// Which device.
    pub gpu_id: u32,
    /// Which fault.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    pub fault: Value,
}
