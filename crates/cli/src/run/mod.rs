//! `gpupool run`: runs a command on leased GPUs and always releases the lease.
//!
//! Everything happens on one thread. When the command exits, a signal arrives, the time limit passes, the memory limit
//! is exceeded or the lease is lost, the result is the same: all processes of the command are gone, the lease is
//! released, and the exit code reports the result.
mod command;
mod lease_wait;
mod parent_lease;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use gpupool_api::RequestBody;
use gpupool_api::lease::LeaseBody;
use gpupool_client::limits::LOCAL_RELEASE_PATIENCE;
use gpupool_client::local::{LocalAgent, loss_before_release};
use gpupool_client::{AgentClient, LeaseGuard};
use gpupool_confine::spawn::JobEnd;
use gpupool_core::is_plain;

use crate::endpoint_args::{EndpointArgs, block_on};
use crate::output::{MessagePrinter, print_note};
use crate::program::check_program;
use crate::request_args::RequestArgs;
use crate::signals::{SignalListener, exit_code};
use crate::units::{format_short_duration, parse_duration, parse_nonzero_duration};
use command::{EarlyEnd, follow, start, start_under_parent};
use lease_wait::LeaseWaitOutcome;

/// Default of `--kill-after`.
const DEFAULT_KILL_AFTER: Duration = Duration::from_secs(10);
/// Time that the lease outlives the command's time limit: starting and ending take a moment.
const LEASE_END_MARGIN: Duration = Duration::from_secs(30);
/// Maximum time to ask for the address of the agent's page.
const PAGE_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum length of the command name in the worker id.
const MAX_WORKER_ID_CHARS: usize = 60;

/// Examples in the help of `gpupool run`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  gpupool run -- python train.py                   # one whole GPU
  gpupool run --fraction 0.5 -- python train.py    # half of a GPU
  gpupool run --gpus 2 --wait 1h -- torchrun --nproc-per-node 2 train.py
  gpupool run --memory 20GiB --timeout 4h -- ./evaluate
  gpupool run --model H100 --no-wait -- nvidia-smi

Exit status:
  N      exit code of the command
  124    the command exceeded --timeout
  126    the command cannot be executed
  127    the command was not found
  128+N  signal N ended the command; 137 also if it exceeded --host-memory
  1      no GPU was granted, or the lease was lost
  2      wrong usage";

/// Options of `gpupool run`.
#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    request_args: RequestArgs,
    /// Time limit of the command, such as 2h; afterwards it gets SIGTERM and the exit code is 124.
    #[arg(long, short = 't', value_name = "TIME", value_parser = parse_nonzero_duration)]
    timeout: Option<Duration>,
    /// Time between SIGTERM and SIGKILL when the command is ended [default: 10s].
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    kill_after: Option<Duration>,
    /// Pass GPUPOOL_TOKEN to the command.
    #[arg(long)]
    keep_token: bool,
    #[command(flatten)]
    endpoint_args: EndpointArgs,
    /// Print only warnings and errors.
    #[arg(long, short)]
    quiet: bool,
    /// Command and arguments to run, after `--`.
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl RunArgs {
    /// Returns the grace period between SIGTERM and SIGKILL.
    fn kill_after(&self) -> Duration {
        self.kill_after.unwrap_or(DEFAULT_KILL_AFTER)
    }

    /// Builds the request. The agent's own rules are checked here as well, so that wrong usage is reported before
    /// waiting.
    fn request_body(&self) -> anyhow::Result<RequestBody> {
        let mut body = self.request_args.body()?;
        body.worker_id.get_or_insert_with(|| self.worker_id());
        body.max_duration_secs = self.timeout.map(|timeout| self.lease_duration(timeout).as_secs_f64());
        Ok(body)
    }

    /// Returns the duration of the lease. It exceeds the time limit by the time to end the command, so that the agent
    /// knows when the GPU becomes free, but does not end the command itself.
    fn lease_duration(&self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.kill_after()).saturating_add(LEASE_END_MARGIN)
    }

    fn worker_id(&self) -> Arc<str> {
        let program = self.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        let readable = |c: char| if !is_plain(c) || c == char::REPLACEMENT_CHARACTER { '_' } else { c };
        let name: String = program.to_string_lossy().chars().map(readable).take(MAX_WORKER_ID_CHARS).collect();
        if name.is_empty() { "run".into() } else { name.into() }
    }
}

