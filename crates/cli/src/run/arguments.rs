//! What `gpupool run` is asked for, and the request that is made of it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use gpupool_api::RequestBody;

use crate::connect::Connect;
use crate::units::{duration, some_time};
use crate::wish::Wish;

use super::limits::{KILL_AFTER, LEASE_SLACK};

/// Which GPUs, for how long, and what to run on them.
#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub wish: Wish,
    /// How long the command may run: 2h, 1d. It is then told to end, and the exit code is 124.
    #[arg(long, short = 't', value_name = "TIME", value_parser = some_time)]
    pub timeout: Option<Duration>,
    /// How long a command that was told to end may take before it is killed; 10 s unless said.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    pub connect: Connect,
    /// Say nothing but what went wrong.
    #[arg(long, short)]
    pub quiet: bool,
    /// The command and its arguments, after `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

impl Run {
    /// How long a command that was told to end may take.
    pub fn kill_after(&self) -> Duration {
        self.kill_after.unwrap_or(KILL_AFTER)
    }

    /// The request, or what is wrong with it. The agent's own rules are asked here already: wrong usage is told before
    /// anybody waits.
    pub fn request(&self) -> anyhow::Result<RequestBody> {
        let mut body = self.wish.body()?;
        body.worker_id.get_or_insert_with(|| self.worker_id());
        body.max_duration_secs = self.timeout.map(|timeout| self.lease_time(timeout).as_secs_f64());
        Ok(body)
    }

    /// The lease outlives the command's time by what it may take to end: so that the agent knows when the GPU will be free,
    /// and still is not the one who ends the command.
    fn lease_time(&self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.kill_after()).saturating_add(LEASE_SLACK)
    }

    fn worker_id(&self) -> Arc<str> {
        let program = self.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        let readable = |c: char| if c.is_control() || c == char::REPLACEMENT_CHARACTER { '_' } else { c };
        let name: String = program.to_string_lossy().chars().map(readable).take(WORKER_ID_CHARS).collect();
        if name.is_empty() { "run".into() } else { name.into() }
    }
}

/// Of a long command name, this much tells it from others.
const WORKER_ID_CHARS: usize = 60;

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gpupool_core::GpuId;

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
        assert_eq!((body.wait_limit_secs, body.queue, body.priority), (Some(600.0), None, Some(-3)));
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
            Ok(line) => line.run.request().expect_err("this should be refused").to_string(),
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
