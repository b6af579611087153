//! The table of settings: each is declared here and nowhere else.
//!
//! From one row come the field of the configuration, its key in the file, its variables, its flag with the help of the command
//! line, what is allowed, its default, the row of the documentation, and whether SIGHUP can change it.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use gpupool_core::{Percent, Policies, QueueOrder, limits::DEFAULT_TTL, limits::MAX_TTL};

use crate::load::Resolver;
use crate::value::*;

/// One setting: its names, and the values it may have.
#[derive(Debug)]
pub struct Setting {
    /// Section and key in the file: `server.port`.
    pub key: &'static str,
    /// The variables it is read from; the first that is set wins.
    pub env: &'static [&'static str],
    /// The flag of the command line, dashes included.
    pub flag: Option<&'static str>,
    /// The name of the flag's value in help texts; a flag without one is a switch.
    pub value_name: Option<&'static str>,
    /// Whether a running agent takes a change of it on SIGHUP.
    pub live: bool,
    /// Whether it is never shown.
    pub secret: bool,
    /// The values it may have, in words.
    pub allowed: String,
    /// Sentences for documentation and help.
    pub meaning: &'static str,
}

impl Setting {
    /// The section of the file it stands in.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// Its key within the section.
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Its meaning as command lines show it: without the last full stop.
    pub fn help(&self) -> &'static str {
        self.meaning.trim_end_matches('.')
    }

    /// The setting that a flag sets, or that has this key.
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

        /// Everything that can be set, section by section.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $($(#[doc = $about])+ pub $section: $Section,)+
            /// Policies, quotas and the order of the queue, as the pool takes them.
            pub policies: Policies,
        }

        impl Config {
            pub(crate) fn resolve(from: &mut Resolver<'_>) -> Self {
                let $machine = from.machine();
                let mut config = Self {
                    $($section: $Section {
                        $($field: from.pick(concat!(stringify!($section), ".", stringify!($field)), &$kind, $default)),+
                    },)+
                    policies: Policies::default(),
                };
                config.policies = crate::policies::read(from, config.queue.order, config.quota.period);
                config
            }
        }

        /// Every setting there is, in the order of the sections.
        pub fn all_settings() -> &'static [Setting] {
            static ALL: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![$($({
                let kind: Kind<$type> = $kind;
                Setting {
                    key: concat!(stringify!($section), ".", stringify!($field)),
                    env: &[$($($env),+)?],
                    flag: settings!(@optional $($flag)?),
                    value_name: settings!(@optional $($(stringify!($value_name))?)?),
                    live: settings!(@is $($live)?),
                    secret: kind.secret,
                    allowed: kind.allowed,
                    meaning: concat!($($doc),+).trim_ascii(),
                }
            }),+),+]);
            &ALL
        }

        /// Every section of settings and what it is about.
        pub const SECTIONS: &[(&str, &str)] = &[$((stringify!($section), concat!($($about),+))),+];
    };
    (@optional) => { None };
    (@optional $given:expr) => { Some($given) };
    (@is) => { false };
    (@is live) => { true };
}