pub(crate) fn run(arguments: &RunArgs) -> anyhow::Result<ExitCode> {
    let body = arguments.request_body()?;
    if let Some(Err(error)) = arguments.command.first().map(|program| check_program(program)) {
        print_note(&format!("error: {error}"));
        return Ok(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1)));
    }
    block_on(wait_and_run(arguments, body)).map(ExitCode::from)
}

async fn wait_and_run(arguments: &RunArgs, body: RequestBody) -> anyhow::Result<u8> {
    let printer = MessagePrinter { is_quiet: arguments.quiet, bars: None };
    // From here on signals end the command in an orderly way.
    let mut signals = SignalListener::listen_all()?;
    let requested_at = Instant::now();
    let agent = tokio::select! {
        agent = arguments.endpoint_args.local_agent("`gpupool run` starts its command") => agent?,
        signal = signals.next_termination() => return Ok(exit_code(signal)),
    };
    if let Some(parent) = parent_lease::lease_of_parent(agent.client()).await {
        parent_lease::check_fits(&body, &parent)?;
        return run_under_parent(arguments, &parent, &mut signals, &printer).await;
    }
    match lease_wait::wait_for_lease(agent.client(), body, arguments.request_args.wait_limit(), &mut signals, &printer)
        .await?
    {
        LeaseWaitOutcome::Cancelled(signal) => {
            printer.info("cancelled; the request left the queue");
            Ok(exit_code(signal))
        }
        LeaseWaitOutcome::Granted(guard) => {
            let (waited, on) = (format_short_duration(requested_at.elapsed()), device_list(&guard.lease()));
            let page = page_address(agent.client(), &printer).await;
            printer.info(format_args!("running on {on}{page}"));
            let (code, started_at) = run_on_lease(arguments, &agent, guard, &mut signals, &printer).await?;
            let ran = started_at.map(|started_at: Instant| format_short_duration(started_at.elapsed()));
            printer.info(match ran {
                Some(ran) => format!("waited {waited}, ran {ran} on {on}, exit code {code}"),
                None => format!("waited {waited} for {on}, not run, exit code {code}"),
            });
            Ok(code)
        }
    }
}

/// Runs the command on the lease of the `gpupool run` that started this one, which ends the command with the lease.
async fn run_under_parent(
    arguments: &RunArgs,
    parent: &LeaseBody,
    signals: &mut SignalListener,
    printer: &MessagePrinter,
) -> anyhow::Result<u8> {
    let (lease, on) = (parent.id, device_list(parent));
    printer.info(format_args!(
        "running under lease {lease} of the outer command on {on}; all its commands see all devices of the lease"
    ));
    let mut command = match start_under_parent(arguments, printer) {
        Ok(command) => command,
        Err(error) => {
            printer.warn(&error.why);
            return Ok(error.exit_code);
        }
    };
    let followed = follow(&mut command, signals, arguments, printer).await;
    let (kills, stuck) = (command.memory.oom_kills(&command.job), command.job.stuck_processes());
    drop(command.job);
    let (end, early_end) = followed?;
    let ended = CommandOutcome { end, early_end, kills, stuck, lost: None };
    for message in ended.warnings(arguments) {
        printer.warn(message);
    }
    Ok(ended.exit_code())
}

