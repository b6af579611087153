//! The statistics routes: what a node's GPUs report.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The body of `GET /gpu/stats`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Stats))]
pub struct StatsBody {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// The GPUs, by number.
    pub gpus: Vec<GpuBody>,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Gpu))]
pub struct GpuBody {
    /// Its small number on this node, the same after a restart.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory: GpuMemory,
    /// How busy it is; 0 and named under `unsupported` where it cannot tell.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Temperature of the chip.
    #[serde(default, deserialize_with = "degrees")]
    pub temperature_c: Option<i32>,
    /// Electrical power.
    pub power: GpuPower,
    /// The vendor's identity of it.
    #[serde(default)]
    pub uuid: Option<String>,
    /// `nvidia`, `amd`, `intel` or `other`.
    #[serde(default)]
    pub vendor: String,
    /// `healthy`, `unhealthy` or `lost`.
    #[serde(default)]
    pub health: String,
    /// Why it is not healthy.
    #[serde(default)]
    pub health_reason: Option<String>,
    /// Whether what is said of it is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// When it was read.
    #[serde(default)]
    pub timestamp: String,
    /// Asleep to save power, and therefore not read: reading would wake it.
    #[serde(default)]
    pub asleep: bool,
    /// Fields of it that have no value, though the form of this answer has a number there.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The memory of a GPU, in MiB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuMemory {
    /// All of it.
    #[serde(deserialize_with = "whole")]
    pub total_mb: u64,
    /// In use by programs, without what the driver keeps.
    #[serde(deserialize_with = "whole")]
    pub used_mb: u64,
    /// Neither in use nor kept by the driver: total − used − reserved.
    #[serde(deserialize_with = "whole")]
    pub free_mb: u64,
    /// In use by programs, in percent of all of it, with two digits.
    pub usage_percent: f64,
    /// What the driver keeps for itself; `null` where it does not tell.
    #[serde(default)]
    pub reserved_mb: Option<u64>,
    /// Host memory it may use besides (the real memory of a GPU that is a part of a processor).
    #[serde(default)]
    pub host_total_mb: Option<u64>,
    /// What it uses of that.
    #[serde(default)]
    pub host_used_mb: Option<u64>,
}

/// The power of a GPU, in watts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuPower {
    /// Drawn now.
    pub draw_w: Option<f64>,
    /// The most it may draw.
    pub limit_w: Option<f64>,
}

/// The body of `GET /gpu/count`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Count))]
pub struct GpuCountBody {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// The body of `GET /gpu/summary`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Summary))]
pub struct SummaryBody {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// Memory of all of them, in MiB; a GPU that is listed with its parts counts once.
    #[serde(deserialize_with = "whole")]
    pub total_memory_mb: u64,
    /// Memory in use on all of them, in MiB.
    #[serde(deserialize_with = "whole")]
    pub total_used_memory_mb: u64,
    /// Memory in use, in percent with two digits.
    pub total_memory_usage_percent: f64,
    /// Utilization of those that can tell it, on average.
    pub average_utilization_percent: f64,
    /// Over how many GPUs that average is; with none it says nothing.
    #[serde(default)]
    pub average_over: usize,
    /// The GPUs, by number.
    pub gpus_summary: Vec<GpuSummary>,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// One GPU in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuSummary {
    /// Its number.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Memory in use, in percent with two digits.
    pub memory_usage_percent: f64,
    /// How busy it is.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Fields of it that have no value, though the form of this answer has a number there.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The body of `GET /gpu/history`: the last readings of each GPU, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = GpuHistory))]
pub struct GpuHistoryBody {
    /// How many readings of a GPU are kept.
    pub max_history: usize,
    /// The GPUs, by number.
    pub gpus: Vec<GpuReadings>,
}

/// The last readings of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = HistoryOfGpu))]
pub struct GpuReadings {
    /// Its number.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Its readings, oldest first.
    pub readings: Vec<PastReading>,
}

/// What a GPU read at a time; `null` is what it could not tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PastReading {
    /// When.
    pub timestamp: String,
    /// Memory in use, in MiB.
    pub memory_used_mb: Option<u64>,
    /// How busy it was.
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
    /// Whether NVIDIA devices can be read, by whatever source.
    pub nvidia_smi_available: bool,
    /// When the last reading was taken.
    pub timestamp: String,
    /// What is wrong, for people; empty where nothing is.
    pub problems: Vec<String>,
    /// Where readings come from.
    pub sources: Vec<SourceHealth>,
    /// Seconds since the last reading.
    pub reading_age_secs: Option<f64>,
    /// Whether leases can be granted and given back durably.
    pub store: String,
    /// Seconds since the authority last confirmed the state of the pool; it grows while the disk hangs.
    #[serde(default)]
    pub pool_age_secs: f64,
    /// Whether anybody on the network may lease.
    pub open: bool,
    /// The version of this server.
    pub version: String,
    /// Seconds since it started.
    pub uptime_secs: f64,
}

/// A source of readings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SourceHealth {
    /// Its name.
    pub name: String,
    /// Whether it answers.
    pub available: bool,
    /// Why it does not.
    pub error: Option<String>,
}

/// The body of `GET /` for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Root))]
pub struct RootBody {
    /// What this is.
    pub message: String,
    /// The version of this server.
    pub version: String,
    /// What can be asked, by route.
    pub endpoints: std::collections::BTreeMap<String, String>,
}

/// The part of `GET /config` that is about which GPUs are listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuFiltering {
    /// The filter as given; `null` where none is.
    pub cuda_visible_devices: Option<String>,
    /// The GPUs that are listed; `null` where all are.
    pub visible_gpu_ids: Option<Vec<u32>>,
    /// Whether GPUs are left out.
    pub filtering_active: bool,
    /// How many GPUs there are.
    pub total_system_gpus: usize,
    /// How many are listed.
    pub visible_gpu_count: usize,
}

// Whole numbers as other servers write them: some send `40.0`, or a fraction, where ours send `40`.

/// Beyond this a `f64` does not tell whole numbers apart.
const MOST: f64 = 9_007_199_254_740_992.0;

/// A number from 0 on; what it has beyond the whole is cut off.
fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(from: D) -> Result<T, D::Error> {
    from.deserialize_any(Whole(PhantomData))
}

/// Degrees, to the nearest one, or `null`.
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

struct Whole<T>(PhantomData<T>);

impl<T: TryFrom<u64>> Visitor<'_> for Whole<T> {
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
        if (0.0..MOST).contains(&number) {
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
    fn numbers_with_a_fraction_are_taken_and_cut() {
        assert_eq!(["40", "40.0", "89.6", "1e2"].map(|text| summary(text).unwrap()), [40, 40, 89, 100]);
    }

    #[test]
    fn what_is_no_number_from_0_on_is_refused_with_what_is_allowed() {
        for (wrong, said) in [("-1", "`-1`"), ("-0.5", "`-0.5`"), ("1e300", "`1e+300`"), ("4294967296", "`4294967296`")]
        {
            let error = summary(wrong).unwrap_err();
            assert!(error.contains(said) && error.contains("a number from 0 on that fits 32 bits"), "{error}");
        }
        for wrong in ["null", "\"40\"", "true"] {
            assert!(summary(wrong).unwrap_err().contains("a number from 0 on"), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_with_fractions_everywhere_is_taken() {
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
