//! `gpupool run`: waits for GPUs, runs a command on them, and gives them back on every way out.
//!
//! One thread does it all. The command's own end, a signal, the end of its time, too much memory and a lost lease each end
//! in the same place: the command is gone with all it started, the lease is released, the exit code says how it went.

mod job;
mod waiting;

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

use crate::connect::{Connect, converse};
use crate::output::Voice;
use crate::signals::{Signals, exit_code};
use crate::units::{duration, shown_finely, some_time};
use crate::wish::Wish;
use job::{Cut, follow, start};
use waiting::Turn;

/// How long a job that is told to end may take, unless `--kill-after` says otherwise.
const KILL_AFTER: Duration = Duration::from_secs(10);
/// What a lease lives beyond the job's own time limit: starting and ending take a moment.
const LEASE_SLACK: Duration = Duration::from_secs(30);
/// Of a long command name, this much tells it from others.
const WORKER_ID_CHARS: usize = 60;

/// Which GPUs, for how long, and what to run on them.
#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    wish: Wish,
    /// How long the command may run: 2h, 1d. It is then told to end, and the exit code is 124.
    #[arg(long, short = 't', value_name = "TIME", value_parser = some_time)]
    timeout: Option<Duration>,
    /// How long a command that was told to end may take before it is killed; 10 s unless said.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    connect: Connect,
    /// Say nothing but what went wrong.
    #[arg(long, short)]
    quiet: bool,
    /// The command and its arguments, after `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Run {
    /// How long a command that was told to end may take.
    fn kill_after(&self) -> Duration {
        self.kill_after.unwrap_or(KILL_AFTER)
    }

    /// The request, or what is wrong with it. The agent's own rules are asked here already: wrong usage is told before
    /// anybody waits.
    fn request(&self) -> anyhow::Result<RequestBody> {
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

pub(crate) fn run(arguments: &Run) -> anyhow::Result<ExitCode> {
    let body = arguments.request()?;
    converse(wait_and_run(arguments, body)).map(ExitCode::from)
}

async fn wait_and_run(arguments: &Run, body: RequestBody) -> anyhow::Result<u8> {
    let voice = Voice { is_quiet: arguments.quiet, bars: None };
    // Listened for before anything is asked for: from here on every way out is ours.
    let mut signals = Signals::listen()?;
    let asked = Instant::now();
    let agent = tokio::select! {
        agent = arguments.connect.local_agent("`gpupool run` starts its command") => agent?,
        signal = signals.next_to_end() => return Ok(exit_code(signal)),
    };
    match waiting::wait(agent.client(), body, arguments.wish.wait(), &mut signals, &voice).await? {
        Turn::Cancelled(signal) => {
            voice.note("cancelled; nothing waits any more");
            Ok(exit_code(signal))
        }
        Turn::Granted(guard) => {
            let (waited, on) = (shown_finely(asked.elapsed()), devices(&guard.lease()));
            let (code, begun) = run_on(arguments, &agent, guard, &mut signals, &voice).await?;
            let ran = begun.map(|begun: Instant| shown_finely(begun.elapsed()));
            voice.note(match ran {
                Some(ran) => format!("waited {waited}, ran {ran} on {on}, exit code {code}"),
                None => format!("waited {waited} for {on}, did not run, exit code {code}"),
            });
            Ok(code)
        }
    }
}

/// Runs the command on what was granted, and gives it back whatever happens. The exit code, and when it began to run.
async fn run_on(
    arguments: &Run,
    agent: &LocalAgent,
    guard: LeaseGuard,
    signals: &mut Signals,
    voice: &Voice,
) -> anyhow::Result<(u8, Option<Instant>)> {
    let lease = guard.lease();
    let mut guard = Some(guard);
    let mut started = match start(agent, &mut guard, &lease, arguments, voice).await {
        Ok(started) => started,
        Err(error) => {
            voice.warn(&error.why);
            give_back(agent.client(), lease.id, voice).await;
            return Ok((error.exit_code, None));
        }
    };
    let begun = Instant::now();
    let followed = follow(&mut started, signals, arguments, voice).await;
    let (kills, stuck) = (started.memory.kills(&started.job), started.job.stuck_processes());
    // An error above leaves the command running; dropping it ends it, before its GPUs are somebody else's.
    drop(started.job);
    let released = give_back(agent.client(), lease.id, voice).await;
    let (end, cut) = followed?;
    let ended = Ended { end, cut, kills, stuck, lost: released.as_ref().and_then(loss_before_release) };
    for message in ended.messages(arguments) {
        voice.warn(message);
    }
    Ok((ended.exit_code(), Some(begun)))
}

/// Gives the lease back. Where the agent is away it sees our end instead.
async fn give_back(client: &AgentClient, lease: u64, voice: &Voice) -> Option<LeaseBody> {
    match client.release_within(lease, LOCAL_RELEASE_PATIENCE).await {
        Ok(lease) => lease,
        Err(error) if error.is_transient() => {
            voice.warn(format_args!("the agent is away; it takes lease {lease} back when it is there again"));
            None
        }
        Err(error) => {
            voice.warn(format_args!("lease {lease} could not be given back ({error}); it ends by itself"));
            None
        }
    }
}

/// Everything known about the end of a command.
#[derive(Debug)]
struct Ended {
    end: JobEnd,
    /// Why we ended it, where we did.
    cut: Option<Cut>,
    /// Processes the kernel killed for want of memory.
    kills: u64,
    /// Processes that could not be killed.
    stuck: u32,
    /// That the lease had been lost, where only giving it back showed it.
    lost: Option<String>,
}

impl Ended {
    /// What a script can rely on.
    fn exit_code(&self) -> u8 {
        match (&self.cut, &self.lost) {
            (Some(Cut::TimedOut), _) => 124,
            (Some(Cut::Memory(_)), _) => 137,
            (Some(Cut::Lost(_)), _) | (None, Some(_)) => 1,
            (None, None) => u8::try_from(self.end.exit_code()).unwrap_or(u8::MAX),
        }
    }

    /// What went wrong, where something did.
    fn messages(&self, asked: &Run) -> Vec<String> {
        let most = asked.wish.host_memory.unwrap_or_default();
        let mut messages = Vec::new();
        match (&self.cut, &self.lost) {
            (Some(Cut::TimedOut), _) => {
                let time = shown_finely(asked.timeout.unwrap_or_default());
                messages.push(format!("the command was ended after {time} (--timeout)"));
            }
            (Some(Cut::Memory(excess)), _) => messages.push(format!("the command was killed: {excess}")),
            // Said when it happened.
            (Some(Cut::Lost(_)), _) | (None, None) => {}
            (None, Some(why)) => messages.push(format!("the lease was lost ({why})")),
        }
        if self.kills > 0 && !matches!(self.cut, Some(Cut::Memory(_))) {
            let killed = processes(self.kills);
            messages.push(format!(
                "the kernel killed {killed} of the command: it used more than {most} MiB of host memory"
            ));
        }
        if self.stuck > 0 {
            let left = processes(self.stuck.into());
            messages.push(format!("{left} of the command could not be killed, and may still use the GPU"));
        }
        messages
    }
}

fn processes(count: u64) -> String {
    if count == 1 { "1 process".into() } else { format!("{count} processes") }
}

/// `GPU 0 (H100, half)`.
fn devices(lease: &LeaseBody) -> String {
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

    #[test]
    fn what_we_did_to_the_command_decides_before_how_it_ended() {
        let ended = |end, cut, lost: Option<&str>| {
            let lost = lost.map(str::to_owned);
            Ended { end, cut, kills: 0, stuck: 0, lost }.exit_code()
        };
        let lost = || Some(Cut::Lost("revoked".into()));
        let too_much = BoundExceeded::HostMemory { used: Some(2), allowed: 1 };
        assert_eq!(ended(JobEnd::Exited(3), None, None), 3);
        assert_eq!(ended(JobEnd::Signalled(15), None, None), 143);
        assert_eq!(ended(JobEnd::Exited(0), Some(Cut::TimedOut), None), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::TimedOut), Some("expired")), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::Memory(too_much)), None), 137);
        assert_eq!(ended(JobEnd::Signalled(15), lost(), None), 1);
        assert_eq!(ended(JobEnd::Exited(0), None, Some("revoked")), 1);
    }
}