/// Runs the command on the lease and releases it. Returns the exit code and the start time.
async fn run_on_lease(
    arguments: &RunArgs,
    agent: &LocalAgent,
    guard: LeaseGuard,
    signals: &mut SignalListener,
    printer: &MessagePrinter,
) -> anyhow::Result<(u8, Option<Instant>)> {
    let lease = guard.lease();
    let mut guard = Some(guard);
    let mut command = match start(agent, &mut guard, &lease, arguments, printer).await {
        Ok(command) => command,
        Err(error) => {
            printer.warn(&error.why);
            release_lease(agent.client(), lease.id, printer).await;
            return Ok((error.exit_code, None));
        }
    };
    let started_at = Instant::now();
    let followed = follow(&mut command, signals, arguments, printer).await;
    let (kills, stuck) = (command.memory.oom_kills(&command.job), command.job.stuck_processes());
    // After an error above the command still runs; dropping the job ends it before its GPUs are granted to others.
    drop(command.job);
    let released = release_lease(agent.client(), lease.id, printer).await;
    let (end, early_end) = followed?;
    let ended = CommandOutcome { end, early_end, kills, stuck, lost: released.as_ref().and_then(loss_before_release) };
    for message in ended.warnings(arguments) {
        printer.warn(message);
    }
    Ok((ended.exit_code(), Some(started_at)))
}

/// Releases the lease. If the agent is unreachable, it notices the end of this process instead.
async fn release_lease(client: &AgentClient, lease: u64, printer: &MessagePrinter) -> Option<LeaseBody> {
    match client.release_within(lease, LOCAL_RELEASE_PATIENCE).await {
        Ok(lease) => lease,
        Err(error) if error.is_transient() => {
            printer.warn(format_args!("the agent is unreachable; it releases lease {lease} when it is back"));
            None
        }
        Err(error) => {
            printer.warn(format_args!("cannot release lease {lease} ({error}); it will expire"));
            None
        }
    }
}

/// End of a command, and everything that affected it.
#[derive(Debug)]
struct CommandOutcome {
    end: JobEnd,
    /// Reason if gpupool ended the command.
    early_end: Option<EarlyEnd>,
    /// Number of processes that the kernel killed because of the memory limit.
    kills: u64,
    /// Number of processes that could not be killed.
    stuck: u32,
    /// Reason if the lease turned out to be lost on release.
    lost: Option<String>,
}

impl CommandOutcome {
    /// Returns the exit code of `gpupool run`.
    fn exit_code(&self) -> u8 {
        match (&self.early_end, &self.lost) {
            (Some(EarlyEnd::TimedOut), _) => 124,
            (Some(EarlyEnd::Memory(_)), _) => 137,
            (Some(EarlyEnd::Lost(_)), _) | (None, Some(_)) => 1,
            (None, None) => u8::try_from(self.end.exit_code()).unwrap_or(u8::MAX),
        }
    }

    /// Returns the warnings to print.
    fn warnings(&self, arguments: &RunArgs) -> Vec<String> {
        let most = arguments.request_args.host_memory.unwrap_or_default();
        let mut messages = Vec::new();
        match (&self.early_end, &self.lost) {
            (Some(EarlyEnd::TimedOut), _) => {
                let time = format_short_duration(arguments.timeout.unwrap_or_default());
                messages.push(format!("the command exceeded its time limit of {time} (--timeout)"));
            }
            (Some(EarlyEnd::Memory(excess)), _) => messages.push(format!("the command was killed: {excess}")),
            // Already reported when it happened.
            (Some(EarlyEnd::Lost(_)), _) | (None, None) => {}
            (None, Some(why)) => messages.push(format!("the lease was lost ({why})")),
        }
        if self.kills > 0 && !matches!(self.early_end, Some(EarlyEnd::Memory(_))) {
            let killed = process_count(self.kills);
            messages.push(format!(
                "the kernel killed {killed} of the command, which used more than {most} MiB of host memory"
            ));
        }
        if self.stuck > 0 {
            let left = process_count(self.stuck.into());
            messages.push(format!("{left} of the command cannot be killed and may still use the GPU"));
        }
        messages
    }
}

fn process_count(count: u64) -> String {
    if count == 1 { "1 process".into() } else { format!("{count} processes") }
}

