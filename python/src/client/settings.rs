//! Creation of a client from arguments, the environment and the configuration file. Arguments take precedence, and a
//! variable that an argument replaces is not validated.

use std::path::PathBuf;
use std::time::Duration;

use gpupool_client::local::LocalAgent;
use gpupool_client::{Client, ClientBuilder, ClientError, Endpoint, SecretString};
use gpupool_config::{ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig, SettingOrigin, load_config};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::exception;
use crate::conversion::to_python;

/// Arguments of a program; `None` leaves the environment's value.
#[derive(FromPyObject, Default)]
#[pyo3(from_item_all)]
pub(super) struct ClientArguments {
    service_endpoint: Option<String>,
    service_endpoints: Option<String>,
    load_balancing_strategy: Option<String>,
    memory_threshold: Option<f64>,
    utilization_threshold: Option<f64>,
    polling_interval: Option<f64>,
    worker_timeout: Option<f64>,
    request_timeout: Option<f64>,
    /// Default request timeout if neither an argument nor the environment sets it.
    usual_request_timeout: Option<f64>,
    health_check_interval: Option<f64>,
    max_retries: Option<u32>,
    stale_age: Option<f64>,
    token: Option<String>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    /// Whether to use the socket of this machine's agent if no endpoint is set.
    prefers_socket: bool,
}

impl ClientArguments {
    /// Creates the client. Reads the environment while holding the interpreter, so that it cannot change meanwhile.
    pub fn into_client(self, py: Python<'_>) -> PyResult<Client> {
        let loaded = load_settings(py, &self.replaced_variables(), false)?;
        self.build_client(&loaded).map_err(|error| exception(py, &rename_setting(error)))
    }

    fn build_client(self, loaded: &LoadedConfig) -> Result<Client, ClientError> {
        let is_timeout_set = loaded.is_set("client.endpoint_timeout");
        let mut builder = ClientBuilder::from_config(loaded)?;
        if let Some(endpoints) = self.service_endpoints {
            builder = builder.endpoints(endpoints);
        } else if let Some(endpoint) = self.service_endpoint {
            builder = builder.endpoint(endpoint);
        } else if self.prefers_socket {
            builder = builder.or_local_agent(&loaded.agent_sockets())?;
        }
        if let Some(name) = self.load_balancing_strategy {
            builder = builder.strategy(name.parse()?);
        }
        let usual_timeout = self.usual_request_timeout.filter(|_| !is_timeout_set);
        let time = |name, secs: Option<f64>| secs.map(|secs| parse_duration(name, secs)).transpose();
        let polling = time("polling_interval", self.polling_interval)?;
        let patience = time("worker_timeout", self.worker_timeout)?;
        let request_timeout = time("request_timeout", self.request_timeout.or(usual_timeout))?;
        let health_check = time("health_check_interval", self.health_check_interval)?;
        builder = set_if_given(builder, polling, ClientBuilder::polling_interval);
        builder = set_if_given(builder, patience, ClientBuilder::worker_timeout);
        builder = set_if_given(builder, request_timeout, ClientBuilder::endpoint_timeout);
        builder = set_if_given(builder, health_check, ClientBuilder::health_check_interval);
        builder = set_if_given(builder, time("stale_age", self.stale_age)?, ClientBuilder::stale_age);
        builder = set_if_given(builder, self.memory_threshold, ClientBuilder::memory_threshold);
        builder = set_if_given(builder, self.utilization_threshold, ClientBuilder::utilization_threshold);
        builder = set_if_given(builder, self.max_retries, ClientBuilder::max_retries);
        builder = set_if_given(builder, self.token.map(|token| SecretString::new(&token)), ClientBuilder::token);
        builder = set_if_given(builder, self.ca_file, ClientBuilder::ca_file);
        builder = set_if_given(builder, self.proxy, ClientBuilder::proxy);
        builder.build()
    }

