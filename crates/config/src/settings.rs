//! The table of settings; every setting is declared here once.
//!
//! One row defines the field of the configuration, its key in the file, its variables, its flag with help, the allowed
//! values, the default, the row of the documentation, and whether SIGHUP can change it.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use gpupool_core::{Percent, Policies, QueueOrder, limits::DEFAULT_TTL, limits::MAX_TTL};

use serde_json::Value as Json;

use crate::load::Resolver;
use crate::machine::HostContext;
use crate::value::*;

/// Names, allowed values and meaning of one setting.
#[derive(Debug)]
pub struct Setting {
    /// Section and key in the file, such as `server.port`.
    pub key: &'static str,
    /// Environment variables; the first one that is set wins.
    pub env: &'static [&'static str],
    /// Flag of the command line, with dashes.
    pub flag: Option<&'static str>,
    /// Name of the flag's value in help; `None` for a switch.
    pub value_name: Option<&'static str>,
    /// Whether SIGHUP changes it in a running agent.
    pub live: bool,
    /// Whether the value is never shown.
    pub secret: bool,
    /// Description of the allowed values.
    pub allowed: String,
    /// Default value, as shown in help and documentation.
    pub default: Json,
    /// Description; the first sentence stands alone in short help.
    pub meaning: &'static str,
}

impl Setting {
    /// Returns the section of the file.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// Returns the key within the section.
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Returns the first sentence of the meaning and the default, for short help.
    pub fn help(&self) -> String {
        let first = self.meaning.split_once(". ").map_or(self.meaning, |(first, _)| first);
        first.trim_end_matches('.').to_owned() + &self.default_text()
    }

    /// Returns the whole meaning, the default and the allowed values, for long help.
    pub fn long_help(&self) -> String {
        let allowed = self.value_name.map(|_| format!("\n\nAllowed: {}", self.allowed)).unwrap_or_default();
        format!("{}{}{allowed}", self.meaning.trim_end_matches('.'), self.default_text())
    }

    fn default_text(&self) -> String {
        match &self.default {
            Json::Null | Json::Bool(false) | Json::Array(_) => String::new(),
            Json::String(text) if text.is_empty() => String::new(),
            Json::String(text) => format!(" [default: {text}]"),
            other => format!(" [default: {other}]"),
        }
    }

    /// Finds the setting with this flag or key.
    pub fn find(name: &str) -> Option<&'static Self> {
        all_settings().iter().find(|setting| setting.key == name || setting.flag == Some(name))
    }
}

/// Declares sections of settings. A row reads `name: Type = default, kind => env "A" "ALIAS" flag "--x" VALUE [live];`.
macro_rules! settings {
    ($machine:ident; $(
        $(#[doc = $about:literal])+
        $section:ident: $Section:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $type:ty = $default:expr, $kind:expr
                    => $(env $($env:literal)+)? $(flag $flag:literal $($value_name:ident)?)? $([$live:ident])?;
            )+
        }
    )+) => {
        $(
            $(#[doc = $about])+
            #[derive(Debug, Clone, PartialEq)]
            pub struct $Section {
                $($(#[doc = $doc])+ pub $field: $type),+
            }
        )+

        /// All settings, by section.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $($(#[doc = $about])+ pub $section: $Section,)+
            /// Policies, quotas and queue order, as used by the pool.
            pub policies: Policies,
        }

        impl Config {
            pub(crate) fn resolve(from: &mut Resolver<'_>) -> Self {
                let $machine = from.host_context();
                let mut config = Self {
                    $($section: $Section {
                        $($field: from.pick(concat!(stringify!($section), ".", stringify!($field)), &$kind, $default)),+
                    },)+
                    policies: Policies::default(),
                };
                config.policies = crate::policies::read_rules(from, &config.queue, config.quota.period);
                config
            }
        }

        /// Returns all settings, in the order of the sections.
        pub fn all_settings() -> &'static [Setting] {
            static ALL: LazyLock<Vec<Setting>> = LazyLock::new(|| {
                let $machine = &HostContext::for_documentation();
                vec![$($({
                let kind: ValueKind<$type> = $kind;
                Setting {
                    key: concat!(stringify!($section), ".", stringify!($field)),
                    env: &[$($($env),+)?],
                    flag: settings!(@optional $($flag)?),
                    value_name: settings!(@optional $($(stringify!($value_name))?)?),
                    live: settings!(@is $($live)?),
                    secret: kind.secret,
                    default: (kind.show)(&$default),
                    allowed: kind.allowed,
                    meaning: concat!($($doc),+).trim_ascii(),
                }
            }),+),+]
            });
            &ALL
        }

        /// Sections and their descriptions.
        pub const SECTIONS: &[(&str, &str)] = &[$((stringify!($section), concat!($($about),+))),+];
    };
    (@optional) => { None };
    (@optional $given:expr) => { Some($given) };
    (@is) => { false };
    (@is live) => { true };
}

