//! Bodies of the statistics routes.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The body of `GET /gpu/stats`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Stats))]
pub struct StatsBody {
    /// Number of listed GPUs.
    pub gpu_count: usize,
    /// The GPUs, by number.
    pub gpus: Vec<GpuBody>,
    /// Time of the reading.
    pub timestamp: String,
    /// Whether the reading is too old to be current.
    #[serde(default)]
    pub stale: bool,
    /// Error of a source of readings. `null` if all sources work.
    #[serde(default)]
    pub error: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Gpu))]
pub struct GpuBody {
    /// Number of the GPU on this node, stable across restarts.
    pub gpu_id: u32,
    /// Product name.
    pub name: String,
    /// Device memory.
    pub memory: GpuMemory,
    /// Utilization in percent. 0, and listed in `unsupported`, if the device cannot report it.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Temperature of the chip.
    #[serde(default, deserialize_with = "degrees")]
    pub temperature_c: Option<i32>,
    /// Power draw and limit.
    pub power: GpuPower,
    /// UUID of the vendor.
    #[serde(default)]
    pub uuid: Option<String>,
    /// `nvidia`, `amd`, `intel` or `other`.
    #[serde(default)]
    pub vendor: String,
    /// `healthy`, `unhealthy` or `lost`.
    #[serde(default)]
    pub health: String,
    /// Reason if the device is not healthy.
    #[serde(default)]
    pub health_reason: Option<String>,
    /// Whether the reading is too old to be current.
    #[serde(default)]
    pub stale: bool,
    /// Time of the reading.
    #[serde(default)]
    pub timestamp: String,
    /// Whether the GPU sleeps to save power. It is not read then, because reading would wake it.
    #[serde(default)]
    pub asleep: bool,
    /// Fields whose number is a placeholder because the device reports no value.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The memory of a GPU, in MiB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuMemory {
    /// Total memory.
    #[serde(deserialize_with = "whole")]
    pub total_mb: u64,
    /// Memory used by programs, without the driver's reservation.
    #[serde(deserialize_with = "whole")]
    pub used_mb: u64,
    /// Free memory: total − used − reserved.
    #[serde(deserialize_with = "whole")]
    pub free_mb: u64,
    /// Used memory in percent of the total, with two digits.
    pub usage_percent: f64,
    /// Memory reserved by the driver. `null` if the driver does not report it.
    #[serde(default)]
    pub reserved_mb: Option<u64>,
    /// Host memory that the GPU may use in addition. This is the main memory of an integrated GPU.
    #[serde(default)]
    pub host_total_mb: Option<u64>,
    /// Used part of that host memory.
    #[serde(default)]
    pub host_used_mb: Option<u64>,
}

/// The power of a GPU, in watts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuPower {
    /// Current draw.
    pub draw_w: Option<f64>,
    /// Power limit.
    pub limit_w: Option<f64>,
}

/// The body of `GET /gpu/count`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Count))]
pub struct GpuCountBody {
    /// Number of listed GPUs.
    pub gpu_count: usize,
    /// Time of the reading.
    pub timestamp: String,
    /// Whether the reading is too old to be current.
    #[serde(default)]
    pub stale: bool,
    /// Error of a source of readings. `null` if all sources work.
    #[serde(default)]
    pub error: Option<String>,
}

/// The body of `GET /gpu/summary`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Summary))]
pub struct SummaryBody {
    /// Number of listed GPUs.
    pub gpu_count: usize,
    /// Total memory in MiB. A GPU that is listed together with its partitions counts once.
    #[serde(deserialize_with = "whole")]
    pub total_memory_mb: u64,
    /// Used memory in MiB.
    #[serde(deserialize_with = "whole")]
    pub total_used_memory_mb: u64,
    /// Used memory in percent, with two digits.
    pub total_memory_usage_percent: f64,
    /// Average utilization of the GPUs that report it.
    pub average_utilization_percent: f64,
    /// Number of GPUs in that average. The average is meaningless if this is 0.
    #[serde(default)]
    pub average_over: usize,
    /// The GPUs, by number.
    pub gpus_summary: Vec<GpuSummary>,
    /// Time of the reading.
    pub timestamp: String,
    /// Whether the reading is too old to be current.
    #[serde(default)]
    pub stale: bool,
    /// Error of a source of readings. `null` if all sources work.
    #[serde(default)]
    pub error: Option<String>,
}

/// Summary of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuSummary {
    /// Number of the GPU.
    pub gpu_id: u32,
    /// Product name.
    pub name: String,
    /// Used memory in percent, with two digits.
    pub memory_usage_percent: f64,
    /// Utilization in percent.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Fields whose number is a placeholder because the device reports no value.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The body of `GET /gpu/history`: the last readings of each GPU, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = GpuHistory))]
pub struct GpuHistoryBody {
    /// Number of retained readings per GPU.
    pub max_history: usize,
    /// The GPUs, by number.
    pub gpus: Vec<GpuReadings>,
}

/// The last readings of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = HistoryOfGpu))]
pub struct GpuReadings {
    /// Number of the GPU.
    pub gpu_id: u32,
    /// Product name.
    pub name: String,
    /// Readings, oldest first.
    pub readings: Vec<PastReading>,
}

/// A past reading of a GPU. Values that the device did not report are `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PastReading {
    /// Time.
    pub timestamp: String,
    /// Memory in use, in MiB.
    pub memory_used_mb: Option<u64>,
    /// Utilization in percent.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i32>,
    /// Power drawn, in watts.
    pub power_draw_w: Option<f64>,
}