    /// Returns the variables that arguments replace.
    fn replaced_variables(&self) -> Vec<&'static str> {
        let is_one_named = self.service_endpoint.is_some() || self.service_endpoints.is_some();
        let given: [(bool, &[&'static str]); 9] = [
            (is_one_named, &["GPU_SERVICE_ENDPOINT", "GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS"]),
            (self.load_balancing_strategy.is_some(), &["GPU_LOAD_BALANCING_STRATEGY"]),
            (self.memory_threshold.is_some(), &["GPU_MEMORY_THRESHOLD_PERCENT"]),
            (self.utilization_threshold.is_some(), &["GPU_UTILIZATION_THRESHOLD_PERCENT"]),
            (self.polling_interval.is_some(), &["GPU_POLLING_INTERVAL", "GPU_POLLING_INTERVAL_SECONDS"]),
            (self.request_timeout.is_some(), &["GPU_ENDPOINT_TIMEOUT"]),
            (self.max_retries.is_some(), &["GPU_ENDPOINT_MAX_RETRIES"]),
            (self.health_check_interval.is_some(), &["GPU_ENDPOINT_HEALTH_CHECK_INTERVAL"]),
            (self.ca_file.is_some(), &["GPUPOOL_CA"]),
        ];
        given.iter().filter(|(is_given, _)| *is_given).flat_map(|(_, names)| names.iter().copied()).collect()
    }
}

/// Applies a setter if there is a value.
fn set_if_given<T>(
    builder: ClientBuilder,
    value: Option<T>,
    setter: fn(ClientBuilder, T) -> ClientBuilder,
) -> ClientBuilder {
    match value {
        Some(value) => setter(builder, value),
        None => builder,
    }
}

/// Translates setting names that differ in Python.
fn rename_setting(mut error: ClientError) -> ClientError {
    if let ClientError::Setting { what, .. } = &mut error {
        *what = match *what {
            "endpoint_timeout" => "request_timeout",
            "endpoints" => "service_endpoints",
            other => other,
        };
    }
    error
}

fn parse_duration(what: &'static str, secs: f64) -> Result<Duration, ClientError> {
    Duration::try_from_secs_f64(secs).map_err(|_| ClientError::Setting {
        what,
        value: secs.to_string(),
        allowed: "a number of seconds >= 0".into(),
    })
}

fn load_settings(py: Python<'_>, without: &[&str], is_lenient: bool) -> PyResult<LoadedConfig> {
    let read = || {
        let mut inputs = ConfigInputs::from_system(FlagValues::default(), None, ConfigConsumer::Client)?;
        inputs.lenient = is_lenient;
        inputs.env.retain(|name, _| !without.contains(&name.as_str()));
        load_config(&inputs)
    };
    read().map_err(|problems| exception(py, &ClientError::Configuration(problems.to_string())))
}

/// Returns the client settings of the environment and the configuration file, with problems as warnings if lenient.
#[pyfunction]
pub(crate) fn client_settings(py: Python<'_>, is_lenient: bool) -> PyResult<Bound<'_, PyDict>> {
    let loaded = load_settings(py, &[], is_lenient)?;
    let (client, servers) = (&loaded.config.client, loaded.client_endpoints());
    let settings = PyDict::new(py);
    settings.set_item("endpoints", &servers.urls)?;
    settings.set_item("memory_threshold", client.memory_threshold_percent.as_number())?;
    settings.set_item("utilization_threshold", client.utilization_threshold_percent.as_number())?;
    settings.set_item("polling_interval", client.polling_interval.as_secs_f64())?;
    settings.set_item("load_balancing_strategy", client.load_balancing_strategy.name())?;
    settings.set_item("endpoint_timeout", client.endpoint_timeout.as_secs_f64())?;
    settings.set_item("endpoint_max_retries", client.endpoint_max_retries)?;
    settings.set_item("endpoint_health_check_interval", client.endpoint_health_check_interval.as_secs_f64())?;
    let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    settings.set_item("warnings", to_python(py, &warnings)?)?;
    Ok(settings)
}

// The agent of this machine, which leases GPUs to a program's workers.

/// Finds the agent by the environment and the configuration file, or returns the reason why there is none. `starts`
/// describes the started processes in an error.
pub(crate) async fn local_agent(starts: &'static str) -> Result<LocalAgent, String> {
    let error_text = |error: &dyn std::fmt::Display| error.to_string();
    let inputs = ConfigInputs::from_system(FlagValues::default(), None, ConfigConsumer::Client);
    let loaded = inputs.and_then(|inputs| load_config(&inputs)).map_err(|error| error_text(&error))?;
    let servers = loaded.client_endpoints();
    let urls = if servers.origin == SettingOrigin::Default { &[][..] } else { &servers.urls[..] };
    let named: Result<Vec<Endpoint>, _> = urls.iter().map(|url| Endpoint::choose(None, Some(url), None)).collect();
    let named = named.map_err(|error| error_text(&error))?;
    LocalAgent::find(named, &loaded, starts).await.map_err(|error| error_text(&error))
}
