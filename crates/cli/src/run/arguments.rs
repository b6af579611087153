//! What `gpupool run` is asked for, and the request that is made of it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use gpupool_api::RequestBody;
use gpupool_core::body::{OneOrMany, SelectBody};
use gpupool_core::device::Vendor;
use gpupool_core::{GpuId, Request};

use super::amounts::{duration, fraction, label, mebibytes, some_time};
use super::limits::{KILL_AFTER, LEASE_SLACK};

/// Which GPUs, for how long, and what to run on them.
#[derive(Args)]
pub(crate) struct Run {
    /// How many GPUs; 1 unless said.
    #[arg(long, short = 'n', value_name = "N")]
    gpus: Option<u16>,
    /// How much of each: 0.5 or 50%. All of it unless said.
    #[arg(long, short = 'f', value_name = "PART", value_parser = fraction)]
    fraction: Option<f64>,
    /// How much GPU memory of each: 8GiB, 512MiB, or a number of MiB.
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = mebibytes)]
    memory: Option<u64>,
    /// Share a GPU with others that share, without an amount.
    #[arg(long, conflicts_with_all = ["fraction", "memory"])]
    sharing: bool,
    /// How long to wait for them at most: 10m, 2h. As long as it takes unless said.
    #[arg(long, short = 'w', value_name = "TIME", value_parser = duration, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Do not wait: now or not at all.
    #[arg(long)]
    no_wait: bool,
    /// How long the command may run: 2h, 1d. It is then told to end, and the exit code is 124.
    #[arg(long, short = 't', value_name = "TIME", value_parser = some_time)]
    pub timeout: Option<Duration>,
    /// How long a command that was told to end may take before it is killed; 10 s unless said.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    kill_after: Option<Duration>,
    /// How much host memory the command may use, with all it starts; it is killed beyond that.
    #[arg(long, value_name = "SIZE", value_parser = mebibytes)]
    pub host_memory: Option<u64>,
    /// How many host CPUs to count for it.
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// Higher goes first; 0 unless said.
    #[arg(long, short = 'p', value_name = "P", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// Only this model, or any of these (repeat, or separate by commas): H100.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    model: Vec<String>,
    /// Only this vendor's: nvidia, amd, intel.
    #[arg(long, value_name = "NAME", value_parser = vendor)]
    vendor: Option<Vendor>,
    /// Only GPUs with these numbers: 0,1.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    gpu_ids: Vec<u32>,
    /// Only GPUs with these UUIDs.
    #[arg(long, value_name = "UUIDS", value_delimiter = ',')]
    uuids: Vec<String>,
    /// Only GPUs with at least so much memory.
    #[arg(long, value_name = "SIZE", value_parser = mebibytes)]
    min_gpu_memory: Option<u64>,
    /// Only GPUs with this label: KEY=VALUE.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    gpu_label: Vec<(String, String)>,
    /// How one of several GPUs is chosen: least-used, best-fit, first-fit and so on.
    #[arg(long, value_name = "NAME")]
    strategy: Option<String>,
    /// How it is kept apart from others on the same GPU: none, time-slicing, mps, mig.
    #[arg(long, value_name = "NAME")]
    isolation: Option<String>,
    /// A label of the lease, to find it again: KEY=VALUE.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
    /// On whose account, where you may choose.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// What to call it in lists; the name of the command unless said.
    #[arg(long, value_name = "NAME")]
    worker_id: Option<String>,
    /// The agent to ask; it has to run on this machine.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Say nothing but what went wrong.
    #[arg(long, short)]
    pub quiet: bool,
    /// The command and its arguments, after `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

impl Run {
    /// How long to wait at most; `None` for as long as it takes.
    pub fn wait(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }

    /// How long a command that was told to end may take.
    pub fn kill_after(&self) -> Duration {
        self.kill_after.unwrap_or(KILL_AFTER)
    }