/// The body of `GET /health`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Health))]
pub struct HealthBody {
    /// `healthy`, `degraded` or `unhealthy`.
    pub status: String,
    /// Whether a source can read NVIDIA devices.
    pub nvidia_smi_available: bool,
    /// Time of the last reading.
    pub timestamp: String,
    /// Current problems, as sentences.
    pub problems: Vec<String>,
    /// Sources of readings.
    pub sources: Vec<SourceHealth>,
    /// Seconds since the last reading.
    pub reading_age_secs: Option<f64>,
    /// State of the lease store: whether grants and releases are durable.
    pub store: String,
    /// Seconds since the authority confirmed the state of the pool. The age grows while the disk hangs.
    #[serde(default)]
    pub pool_age_secs: f64,
    /// Whether every client on the network may lease (`--open`).
    pub open: bool,
    /// The version of this server.
    pub version: String,
    /// Seconds since the server started.
    pub uptime_secs: f64,
}

/// A source of readings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SourceHealth {
    /// Name of the source.
    pub name: String,
    /// Whether the source delivers readings.
    pub available: bool,
    /// Error, if the source delivers none.
    pub error: Option<String>,
}

/// The body of `GET /` for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Root))]
pub struct RootBody {
    /// Name of the service.
    pub message: String,
    /// The version of this server.
    pub version: String,
    /// Descriptions of the routes.
    pub endpoints: std::collections::BTreeMap<String, String>,
}

/// The part of `GET /config` about the filter of listed GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuFiltering {
    /// Value of `CUDA_VISIBLE_DEVICES`, or `null`.
    pub cuda_visible_devices: Option<String>,
    /// Numbers of the listed GPUs. `null` if all are listed.
    pub visible_gpu_ids: Option<Vec<u32>>,
    /// Whether the filter hides GPUs.
    pub filtering_active: bool,
    /// Number of GPUs of the machine.
    pub total_system_gpus: usize,
    /// Number of listed GPUs.
    pub visible_gpu_count: usize,
}

// Other servers write whole numbers as `40.0` or with a fraction, so both are accepted.

/// Largest number below which `f64` represents every whole number.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

/// Deserializes a number from 0 on and truncates it.
fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(from: D) -> Result<T, D::Error> {
    from.deserialize_any(WholeNumberVisitor(PhantomData))
}

/// Deserializes a temperature, rounded to the nearest degree, or `null`.
fn degrees<'de, D: Deserializer<'de>>(from: D) -> Result<Option<i32>, D::Error> {
    let number = Option::<f64>::deserialize(from)?;
    let rounded = |number: f64| {
        let fits = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number);
        if fits {
            Ok(number.round() as i32)
        } else {
            Err(D::Error::invalid_value(Unexpected::Float(number), &"degrees"))
        }
    };
    number.map(rounded).transpose()
}

struct WholeNumberVisitor<T>(PhantomData<T>);

impl<T: TryFrom<u64>> Visitor<'_> for WholeNumberVisitor<T> {
    type Value = T;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "a number from 0 on that fits {} bits", 8 * size_of::<T>())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        T::try_from(number).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        let positive = u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))?;
        self.visit_u64(positive)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        if (0.0..MAX_EXACT_INTEGER).contains(&number) {
            self.visit_u64(number as u64)
        } else {
            Err(E::invalid_value(Unexpected::Float(number), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(utilization: &str) -> Result<u32, String> {
        let text = format!(r#"{{"gpu_id":0,"name":"A","memory_usage_percent":1,"utilization_percent":{utilization}}}"#);
        serde_json::from_str::<GpuSummary>(&text).map(|gpu| gpu.utilization_percent).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_with_a_fraction_are_truncated() {
        assert_eq!(["40", "40.0", "89.6", "1e2"].map(|text| summary(text).unwrap()), [40, 40, 89, 100]);
    }

    #[test]
    fn an_invalid_number_is_refused_with_the_allowed_range() {
        for (wrong, shown) in
            [("-1", "`-1`"), ("-0.5", "`-0.5`"), ("1e300", "`1e+300`"), ("4294967296", "`4294967296`")]
        {
            let error = summary(wrong).unwrap_err();
            assert!(error.contains(shown) && error.contains("a number from 0 on that fits 32 bits"), "{error}");
        }
        for wrong in ["null", "\"40\"", "true"] {
            assert!(summary(wrong).unwrap_err().contains("a number from 0 on"), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_with_fractional_numbers_is_accepted() {
        let text = r#"{"gpu_id":0,"name":"A","memory":{"total_mb":81559.0,"used_mb":1.5,"free_mb":2.0,"usage_percent":1},
            "utilization_percent":3.7,"temperature_c":40.6,"power":{"draw_w":1,"limit_w":null}}"#;
        let gpu: GpuBody = serde_json::from_str(text).unwrap();
        let memory = (gpu.memory.total_mb, gpu.memory.used_mb, gpu.memory.free_mb);
        assert_eq!((memory, gpu.utilization_percent, gpu.temperature_c), ((81_559, 1, 2), 3, Some(41)));
        let cold = text.replace("40.6", "null");
        assert_eq!(serde_json::from_str::<GpuBody>(&cold).unwrap().temperature_c, None);
        let absurd = text.replace("40.6", "1e20");
        assert!(serde_json::from_str::<GpuBody>(&absurd).unwrap_err().to_string().contains("expected degrees"));
    }
}
