//! Options of a lease request, shared by `run`, `map` and `lease acquire`.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use gpupool_api::{RequestBody, SelectBody};
use gpupool_core::{GpuId, IsolationLevel, Labels, OneOrMany, PlacementStrategy, Request, Vendor};

use crate::output::UsageError;
use crate::units;

/// Request options. Without any of them: one whole GPU.
#[derive(Args, Clone, Default)]
pub(crate) struct RequestArgs {
    /// Number of GPUs, up to 64, on one machine [default: 1].
    #[arg(long, short = 'n', value_name = "N", help_heading = REQUEST_HEADING)]
    pub gpus: Option<u16>,
    /// Fraction of each GPU, such as 0.5 or 50% [default: the whole GPU].
    #[arg(long, short = 'f', value_name = "PART", value_parser = units::parse_fraction, help_heading = REQUEST_HEADING)]
    pub fraction: Option<f64>,
    /// Memory to reserve on each GPU, such as 8GiB.
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = units::parse_mebibytes, help_heading = REQUEST_HEADING)]
    pub memory: Option<u64>,
    /// Share the GPU equally with other leases, without a fixed fraction or memory.
    #[arg(long, conflicts_with_all = ["fraction", "memory"], help_heading = REQUEST_HEADING)]
    pub sharing: bool,
    /// Isolation between leases on one GPU [default: none].
    #[arg(long, value_name = "HOW", value_parser = value_names(IsolationLevel::ALL.iter().map(|one| one.name())), help_heading = REQUEST_HEADING)]
    pub isolation: Option<String>,
    /// Number of host CPUs to reserve.
    #[arg(long, value_name = "N", help_heading = REQUEST_HEADING)]
    pub cpus: Option<f64>,
    /// Host memory to reserve, such as 16GiB; `gpupool run` also enforces it as a limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mebibytes, help_heading = REQUEST_HEADING)]
    pub host_memory: Option<u64>,

    /// Use only GPUs of this vendor: nvidia, amd or intel.
    #[arg(long, value_name = "NAME", value_parser = parse_vendor, help_heading = SELECTION_HEADING)]
    pub vendor: Option<Vendor>,
    /// Use only GPUs of these models, separated by commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', help_heading = SELECTION_HEADING)]
    pub model: Vec<String>,
    /// Use only GPUs with at least this much memory, such as 40GiB.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mebibytes, help_heading = SELECTION_HEADING)]
    pub min_gpu_memory: Option<u64>,
    /// Use only GPUs with these ids, separated by commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',', help_heading = SELECTION_HEADING)]
    pub gpu_ids: Vec<u32>,
    /// Use only GPUs with these UUIDs, separated by commas.
    #[arg(long, value_name = "UUIDS", value_delimiter = ',', help_heading = SELECTION_HEADING)]
    pub uuids: Vec<String>,
    /// Use only GPUs with this label; can be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::parse_label, help_heading = SELECTION_HEADING)]
    pub gpu_label: Vec<(String, String)>,
    /// Placement strategy [default: least-used for whole GPUs, best-fit for fractions].
    #[arg(long, value_name = "NAME", value_parser = value_names(PlacementStrategy::ALL.iter().map(|one| one.name())), help_heading = SELECTION_HEADING)]
    pub strategy: Option<String>,
    /// Use only GPUs with less memory in use by processes without a lease, in percent [default: 80].
    #[arg(long, value_name = "PERCENT", help_heading = SELECTION_HEADING)]
    pub memory_threshold: Option<f64>,
    /// Use only GPUs with less utilization by processes without a lease, in percent [default: 90].
    #[arg(long, value_name = "PERCENT", help_heading = SELECTION_HEADING)]
    pub utilization_threshold: Option<f64>,

    /// Maximum time to wait in the queue, such as 10m or 2h [default: no limit].
    #[arg(long, short = 'w', value_name = "TIME", value_parser = units::parse_duration, conflicts_with = "no_wait", help_heading = QUEUE_HEADING)]
    pub wait: Option<Duration>,
    /// Fail if the request cannot be granted at once.
    #[arg(long, help_heading = QUEUE_HEADING)]
    pub no_wait: bool,
    /// Priority in the queue; higher goes first [default: 0].
    #[arg(long, short = 'p', value_name = "P", allow_negative_numbers = true, help_heading = QUEUE_HEADING)]
    pub priority: Option<i32>,
    /// Owner of the lease; only administrators can name another [default: you].
    #[arg(long, value_name = "NAME", help_heading = QUEUE_HEADING)]
    pub owner: Option<String>,
    /// Name of the worker, shown by `gpupool status`.
    #[arg(long, value_name = "NAME", help_heading = QUEUE_HEADING)]
    pub worker_id: Option<String>,
    /// Label of the lease; can be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::parse_label, help_heading = QUEUE_HEADING)]
    pub label: Vec<(String, String)>,
}