    /// The request, or what is wrong with it. The agent's own rules are asked here already: wrong usage is told before
    /// anybody waits.
    pub fn request(&self) -> Result<RequestBody, String> {
        let names = |names: &[String]| names.iter().map(|name| Arc::from(name.as_str())).collect::<Vec<Arc<str>>>();
        let labels = |labels: &[(String, String)]| {
            labels.iter().map(|(key, value)| (Arc::from(key.as_str()), Arc::from(value.as_str()))).collect()
        };
        let body = RequestBody {
            gpus: self.gpus,
            fraction: self.fraction,
            memory_mib: self.memory,
            sharing: self.sharing,
            isolation: self.isolation.clone(),
            strategy: self.strategy.clone(),
            select: SelectBody {
                vendor: self.vendor,
                model: OneOrMany::Many(names(&self.model)),
                min_memory_mib: self.min_gpu_memory,
                gpu_ids: self.gpu_ids.iter().map(|id| GpuId(*id)).collect(),
                uuids: names(&self.uuids),
                labels: labels(&self.gpu_label),
            },
            cpus: self.cpus,
            host_memory_mib: self.host_memory,
            owner: self.owner.as_deref().map(Arc::from),
            worker_id: Some(self.worker_id()),
            labels: labels(&self.label),
            priority: self.priority,
            queue: Some(self.wait() != Some(Duration::ZERO)),
            wait_limit_secs: self.wait().filter(|wait| !wait.is_zero()).map(|wait| wait.as_secs_f64()),
            max_duration_secs: self.timeout.map(|timeout| self.lease_time(timeout).as_secs_f64()),
            ..RequestBody::default()
        };
        match Request::try_from(body.clone()) {
            Ok(_) => Ok(body),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The lease outlives the command's time by what it may take to end: so that the agent knows when the GPU will be free,
    /// and still is not the one who ends the command.
    fn lease_time(&self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.kill_after()).saturating_add(LEASE_SLACK)
    }

    fn worker_id(&self) -> Arc<str> {
        if let Some(name) = &self.worker_id {
            return name.as_str().into();
        }
        let program = self.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        let readable = |c: char| if c.is_control() || c == char::REPLACEMENT_CHARACTER { '_' } else { c };
        let name: String = program.to_string_lossy().chars().map(readable).take(WORKER_ID_CHARS).collect();
        if name.is_empty() { "run".into() } else { name.into() }
    }
}

/// Of a long command name, this much tells it from others.
const WORKER_ID_CHARS: usize = 60;

fn vendor(text: &str) -> Result<Vendor, String> {
    serde_json::from_value(text.to_ascii_lowercase().into()).map_err(|_| "allowed are nvidia, amd and intel".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: Run,
    }

    fn parse(arguments: &[&str]) -> Run {
        Line::try_parse_from(["run"].iter().chain(arguments)).unwrap_or_else(|error| panic!("{error}")).run
    }

    #[test]
    fn what_is_asked_for_becomes_the_request() {
        let run = parse(&[
            "--gpus",
            "2",
            "--memory",
            "8GiB",
            "--wait",
            "10m",
            "--timeout",
            "2h",
            "--host-memory",
            "16GiB",
            "--priority",
            "-3",
            "--model",
            "H100,A100",
            "--gpu-ids",
            "0,1",
            "--label",
            "team=vision",
            "--",
            "python",
            "-c",
            "pass",
        ]);
        let body = run.request().unwrap();
        assert_eq!((body.gpus, body.memory_mib, body.host_memory_mib), (Some(2), Some(8192), Some(16384)));
        assert_eq!((body.wait_limit_secs, body.queue, body.priority), (Some(600.0), Some(true), Some(-3)));
        assert!(body.max_duration_secs.is_some_and(|secs| secs > 7200.0), "the lease ends after the command");
        assert_eq!(body.worker_id.as_deref(), Some("python"));
        assert_eq!(body.select.gpu_ids, [GpuId(0), GpuId(1)]);
        assert_eq!(run.command, ["python", "-c", "pass"]);
    }

    #[test]
    fn options_after_the_command_are_its_own() {
        let run = parse(&["nvidia-smi", "--quiet", "-L"]);
        assert!(!run.quiet);
        assert_eq!(run.command, ["nvidia-smi", "--quiet", "-L"]);
    }

    #[test]
    fn not_waiting_is_said_in_two_ways() {
        for arguments in [&["--no-wait", "--", "true"][..], &["--wait", "0", "--", "true"]] {
            let body = parse(arguments).request().unwrap();
            assert_eq!((body.queue, body.wait_limit_secs), (Some(false), None), "{arguments:?}");
        }
    }

    #[test]
    fn wrong_amounts_are_named_with_what_is_allowed() {
        let refused = |arguments: &[&str]| match Line::try_parse_from(["run"].iter().chain(arguments)) {
            Err(error) => error.to_string(),
            Ok(line) => line.run.request().expect_err("this should be refused"),
        };
        for (arguments, named, allowed) in [
            (&["--memory", "8apples", "--", "true"][..], "8apples", "8GiB"),
            (&["--wait", "soon", "--", "true"], "soon", "10m"),
            (&["--fraction", "3", "--", "true"], "'3'", "1.0"),
            (&["--vendor", "acme", "--", "true"], "acme", "nvidia"),
            (&["--gpus", "9999", "--", "true"], "9999", "64"),
            (&["--strategy", "luck", "--", "true"], "luck", "best-fit"),
            (&["--isolation", "wall", "--", "true"], "wall", "mps"),
        ] {
            let error = refused(arguments);
            assert!(error.contains(named) && error.contains(allowed), "{arguments:?}: {error}");
        }
        assert!(refused(&["--gpus", "1"]).contains("<CMD>"));
    }
}
