//! JSON body of a request in MiB, seconds and fractions, and its conversion to a [`Request`] or to an error that names
//! the field.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::Vendor;
use crate::ids::{GpuId, Labels};
use crate::plain_text::check_plain_text;
use crate::request::{
    DeviceSelector, FieldError, IsolationLevel, LoadThresholds, PlacementStrategy, Request, RequestedAmount,
};
use crate::units::{Bytes, MilliCpus, Millis, Percent, Share};

/// Body of `POST /v1/leases`. Every field is optional.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RequestBody {
    /// Number of GPUs, all on one node. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u16>,
    /// Fraction of each GPU, 0.001..=1.0; policies may set a higher minimum. Default: all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Memory of each GPU, in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Whether to take an equal share of a shared GPU if no amount is given.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sharing: bool,
    /// `none`, `time-slicing`, `mps` or `mig`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// Name of a placement strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// Foreign memory in percent at which a device is no longer eligible. Default: 80.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_threshold: Option<f64>,
    /// Foreign utilization in percent at which a device is no longer eligible. Default: 90.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_threshold: Option<f64>,
    /// Selector of eligible devices.
    #[serde(skip_serializing_if = "SelectBody::is_empty")]
    pub select: SelectBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Host memory in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory_mib: Option<u64>,
    /// Owner of the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Arc<str>>,
    /// The owner's name for the worker that uses the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Labels::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = std::collections::BTreeMap<String, String>))]
    pub labels: Labels,
    /// Priority; higher goes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Whether the request may wait. Default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<bool>,
    /// Time within which the server must respond; the pool ignores it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_secs: Option<f64>,
    /// Longest time in the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_limit_secs: Option<f64>,
    /// Life of the lease without a renewal. Default: 60.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_secs: Option<f64>,
    /// Longest time that the lease may be held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_duration_secs: Option<f64>,
    /// Whether the client waits at several servers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hedged: bool,
}

/// Selector of eligible devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SelectBody {
    /// Only devices of this vendor: `nvidia`, `amd`, `intel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub vendor: Option<Vendor>,
    /// Only this model, or any of these models.
    #[serde(skip_serializing_if = "OneOrMany::is_empty")]
    pub model: OneOrMany,
    /// Only devices with at least this much memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_memory_mib: Option<u64>,
    /// Only devices with these numbers on their node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<u32>))]
    pub gpu_ids: Vec<GpuId>,
    /// Only devices with these UUIDs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uuids: Vec<Arc<str>>,
    /// Only devices with these labels.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = std::collections::BTreeMap<String, String>))]
    pub labels: Labels,
}

impl SelectBody {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One name or several names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum OneOrMany {
    One(Arc<str>),
    Many(Vec<Arc<str>>),
}

impl Default for OneOrMany {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl OneOrMany {
    fn is_empty(&self) -> bool {
        matches!(self, Self::Many(names) if names.is_empty())
    }

    fn into_vec(self) -> Vec<Arc<str>> {
        match self {
            Self::One(name) => vec![name],
            Self::Many(names) => names,
        }
    }
}

impl TryFrom<RequestBody> for Request {
    type Error = FieldError;

