//! The table of settings: each is declared here and nowhere else.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use gpupool_core::Percent;
use gpupool_core::limits::{DEFAULT_TTL, MAX_TTL};
use gpupool_core::policy::{Policies, QueueOrder};

use crate::named::{Balancing, LogFormat, LogLevel};
use crate::resolve::Resolver;
use crate::rules;
use crate::secret::{FileMode, Secret};
use crate::setting::{Machine, Setting, settings};
use crate::value::Value;

settings! { machine;
    /// Where the agent listens, where it keeps its state, what it logs and whom it lets in.
    server: Server {
        /// Address to listen on beside the Unix socket. Anything but loopback also answers the network: facts to
        /// anyone, leases to holders of a token.
        host: String = "127.0.0.1".into(), rules::HOST => env "HOST" flag "--host";
        /// Port to listen on; 0 takes any free one.
        port: u16 = 8000, 0..=65_535 => env "PORT" flag "--port";
        /// Directory of the database, the lock and the Unix socket `agent.sock`. For a user who is not root the default
        /// is `$XDG_STATE_HOME/gpupool`, else `~/.local/state/gpupool`.
        state_dir: PathBuf = machine.state_dir(), () => env "GPUPOOL_STATE_DIR" flag "--state-dir";
        /// How much is logged.
        log_level: LogLevel = LogLevel::Info, () => env "LOG_LEVEL" flag "--log-level" [live];
        /// Log lines for people or for programs.
        log_format: LogFormat = LogFormat::Text, () => env "LOG_FORMAT" flag "--log-format";
        /// Whether each HTTP request is logged.
        access_log: bool = true, () => env "ACCESS_LOG" flag "--access-log";
        /// Accepted and reported for programs that set it; does nothing.
        reload: bool = false, () => env "RELOAD";
        /// Accepted and reported for programs that set it; does nothing.
        workers: u32 = 1, 1..=1_024 => env "WORKERS";
        /// Lets anyone who can reach the agent take and release GPUs, without a token. For a trusted network only.
        open: bool = false, () => flag "--open";
        /// Accepts tokens over the network without TLS, readable for whoever listens in.
        allow_plain_http: bool = false, () => flag "--allow-plain-http";
        /// Certificate chain in PEM form; with it the network is answered over TLS.
        tls_cert: Option<PathBuf> = None, () => flag "--tls-cert" [live];
        /// Private key of the certificate in PEM form.
        tls_key: Option<PathBuf> = None, () => flag "--tls-key" [live];
        /// Further names by which browsers may address the agent, such as that of a reverse proxy.
        allowed_hosts: Vec<String> = Vec::new(), rules::HOST =>;
        /// Permission bits of the Unix socket; whoever may write to it is a local user.
        socket_mode: FileMode = FileMode(0o666), () =>;
        /// Name of this node in answers, metrics and the dashboard.
        node_name: String = machine.host_name.clone(), rules::NAME => flag "--node-name";
        /// How long running answers may take to finish when the agent is told to stop.
        shutdown_grace_secs: Duration = Duration::from_secs(10), 0.0..=3_600.0 =>;
    }

    /// The statistics interface.
    api: Api {
        /// Title of the API in its documentation.
        title: String = "gpupool".into(), rules::TEXT =>;
        /// Where Swagger UI is served.
        docs_url: String = "/docs".into(), rules::PAGE => env "DOCS_URL";
        /// Where ReDoc is served.
        redoc_url: String = "/redoc".into(), rules::PAGE => env "REDOC_URL";
        /// Whether web pages of other sites may read statistics.
        enable_cors: bool = true, () => env "ENABLE_CORS";
        /// Put before every route.
        api_prefix: String = String::new(), rules::PREFIX => env "API_PREFIX";
    }

    /// How GPUs are read, and which.
    monitoring: Monitoring {
        /// Time between two readings.
        refresh_interval: Duration = Duration::from_secs(1), 0.05..=3_600.0
            => env "REFRESH_INTERVAL" flag "--refresh-interval";
        /// Readings kept of each GPU.
        max_history: u32 = 100, 0..=100_000 => env "MAX_HISTORY";
        /// The GPUs this agent shows and gives out; not set means all, empty means none.
        cuda_visible_devices: Option<String> = None, rules::DEVICES => env "CUDA_VISIBLE_DEVICES";
        /// Where readings come from: every vendor's best source, one vendor, or one source.
        backend: String = "auto".into(), rules::BACKEND => env "GPUPOOL_BACKEND" flag "--backend";
        /// Simulated devices instead of real ones.
        simulate: Option<String> = None, rules::SIMULATE => flag "--simulate";
    }

    /// How long leases live and what becomes of them.
    leases: Leases {
        /// Life of a lease without a renewal, where the request names none.
        default_ttl_secs: Duration = Duration::from_millis(DEFAULT_TTL.0), 1.0..=86_400.0 =>;
        /// Longest life without a renewal a request may name.
        max_ttl_secs: Duration = Duration::from_millis(MAX_TTL.0), 1.0..=86_400.0 =>;
        /// How long a lease that is tied to a connection waits for its holder to connect again.
        hold_grace_secs: Duration = Duration::from_secs(10), 0.0..=3_600.0 =>;
        /// How long the processes of an ended lease may take to go before its GPU is quarantined.
        drain_patience_secs: Duration = Duration::from_secs(30), 0.0..=3_600.0 =>;
        /// Requests of one owner that may wait at once.
        waiters_per_owner: u32 = 16_384, 1..=1_000_000 =>;
        /// Days for which the audit trail is kept; 0 keeps all of it.
        history_retention_days: u32 = 90, 0..=36_500 =>;
    }

    /// Bounds on what clients may do to the agent.
    limits: Limits {
        /// Connections open at once.
        connections: u32 = 16_384, 1..=1_000_000 =>;
        /// Largest body of a request.
        body_bytes: u64 = 262_144, 1_024..=67_108_864 =>;
        /// Longest time for the header of a request to arrive.
        header_secs: Duration = Duration::from_secs(10), 0.1..=600.0 =>;
        /// Longest time for a whole request to arrive; waiting for an answer does not count.
        request_secs: Duration = Duration::from_secs(30), 0.1..=3_600.0 =>;
    }

    /// Order of those who wait.
    queue: Queue {
        /// As they came, or the owner who holds least for its weight first.
        order: QueueOrder = QueueOrder::Fifo, () => [live];
    }

    /// What owners may have; see quotas below.
    quota: QuotaPeriod {
        /// The period in which GPU-hours are counted.
        period: Duration = Duration::from_millis(Policies::default().period.0), 60.0..=31_536_000.0 => [live];
    }

    /// Which servers clients ask, and how. Used by every command but `serve`.
    client: Client {
        /// The server to ask. Where none is set: the Unix socket of this machine's agent, then `http://localhost:8000`.
        endpoint: Option<String> = None, rules::ENDPOINT => env "GPU_SERVICE_ENDPOINT" flag "--endpoint";
        /// Several servers; wins over a single one that is set in the same place.
        endpoints: Vec<String> = Vec::new(), rules::ENDPOINT
            => env "GPU_STATS_SERVICE_ENDPOINTS" "GPU_SERVICE_ENDPOINTS";
        /// Token to show to servers over the network.
        token: Option<Secret> = None, () => env "GPUPOOL_TOKEN";
        /// Certificates to trust beside the system's, in PEM form.
        ca_file: Option<PathBuf> = None, () => env "GPUPOOL_CA" flag "--ca-file";
        /// Memory in use at which a GPU no longer counts as available.
        memory_threshold_percent: Percent = Percent(80_000), () => env "GPU_MEMORY_THRESHOLD_PERCENT";
        /// Utilization at which a GPU no longer counts as available.
        utilization_threshold_percent: Percent = Percent(90_000), () => env "GPU_UTILIZATION_THRESHOLD_PERCENT";
        /// Time between two looks at the statistics.
        polling_interval: Duration = Duration::from_secs(5), 0.05..=3_600.0
            => env "GPU_POLLING_INTERVAL" "GPU_POLLING_INTERVAL_SECONDS";
        /// How one of several servers is chosen.
        load_balancing_strategy: Balancing = Balancing::Availability, () => env "GPU_LOAD_BALANCING_STRATEGY";
        /// How long an answer may take.
        endpoint_timeout: Duration = Duration::from_secs(10), 0.05..=3_600.0 => env "GPU_ENDPOINT_TIMEOUT";
        /// How often a failed call is tried again.
        endpoint_max_retries: u32 = 3, 0..=100 => env "GPU_ENDPOINT_MAX_RETRIES";
        /// Time between two looks at the health of a server.
        endpoint_health_check_interval: Duration = Duration::from_secs(30), 0.05..=86_400.0
            => env "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL";
    }
}
