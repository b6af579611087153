//! What somebody asks for: the options that `run` and `lease acquire` share, as the body of a request.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use gpupool_api::{RequestBody, SelectBody};
use gpupool_core::{GpuId, IsolationLevel, Labels, OneOrMany, PlacementStrategy, Request, Vendor};

use crate::output::WrongUsage;
use crate::units;

/// What is asked for. Without any of it: one whole GPU.
#[derive(Args, Clone, Default)]
pub(crate) struct Wish {
    /// How many GPUs, all on one machine.
    #[arg(long, short = 'n', value_name = "N", help_heading = WHAT)]
    pub gpus: Option<u16>,
    /// How much of each GPU: 0.5 or 50%.
    #[arg(long, short = 'f', value_name = "PART", value_parser = units::fraction, help_heading = WHAT)]
    pub fraction: Option<f64>,
    /// How much memory of each GPU: 8GiB.
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = units::mebibytes, help_heading = WHAT)]
    pub memory: Option<u64>,
    /// A place among equals on a shared GPU.
    #[arg(long, conflicts_with_all = ["fraction", "memory"], help_heading = WHAT)]
    pub sharing: bool,
    /// How parts of a GPU are kept apart.
    #[arg(long, value_name = "HOW", value_parser = names(IsolationLevel::ALL.iter().map(|one| one.name())), help_heading = WHAT)]
    pub isolation: Option<String>,
    /// Host CPUs.
    #[arg(long, value_name = "N", help_heading = WHAT)]
    pub cpus: Option<f64>,
    /// Host memory: 16GiB.
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, help_heading = WHAT)]
    pub host_memory: Option<u64>,

    /// Only GPUs of this vendor.
    #[arg(long, value_name = "NAME", value_parser = vendor, help_heading = WHICH)]
    pub vendor: Option<Vendor>,
    /// Only GPUs of this model, or of any of several.
    #[arg(long, value_name = "NAME", value_delimiter = ',', help_heading = WHICH)]
    pub model: Vec<String>,
    /// Only GPUs with at least so much memory.
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, help_heading = WHICH)]
    pub min_gpu_memory: Option<u64>,
    /// Only GPUs with these numbers.
    #[arg(long, value_name = "IDS", value_delimiter = ',', help_heading = WHICH)]
    pub gpu_ids: Vec<u32>,
    /// Only GPUs with these UUIDs.
    #[arg(long, value_name = "UUIDS", value_delimiter = ',', help_heading = WHICH)]
    pub uuids: Vec<String>,
    /// Only GPUs with this label.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::label, help_heading = WHICH)]
    pub gpu_label: Vec<(String, String)>,
    /// Which of the GPUs that fit is taken.
    #[arg(long, value_name = "NAME", value_parser = names(PlacementStrategy::ALL.iter().map(|one| one.name())), help_heading = WHICH)]
    pub strategy: Option<String>,
    /// Only GPUs with less of their memory in use by others, in percent; 80 unless given.
    #[arg(long, value_name = "PERCENT", help_heading = WHICH)]
    pub memory_threshold: Option<f64>,
    /// Only GPUs kept less busy by others, in percent; 90 unless given.
    #[arg(long, value_name = "PERCENT", help_heading = WHICH)]
    pub utilization_threshold: Option<f64>,

    /// How long to wait for them at most: 10m, 2h. As long as it takes unless given.
    #[arg(long, short = 'w', value_name = "TIME", value_parser = units::duration, conflicts_with = "no_wait", help_heading = QUEUE)]
    pub wait: Option<Duration>,
    /// Do not wait: now or not at all.
    #[arg(long, help_heading = QUEUE)]
    pub no_wait: bool,
    /// Higher goes first; 0 unless given.
    #[arg(long, short = 'p', value_name = "P", allow_negative_numbers = true, help_heading = QUEUE)]
    pub priority: Option<i32>,
    /// On whose account. Administrators may name others.
    #[arg(long, value_name = "NAME", help_heading = QUEUE)]
    pub owner: Option<String>,
    /// Your own name for whoever will use it.
    #[arg(long, value_name = "NAME", help_heading = QUEUE)]
    pub worker_id: Option<String>,
    /// A label for the lease.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::label, help_heading = QUEUE)]
    pub label: Vec<(String, String)>,
}

const WHAT: &str = "What to take";
const WHICH: &str = "Which GPUs will do";
const QUEUE: &str = "Waiting and accounting";

impl Wish {
    /// How long to wait at most; `None` for as long as it takes.
    pub fn wait(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }

    /// The request that this is, checked as far as it can be without asking the agent.
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
            queue: self.wait().filter(Duration::is_zero).map(|_| false),
            wait_limit_secs: self.wait().filter(|wait| !wait.is_zero()).map(|wait| wait.as_secs_f64()),
            ..RequestBody::default()
        };
        Request::try_from(body.clone()).map_err(WrongUsage::of)?;
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

fn vendor(name: &str) -> Result<Vendor, String> {
    let named = name.to_ascii_lowercase().parse().ok().filter(|vendor| *vendor != Vendor::Other);
    named.ok_or_else(|| "allowed are nvidia, amd, intel".into())
}

fn names(names: impl Iterator<Item = &'static str>) -> PossibleValuesParser {
    PossibleValuesParser::new(names.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        wish: Wish,
    }

    fn body(line: &str) -> anyhow::Result<RequestBody> {
        Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace()))?.wish.body()
    }

    #[test]
    fn nothing_said_is_the_empty_body() {
        assert_eq!(body("").unwrap(), RequestBody::default());
    }

    #[test]
    fn options_become_fields() {
        let line = "-n 2 -f 50% -m 8GiB --host-memory 1.5GiB --vendor amd --model a,b --gpu-ids 1,3 --gpu-label z=1 \
                    --wait 10m --priority -2 --label run=7";
        let said = serde_json::to_value(body(line).unwrap()).unwrap();
        let expected = serde_json::json!({
            "gpus": 2, "fraction": 0.5, "memory_mib": 8192, "host_memory_mib": 1536, "wait_limit_secs": 600.0,
            "select": {"vendor": "amd", "model": ["a", "b"], "gpu_ids": [1, 3], "labels": {"z": "1"}},
            "priority": -2, "labels": {"run": "7"},
        });
        assert_eq!(said, expected);
        assert_eq!(body("--wait 0").unwrap(), body("--no-wait").unwrap());
        assert_eq!(body("--no-wait").unwrap().queue, Some(false));
    }

    #[test]
    fn what_no_agent_could_grant_is_refused_here() {
        for (line, says) in [
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
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