settings! { machine;
    /// Listening addresses, state, logging and access of the agent.
    server: ServerSettings {
        /// Address to listen on, in addition to the Unix socket. An address other than loopback also serves the
        /// network: any client can read; leases need a token.
        host: String = "127.0.0.1".into(), host() => env "HOST" flag "--host" HOST;
        /// Port to listen on; 0 selects a free port.
        port: u16 = 8000, whole(0..=65_535) => env "PORT" flag "--port" PORT;
        /// Directory of the database, the lock and the Unix socket `agent.sock`. Users other
        /// than root have the default `$XDG_STATE_HOME/gpupool` or `~/.local/state/gpupool`.
        state_dir: PathBuf = machine.state_dir(), path() => env "GPUPOOL_STATE_DIR" flag "--state-dir" DIR;
        /// Log level.
        log_level: LogLevel = LogLevel::Info, LogLevel::kind() => env "LOG_LEVEL" flag "--log-level" LEVEL [live];
        /// Log format: text lines or JSON objects.
        log_format: LogFormat = LogFormat::Text, LogFormat::kind() => env "LOG_FORMAT" flag "--log-format" FORMAT;
        /// Whether to log each HTTP request.
        access_log: bool = true, boolean() => env "ACCESS_LOG" flag "--access-log" YES;
        /// Accepted and reported for compatibility; has no effect.
        reload: bool = false, boolean() => env "RELOAD";
        /// Accepted and reported for compatibility; has no effect.
        workers: u32 = 1, whole(1..=1_024) => env "WORKERS";
        /// Let every client that can reach the agent acquire and release leases without a token. Use it on trusted
        /// networks only.
        open: bool = false, boolean() => flag "--open";
        /// Accept tokens over the network without TLS, readable for anyone on the path.
        allow_plain_http: bool = false, boolean() => flag "--allow-plain-http";
        /// Certificate chain in PEM form; enables TLS on the network.
        tls_cert: Option<PathBuf> = None, optional(path()) => flag "--tls-cert" FILE [live];
        /// Private key of the certificate in PEM form.
        tls_key: Option<PathBuf> = None, optional(path()) => flag "--tls-key" FILE [live];
        /// Additional host names that browsers may use, such as that of a reverse proxy.
        allowed_hosts: Vec<String> = Vec::new(), list(host()) =>;
        /// Permission bits of the Unix socket; only users with write permission can connect.
        socket_mode: FileMode = FileMode(0o666), file_mode() =>;
        /// Name of this node in responses, metrics and the dashboard.
        node_name: String = machine.host_name.clone(), name() => flag "--node-name" NAME;
        /// Maximum time for running requests to finish when the agent stops.
        shutdown_grace_secs: Duration = Duration::from_secs(10), seconds(0.0..=3_600.0) =>;
    }

    /// Statistics API.
    api: ApiSettings {
        /// Title of the API documentation.
        title: String = "gpupool".into(), short_text() =>;
        /// Path of Swagger UI.
        docs_url: String = "/docs".into(), url_path() => env "DOCS_URL";
        /// Path of ReDoc.
        redoc_url: String = "/redoc".into(), url_path() => env "REDOC_URL";
        /// Whether web pages of other sites can read statistics.
        enable_cors: bool = true, boolean() => env "ENABLE_CORS";
        /// Prefix of every route.
        api_prefix: String = String::new(), url_prefix() => env "API_PREFIX";
    }

    /// Reading of GPUs.
    monitoring: MonitoringSettings {
        /// Time between two readings.
        refresh_interval: Duration = Duration::from_secs(1), seconds(0.05..=3_600.0)
            => env "REFRESH_INTERVAL" flag "--refresh-interval" SECONDS;
        /// Number of readings kept per GPU.
        max_history: u32 = 100, whole(0..=100_000) => env "MAX_HISTORY";
        /// GPUs that the agent manages; not set means all, empty means none.
        cuda_visible_devices: Option<String> = None, optional(visible_devices()) => env "CUDA_VISIBLE_DEVICES";
        /// Source of readings: the best of each vendor, one vendor, or one source.
        backend: String = "auto".into(), backend() => env "GPUPOOL_BACKEND" flag "--backend" BACKEND;
        /// Simulate GPUs instead of using real ones, such as 4xH100.
        simulate: Option<String> = None, optional(simulated_devices()) => flag "--simulate" DEVICES;
    }

    /// Lifetime and end of leases.
    leases: LeaseSettings {
        /// Lifetime of a lease without a renewal, if the request names none.
        default_ttl_secs: Duration = Duration::from_millis(DEFAULT_TTL.0), seconds(1.0..=86_400.0) =>;
        /// Maximum lifetime without a renewal that a request can name.
        max_ttl_secs: Duration = Duration::from_millis(MAX_TTL.0), seconds(1.0..=86_400.0) =>;
        /// Time for the holder of a lease to reconnect after its connection breaks.
        hold_grace_secs: Duration = Duration::from_secs(10), seconds(0.0..=3_600.0) =>;
        /// Time for the processes of an ended lease to exit before the GPU is quarantined.
        drain_patience_secs: Duration = Duration::from_secs(30), seconds(0.0..=3_600.0) =>;
        /// Maximum number of waiting requests per owner.
        waiters_per_owner: u32 = 16_384, whole(1..=1_000_000) =>;
        /// Days to keep the audit trail; 0 keeps all of it.
        history_retention_days: u32 = 90, whole(0..=36_500) =>;
    }

    /// Limits on clients.
    limits: LimitSettings {
        /// Maximum number of open connections.
        connections: u32 = 16_384, whole(1..=1_000_000) =>;
        /// Maximum size of a request body.
        body_bytes: u64 = 262_144, whole(1_024..=67_108_864) =>;
        /// Maximum time for the header of a request to arrive.
        header_secs: Duration = Duration::from_secs(10), seconds(0.1..=600.0) =>;
        /// Maximum time for a whole request to arrive, without the time to respond.
        request_secs: Duration = Duration::from_secs(30), seconds(0.1..=3_600.0) =>;
    }

    /// Order of the queue.
    queue: QueueSettings {
        /// Order of waiting requests: by arrival, or the owner with the least use per weight first.
        order: QueueOrder = QueueOrder::Fifo, queue_order() => [live];
        /// Waiting time that raises the priority of a request by 1, up to the highest `max_priority` of all policies; 0 for
        /// never.
        ageing_step: Duration = Duration::from_millis(Policies::default().ageing_step.0), seconds(0.0..=31_536_000.0)
            => [live];
    }

    /// Quotas of owners; see below.
    quota: QuotaSettings {
        /// Period over which GPU-hours are counted.
        period: Duration = Duration::from_millis(Policies::default().period.0), seconds(60.0..=31_536_000.0) => [live];
    }

    /// Endpoints and behaviour of clients. Used by every command except `serve`.
    client: ClientSettings {
        /// Endpoint to use. If none is set: the Unix socket of this machine's agent, then `http://localhost:8000`.
        endpoint: Option<String> = None, optional(endpoint()) => env "GPU_SERVICE_ENDPOINT" flag "--endpoint" URL;
        /// Several endpoints; they take precedence over a single endpoint from the same source.
        endpoints: Vec<String> = Vec::new(), list(endpoint())
            => env "GPU_STATS_SERVICE_ENDPOINTS" "GPU_SERVICE_ENDPOINTS";
        /// Token for endpoints on the network.
        token: Option<SecretString> = None, optional(secret()) => env "GPUPOOL_TOKEN";
        /// CA certificates in PEM form, trusted in addition to the system's.
        ca_file: Option<PathBuf> = None, optional(path()) => env "GPUPOOL_CA" flag "--ca-file" FILE;
        /// Memory use, in percent, from which a GPU is not available.
        memory_threshold_percent: Percent = Percent(80_000), percent() => env "GPU_MEMORY_THRESHOLD_PERCENT";
        /// Utilization, in percent, from which a GPU is not available.
        utilization_threshold_percent: Percent = Percent(90_000), percent() => env "GPU_UTILIZATION_THRESHOLD_PERCENT";
        /// Time between two polls of the statistics.
        polling_interval: Duration = Duration::from_secs(5), seconds(0.05..=3_600.0)
            => env "GPU_POLLING_INTERVAL" "GPU_POLLING_INTERVAL_SECONDS";
        /// Strategy to choose one of several endpoints.
        load_balancing_strategy: Balancing = Balancing::Availability, Balancing::kind()
            => env "GPU_LOAD_BALANCING_STRATEGY";
        /// Maximum time for a response.
        endpoint_timeout: Duration = Duration::from_secs(10), seconds(0.05..=3_600.0) => env "GPU_ENDPOINT_TIMEOUT";
        /// Number of retries of a failed call.
        endpoint_max_retries: u32 = 3, whole(0..=100) => env "GPU_ENDPOINT_MAX_RETRIES";
        /// Time between two health checks of an endpoint.
        endpoint_health_check_interval: Duration = Duration::from_secs(30), seconds(0.05..=86_400.0)
            => env "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL";
    }
}