    fn try_from(body: RequestBody) -> Result<Self, FieldError> {
        check_names(&body)?;
        let (defaults, thresholds) = (Self::default(), LoadThresholds::default());
        let request = Self {
            gpus: body.gpus.unwrap_or(1),
            amount: amount(body.fraction, body.memory_mib, body.sharing)?,
            isolation: body.isolation.as_deref().map_or(Ok(IsolationLevel::None), str::parse)?,
            strategy: body.strategy.as_deref().map(str::parse::<PlacementStrategy>).transpose()?,
            thresholds: Some(LoadThresholds {
                memory: percent("memory_threshold", body.memory_threshold, thresholds.memory)?,
                utilization: percent("utilization_threshold", body.utilization_threshold, thresholds.utilization)?,
            }),
            select: Arc::new(DeviceSelector {
                vendor: body.select.vendor,
                models: body.select.model.into_vec(),
                min_memory: body.select.min_memory_mib.map(|n| mib("select.min_memory_mib", n)).transpose()?,
                gpu_ids: body.select.gpu_ids,
                uuids: body.select.uuids,
                labels: body.select.labels,
            }),
            cpus: cpus(body.cpus)?,
            host_memory: body.host_memory_mib.map_or(Ok(Bytes::ZERO), |n| mib("host_memory_mib", n))?,
            owner: body.owner.unwrap_or(defaults.owner),
            requested_by: None,
            worker_id: body.worker_id,
            labels: Arc::new(body.labels),
            priority: body.priority.unwrap_or(0),
            queue: body.queue.unwrap_or(true),
            wait_limit: body.wait_limit_secs.map(|n| secs("wait_limit_secs", n)).transpose()?,
            ttl: body.ttl_secs.map_or(Ok(defaults.ttl), |n| secs("ttl_secs", n))?,
            max_duration: body.max_duration_secs.map(|n| secs("max_duration_secs", n)).transpose()?,
            hedged: body.hedged,
        };
        request.validate()?;
        Ok(request)
    }
}

/// Refuses names that a terminal, a log or a page would not show as they are.
fn check_names(body: &RequestBody) -> Result<(), FieldError> {
    let names = [("owner", body.owner.as_deref()), ("worker_id", body.worker_id.as_deref())];
    let names = names.into_iter().filter_map(|(field, name)| Some((field, name?)));
    let labels = body.labels.iter().flat_map(|(key, value)| [("labels", &**key), ("labels", &**value)]);
    names.chain(labels).try_for_each(|(field, name)| check_plain_text(field, name))
}

/// Returns the amount that a fraction, MiB and sharing describe together.
pub fn amount(fraction: Option<f64>, memory_mib: Option<u64>, sharing: bool) -> Result<RequestedAmount, FieldError> {
    let share = |fraction: f64| {
        Share::from_fraction(fraction)
            .ok_or_else(|| FieldError::new("fraction", fraction, "a number from 0.001 to 1.0"))
    };
    let memory =
        |n: u64| if n == 0 { Err(FieldError::new("memory_mib", n, "at least 1")) } else { mib("memory_mib", n) };
    Ok(match (fraction, memory_mib) {
        (None, None) if sharing => RequestedAmount::Shared,
        (None, None) => RequestedAmount::Whole,
        (Some(fraction), None) => match share(fraction)? {
            Share::WHOLE => RequestedAmount::Whole,
            part => RequestedAmount::Share(part),
        },
        (None, Some(n)) => RequestedAmount::Memory(memory(n)?),
        (Some(fraction), Some(n)) => RequestedAmount::Both(share(fraction)?, memory(n)?),
    })
}

fn mib(field: &'static str, n: u64) -> Result<Bytes, FieldError> {
    Bytes::from_mib(n).ok_or_else(|| FieldError::new(field, n, "at most 17592186044415"))
}

fn percent(field: &'static str, given: Option<f64>, default: Percent) -> Result<Percent, FieldError> {
    given.map_or(Ok(default), |n| {
        Percent::from_number(n).ok_or_else(|| FieldError::new(field, n, "a number from 0 to 100"))
    })
}

fn secs(field: &'static str, n: f64) -> Result<Millis, FieldError> {
    if (0.0..=3.2e9).contains(&n) {
        Ok(Millis((n * 1000.0).round() as u64))
    } else {
        Err(FieldError::new(field, n, "a number of seconds from 0 to 3.2e9"))
    }
}

fn cpus(given: Option<f64>) -> Result<MilliCpus, FieldError> {
    match given {
        None => Ok(MilliCpus::ZERO),
        Some(n) if (0.0..=1e9).contains(&n) => Ok(MilliCpus((n * 1000.0).round() as u64)),
        Some(n) => Err(FieldError::new("cpus", n, "a number from 0 to 1e9")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Request, String> {
        let body: RequestBody = serde_json::from_str(json).map_err(|e| e.to_string())?;
        Request::try_from(body).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_body_is_one_whole_gpu_with_the_default_thresholds() {
        let request = parse("{}").unwrap();
        assert_eq!((request.gpus, request.amount), (1, RequestedAmount::Whole));
        assert_eq!(request.thresholds, Some(LoadThresholds::default()));
        assert!(request.queue);
    }

    #[test]
    fn fraction_and_memory_may_be_given_together() {
        let request = parse(r#"{"fraction":0.5,"memory_mib":4000}"#).unwrap();
        assert_eq!(request.amount, RequestedAmount::Both(Share(500), Bytes::from_mib(4000).unwrap()));
    }

    #[test]
    fn an_error_names_the_field_its_value_and_the_allowed_values() {
        for (json, field, value) in [
            (r#"{"fraction":1.5}"#, "fraction", "1.5"),
            (r#"{"memory_mib":0}"#, "memory_mib", "0"),
            (r#"{"memory_threshold":101}"#, "memory_threshold", "101"),
            (r#"{"isolation":"jail"}"#, "isolation", "jail"),
            (r#"{"strategy":"luck"}"#, "strategy", "luck"),
            (r#"{"ttl_secs":0}"#, "ttl_secs", "0"),
            (r#"{"gpus":1000}"#, "gpus", "1000"),
            (r#"{"priority":-2147483648}"#, "priority", "-2147483648"),
            (r#"{"cpus":-1}"#, "cpus", "-1"),
            (r#"{"host_memory_mib":18446744073709551615}"#, "host_memory_mib", "18446744073709551615"),
            (r#"{"wait_limit_secs":-3}"#, "wait_limit_secs", "-3"),
        ] {
            let error = parse(json).unwrap_err();
            assert!(error.starts_with(field) && error.contains(value) && error.contains("must be"), "{json}: {error}");
        }
        assert!(parse(r#"{"fractoin":0.5}"#).unwrap_err().contains("fractoin"));
    }

    #[test]
    fn a_model_may_be_one_name_or_several() {
        let one = parse(r#"{"select":{"model":"H100"}}"#).unwrap();
        let many = parse(r#"{"select":{"model":["H100","A100"]}}"#).unwrap();
        assert_eq!((one.select.models.len(), many.select.models.len()), (1, 2));
    }
}