const REQUEST_HEADING: &str = "Request options";
const SELECTION_HEADING: &str = "GPU selection";
const QUEUE_HEADING: &str = "Queue and accounting";

impl RequestArgs {
    /// Returns the wait limit; `None` waits without a limit.
    pub fn wait_limit(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }

    /// Builds the request body and checks the rules that need no agent.
    pub fn body(&self) -> anyhow::Result<RequestBody> {
        let body = RequestBody {
            gpus: self.gpus,
            fraction: self.fraction,
            memory_mib: self.memory,
            sharing: self.sharing,
            isolation: self.isolation.clone(),
            strategy: self.strategy.clone(),
            memory_threshold: self.memory_threshold,
            utilization_threshold: self.utilization_threshold,
            select: self.select(),
            cpus: self.cpus,
            host_memory_mib: self.host_memory,
            owner: self.owner.as_deref().map(Arc::from),
            worker_id: self.worker_id.as_deref().map(Arc::from),
            labels: labels(&self.label),
            priority: self.priority,
            queue: self.wait_limit().filter(Duration::is_zero).map(|_| false),
            wait_limit_secs: self.wait_limit().filter(|wait| !wait.is_zero()).map(|wait| wait.as_secs_f64()),
            ..RequestBody::default()
        };
        Request::try_from(body.clone()).map_err(UsageError::new)?;
        Ok(body)
    }

    fn select(&self) -> SelectBody {
        let texts = |texts: &[String]| texts.iter().map(|text| Arc::from(text.trim())).collect::<Vec<Arc<str>>>();
        SelectBody {
            vendor: self.vendor,
            model: OneOrMany::Many(texts(&self.model)),
            min_memory_mib: self.min_gpu_memory,
            gpu_ids: self.gpu_ids.iter().copied().map(GpuId).collect(),
            uuids: texts(&self.uuids),
            labels: labels(&self.gpu_label),
        }
    }
}

fn labels(pairs: &[(String, String)]) -> Labels {
    pairs.iter().map(|(key, value)| (Arc::from(key.as_str()), Arc::from(value.as_str()))).collect()
}

fn parse_vendor(name: &str) -> Result<Vendor, String> {
    let named = name.to_ascii_lowercase().parse().ok().filter(|vendor| *vendor != Vendor::Other);
    named.ok_or_else(|| "expected nvidia, amd, intel".into())
}

fn value_names(names: impl Iterator<Item = &'static str>) -> PossibleValuesParser {
    PossibleValuesParser::new(names.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct TestArgs {
        #[command(flatten)]
        request_args: RequestArgs,
    }

    fn body(line: &str) -> anyhow::Result<RequestBody> {
        TestArgs::try_parse_from(["x"].into_iter().chain(line.split_whitespace()))?.request_args.body()
    }

    #[test]
    fn no_options_make_an_empty_body() {
        assert_eq!(body("").unwrap(), RequestBody::default());
    }

    #[test]
    fn options_become_fields() {
        let line = "-n 2 -f 50% -m 8GiB --host-memory 1.5GiB --vendor amd --model a,b --gpu-ids 1,3 --gpu-label z=1 \
                    --wait 10m --priority -2 --label run=7";
        let body_json = serde_json::to_value(body(line).unwrap()).unwrap();
        let expected = serde_json::json!({
            "gpus": 2, "fraction": 0.5, "memory_mib": 8192, "host_memory_mib": 1536, "wait_limit_secs": 600.0,
            "select": {"vendor": "amd", "model": ["a", "b"], "gpu_ids": [1, 3], "labels": {"z": "1"}},
            "priority": -2, "labels": {"run": "7"},
        });
        assert_eq!(body_json, expected);
        assert_eq!(body("--wait 0").unwrap(), body("--no-wait").unwrap());
        assert_eq!(body("--no-wait").unwrap().queue, Some(false));
    }

    #[test]
    fn requests_that_no_agent_can_grant_are_refused() {
        for (line, expected_part) in [
            ("--gpus 65", "gpus"),
            ("--fraction 0", "0.001 to 1.0"),
            ("--memory 8apples", "8GiB"),
            ("--vendor acme", "nvidia, amd, intel"),
            ("--wait 1m --no-wait", "--no-wait"),
            ("--strategy best", "best-fit"),
            ("--sharing --fraction 0.5", "--sharing"),
            ("--memory-threshold 101", "memory_threshold"),
            ("--label x", "KEY=VALUE"),
        ] {
            let error = format!("{:#}", body(line).unwrap_err());
            assert!(error.contains(expected_part), "{line}: {error}");
        }
    }
}