settings! { machine;
    /// Where the agent listens, where it keeps its state, what it logs and whom it lets in.
    server: ServerSettings {
        /// Address to listen on in addition to the Unix socket. Anything but loopback opens the agent to the network:
        /// anyone may read, holders of a token may lease.
        host: String = "127.0.0.1".into(), host() => env "HOST" flag "--host" HOST;
        /// Port to listen on; 0 takes any free one.
        port: u16 = 8000, whole(0..=65_535) => env "PORT" flag "--port" PORT;
        /// Directory of the database, the lock and the Unix socket `agent.sock`. For a user who is not root the default
        /// is `$XDG_STATE_HOME/gpupool`, else `~/.local/state/gpupool`.
        state_dir: PathBuf = machine.state_dir(), path() => env "GPUPOOL_STATE_DIR" flag "--state-dir" DIR;
        /// How much is logged.
        log_level: LogLevel = LogLevel::Info, LogLevel::kind() => env "LOG_LEVEL" flag "--log-level" LEVEL [live];
        /// Log lines for people or for programs.
        log_format: LogFormat = LogFormat::Text, LogFormat::kind() => env "LOG_FORMAT" flag "--log-format" FORMAT;
        /// Whether each HTTP request is logged.
        access_log: bool = true, boolean() => env "ACCESS_LOG" flag "--access-log" YES;
        /// Accepted and reported for programs that set it; does nothing.
        reload: bool = false, boolean() => env "RELOAD";
        /// Accepted and reported for programs that set it; does nothing.
        workers: u32 = 1, whole(1..=1_024) => env "WORKERS";
        /// Lets anyone who can reach the agent take and release GPUs, without a token. For a trusted network only.
        open: bool = false, boolean() => flag "--open";
        /// Accepts tokens over the network without TLS, readable for whoever listens in.
        allow_plain_http: bool = false, boolean() => flag "--allow-plain-http";
        /// Certificate chain in PEM form; with it the network is answered over TLS.
        tls_cert: Option<PathBuf> = None, optional(path()) => flag "--tls-cert" FILE [live];
        /// Private key of the certificate in PEM form.
        tls_key: Option<PathBuf> = None, optional(path()) => flag "--tls-key" FILE [live];
        /// Additional host names by which browsers may address the agent, such as that of a reverse proxy.
        allowed_hosts: Vec<String> = Vec::new(), list(host()) =>;
        /// Permission bits of the Unix socket; whoever may write to it is a local user.
        socket_mode: FileMode = FileMode(0o666), file_mode() =>;
        /// Name of this node in answers, metrics and the dashboard.
        node_name: String = machine.host_name.clone(), name() => flag "--node-name" NAME;
        /// How long running answers may take to finish when the agent is told to stop.
        shutdown_grace_secs: Duration = Duration::from_secs(10), seconds(0.0..=3_600.0) =>;
    }

    /// The statistics interface.
    api: ApiSettings {
        /// Title of the API in its documentation.
        title: String = "gpupool".into(), short_text() =>;
        /// Where Swagger UI is served.
        docs_url: String = "/docs".into(), page() => env "DOCS_URL";
        /// Where ReDoc is served.
        redoc_url: String = "/redoc".into(), page() => env "REDOC_URL";
        /// Whether web pages of other sites may read statistics.
        enable_cors: bool = true, boolean() => env "ENABLE_CORS";
        /// Put before every route.
        api_prefix: String = String::new(), prefix() => env "API_PREFIX";
    }

    /// How GPUs are read, and which.
    monitoring: MonitoringSettings {
        /// Time between two readings.
        refresh_interval: Duration = Duration::from_secs(1), seconds(0.05..=3_600.0)
            => env "REFRESH_INTERVAL" flag "--refresh-interval" SECONDS;
        /// Readings kept of each GPU.
        max_history: u32 = 100, whole(0..=100_000) => env "MAX_HISTORY";
        /// The GPUs this agent shows and gives out; not set means all, empty means none.
        cuda_visible_devices: Option<String> = None, optional(devices()) => env "CUDA_VISIBLE_DEVICES";
        /// Where readings come from: every vendor's best source, one vendor, or one source.
        backend: String = "auto".into(), backend() => env "GPUPOOL_BACKEND" flag "--backend" BACKEND;
        /// Simulated devices instead of real ones.
        simulate: Option<String> = None, optional(simulated_devices()) => flag "--simulate" DEVICES;
    }

    /// How long leases live and what becomes of them.
    leases: LeaseSettings {
        /// Life of a lease without a renewal, where the request names none.
        default_ttl_secs: Duration = Duration::from_millis(DEFAULT_TTL.0), seconds(1.0..=86_400.0) =>;
        /// Longest life without a renewal a request may name.
        max_ttl_secs: Duration = Duration::from_millis(MAX_TTL.0), seconds(1.0..=86_400.0) =>;
        /// How long a lease that is tied to a connection waits for its holder to connect again.
        hold_grace_secs: Duration = Duration::from_secs(10), seconds(0.0..=3_600.0) =>;
        /// How long the processes of an ended lease may take to go before its GPU is quarantined.
        drain_patience_secs: Duration = Duration::from_secs(30), seconds(0.0..=3_600.0) =>;
        /// Requests of one owner that may wait at once.
        waiters_per_owner: u32 = 16_384, whole(1..=1_000_000) =>;
        /// Days for which the audit trail is kept; 0 keeps all of it.
        history_retention_days: u32 = 90, whole(0..=36_500) =>;
    }

    /// Bounds on what clients may do to the agent.
    limits: LimitSettings {
        /// Connections open at once.
        connections: u32 = 16_384, whole(1..=1_000_000) =>;
        /// Largest body of a request.
        body_bytes: u64 = 262_144, whole(1_024..=67_108_864) =>;
        /// Longest time for the header of a request to arrive.
        header_secs: Duration = Duration::from_secs(10), seconds(0.1..=600.0) =>;
        /// Longest time for a whole request to arrive; waiting for an answer does not count.
        request_secs: Duration = Duration::from_secs(30), seconds(0.1..=3_600.0) =>;
    }

    /// Order of those who wait.
    queue: QueueSettings {
        /// First come, first served; or the owner who holds least for their weight first.
        order: QueueOrder = QueueOrder::Fifo, queue_order() => [live];
    }

    /// What owners may have; see quotas below.
    quota: QuotaSettings {
        /// The period in which GPU-hours are counted.
        period: Duration = Duration::from_millis(Policies::default().period.0), seconds(60.0..=31_536_000.0) => [live];
    }

    /// Which servers clients ask, and how. Used by every command but `serve`.
    client: ClientSettings {
        /// The server to ask. Where none is set: the Unix socket of this machine's agent, then `http://localhost:8000`.
        endpoint: Option<String> = None, optional(endpoint()) => env "GPU_SERVICE_ENDPOINT" flag "--endpoint" URL;
        /// Several servers; wins over a single one that is set in the same place.
        endpoints: Vec<String> = Vec::new(), list(endpoint())
            => env "GPU_STATS_SERVICE_ENDPOINTS" "GPU_SERVICE_ENDPOINTS";
        /// Token to show to servers over the network.
        token: Option<SecretString> = None, optional(secret()) => env "GPUPOOL_TOKEN";
        /// Certificates to trust in addition to the system's, in PEM form.
        ca_file: Option<PathBuf> = None, optional(path()) => env "GPUPOOL_CA" flag "--ca-file" FILE;
        /// Memory in use at which a GPU no longer counts as available.
        memory_threshold_percent: Percent = Percent(80_000), percent() => env "GPU_MEMORY_THRESHOLD_PERCENT";
        /// Utilization at which a GPU no longer counts as available.
        utilization_threshold_percent: Percent = Percent(90_000), percent() => env "GPU_UTILIZATION_THRESHOLD_PERCENT";
        /// Time between two looks at the statistics.
        polling_interval: Duration = Duration::from_secs(5), seconds(0.05..=3_600.0)
            => env "GPU_POLLING_INTERVAL" "GPU_POLLING_INTERVAL_SECONDS";
        /// How one of several servers is chosen.
        load_balancing_strategy: Balancing = Balancing::Availability, Balancing::kind()
            => env "GPU_LOAD_BALANCING_STRATEGY";
        /// How long an answer may take.
        endpoint_timeout: Duration = Duration::from_secs(10), seconds(0.05..=3_600.0) => env "GPU_ENDPOINT_TIMEOUT";
        /// How often a failed call is tried again.
        endpoint_max_retries: u32 = 3, whole(0..=100) => env "GPU_ENDPOINT_MAX_RETRIES";
        /// Time between two looks at the health of a server.
        endpoint_health_check_interval: Duration = Duration::from_secs(30), seconds(0.05..=86_400.0)
            => env "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL";
    }
}