/// Returns the address of the agent's page for a message; empty if it is unknown or nothing is printed.
async fn page_address(client: &AgentClient, printer: &MessagePrinter) -> String {
    let endpoint = client.endpoint();
    if printer.is_quiet {
        return String::new();
    }
    if endpoint.socket().is_none() {
        return format!("; page: {endpoint}");
    }
    let settings = tokio::time::timeout(PAGE_PATIENCE, client.config()).await;
    let port = settings.ok().and_then(Result::ok).and_then(|settings| settings["server"]["port"].as_u64());
    port.map(|port| format!("; page: http://localhost:{port}")).unwrap_or_default()
}

/// Formats the devices of a lease, such as `0.5 of GPU 0 (H100)`.
fn device_list(lease: &LeaseBody) -> String {
    if lease.devices.is_empty() {
        return "no GPU".into();
    }
    let each = lease.devices.iter().map(|device| {
        let part = if device.fraction < 1.0 { format!("{} of ", device.fraction) } else { String::new() };
        format!("{part}GPU {} ({})", device.gpu_id, device.name)
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gpupool_confine::bounds::BoundExceeded;
    use gpupool_core::GpuId;

    use super::*;

    #[derive(Parser)]
    struct TestArgs {
        #[command(flatten)]
        run: RunArgs,
    }

    fn parse(arguments: &[&str]) -> RunArgs {
        TestArgs::try_parse_from(["run"].iter().chain(arguments)).unwrap_or_else(|error| panic!("{error}")).run
    }

    #[test]
    fn options_become_the_request() {
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
        let body = run.request_body().unwrap();
        assert_eq!((body.gpus, body.memory_mib, body.host_memory_mib), (Some(2), Some(8192), Some(16384)));
        assert_eq!((body.wait_limit_secs, body.queue, body.priority), (Some(600.0), None, Some(-3)));
        assert!(body.max_duration_secs.is_some_and(|secs| secs > 7200.0), "the lease ends after the command");
        assert_eq!(body.worker_id.as_deref(), Some("python"));
        assert_eq!(body.select.gpu_ids, [GpuId(0), GpuId(1)]);
        assert_eq!(run.command, ["python", "-c", "pass"]);
    }

    #[test]
    fn options_after_the_command_belong_to_it() {
        let run = parse(&["nvidia-smi", "--quiet", "-L"]);
        assert!(!run.quiet);
        assert_eq!(run.command, ["nvidia-smi", "--quiet", "-L"]);
    }

    #[test]
    fn no_wait_and_a_wait_of_zero_are_the_same() {
        for arguments in [&["--no-wait", "--", "true"][..], &["--wait", "0", "--", "true"]] {
            let body = parse(arguments).request_body().unwrap();
            assert_eq!((body.queue, body.wait_limit_secs), (Some(false), None), "{arguments:?}");
        }
    }

    #[test]
    fn wrong_values_are_refused_with_the_allowed_ones() {
        let refused = |arguments: &[&str]| match TestArgs::try_parse_from(["run"].iter().chain(arguments)) {
            Err(error) => error.to_string(),
            Ok(line) => line.run.request_body().expect_err("this should be refused").to_string(),
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

    #[test]
    fn an_end_by_gpupool_decides_the_exit_code() {
        let ended = |end, early_end, lost: Option<&str>| {
            let lost = lost.map(str::to_owned);
            CommandOutcome { end, early_end, kills: 0, stuck: 0, lost }.exit_code()
        };
        let lost = || Some(EarlyEnd::Lost("revoked".into()));
        let too_much = BoundExceeded::HostMemory { used: Some(2), allowed: 1 };
        assert_eq!(ended(JobEnd::Exited(3), None, None), 3);
        assert_eq!(ended(JobEnd::Signalled(15), None, None), 143);
        assert_eq!(ended(JobEnd::Exited(0), Some(EarlyEnd::TimedOut), None), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(EarlyEnd::TimedOut), Some("expired")), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(EarlyEnd::Memory(too_much)), None), 137);
        assert_eq!(ended(JobEnd::Signalled(15), lost(), None), 1);
        assert_eq!(ended(JobEnd::Exited(0), None, Some("revoked")), 1);
    }
}
