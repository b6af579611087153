//! What `GET /config` tells of the settings, in the field names published clients know.

use serde::Serialize;

use crate::settings::Config;

/// The parts of `/config` that come from settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContractConfig {
    /// How the server runs.
    pub server: ContractServer,
    /// How the API is presented.
    pub api: ContractApi,
    /// How GPUs are read.
    pub monitoring: ContractMonitoring,
}

/// How the server runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContractServer {
    /// Address it listens on.
    pub host: String,
    /// Port it really listens on.
    pub port: u16,
    /// Accepted, does nothing.
    pub reload: bool,
    /// How much is logged.
    pub log_level: &'static str,
    /// Whether each request is logged.
    pub access_log: bool,
    /// Accepted, does nothing.
    pub workers: u32,
}

/// How the API is presented.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContractApi {
    /// Its title.
    pub title: String,
    /// The version of the program.
    pub version: String,
    /// Where Swagger UI is.
    pub docs_url: String,
    /// Where ReDoc is.
    pub redoc_url: String,
    /// Whether web pages of other sites may read statistics.
    pub enable_cors: bool,
    /// Put before every route.
    pub api_prefix: String,
}

/// How GPUs are read.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContractMonitoring {
    /// Seconds between two readings.
    pub refresh_interval: f64,
    /// Readings kept of each GPU.
    pub max_history: u32,
}

impl Config {
    /// What `/config` tells; `port` is the one really listened on, `version` the program's.
    pub fn to_contract_config(&self, port: u16, version: &str) -> ContractConfig {
        let (server, api) = (&self.server, &self.api);
        ContractConfig {
            server: ContractServer {
                host: server.host.clone(),
                port,
                reload: server.reload,
                log_level: server.log_level.name(),
                access_log: server.access_log,
                workers: server.workers,
            },
            api: ContractApi {
                title: api.title.clone(),
                version: version.to_owned(),
                docs_url: api.docs_url.clone(),
                redoc_url: api.redoc_url.clone(),
                enable_cors: api.enable_cors,
                api_prefix: api.api_prefix.clone(),
            },
            monitoring: ContractMonitoring {
                refresh_interval: self.monitoring.refresh_interval.as_secs_f64(),
                max_history: self.monitoring.max_history,
            },
        }
    }
}
