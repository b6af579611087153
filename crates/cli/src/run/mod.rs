//! `gpupool run`: waits for GPUs, runs a command on them, and gives them back on every way out.
//!
//! One thread does it all. The command's own end, a signal, the end of its time, too much memory and a lost lease each end
//! in the same place: the command is gone with all it started, the lease is released, the exit code says how it went.

mod arguments;
mod follow;
mod limits;
mod memory;
pub(crate) mod say;
pub(crate) mod signals;
mod start;
mod summary;
mod verdict;
mod waiting;

use std::process::ExitCode;
use std::time::Instant;

use gpupool_api::RequestBody;
use gpupool_api::lease::Lease;
use gpupool_client::limits::GIVE_BACK_PATIENCE;
use gpupool_client::local::{LocalAgent, lost_by_others};
use gpupool_client::{AgentClient, LeaseGuard};

pub(crate) use arguments::Run;

use crate::connect::converse;
use follow::{Times, follow};
use say::Voice;
use signals::Signals;
use summary::Ran;
use verdict::Ended;
use waiting::Turn;

pub(crate) fn run(arguments: &Run) -> anyhow::Result<ExitCode> {
    let body = arguments.request()?;
    converse(wait_and_run(arguments, body)).map(ExitCode::from)
}

async fn wait_and_run(arguments: &Run, body: RequestBody) -> anyhow::Result<u8> {
    let voice = if arguments.quiet { Voice::Quiet } else { Voice::Normal };
    // Listened for before anything is asked for: from here on every way out is ours.
    let mut signals = Signals::listen()?;
    let asked = Instant::now();
    let agent = tokio::select! {
        agent = arguments.connect.local_agent("`gpupool run` starts its command") => agent?,
        signal = signals.next_to_end() => return Ok(signals::exit_code(signal)),
    };
    match waiting::wait(agent.client(), body, arguments.wish.wait(), &mut signals, voice).await? {
        Turn::Cancelled(signal) => {
            voice.note("cancelled; nothing waits any more");
            Ok(signals::exit_code(signal))
        }
        Turn::Granted(guard) => {
            let mut ran = Ran::new(asked, &guard.lease());
            let code = run_on(arguments, &agent, guard, &mut signals, &mut ran, voice).await?;
            voice.note(ran.summary(code));
            Ok(code)
        }
    }
}

/// Runs the command on what was granted, and gives it back whatever happens.
async fn run_on(
    arguments: &Run,
    agent: &LocalAgent,
    guard: LeaseGuard,
    signals: &mut Signals,
    ran: &mut Ran,
    voice: Voice,
) -> anyhow::Result<u8> {
    let lease = guard.lease();
    let mut guard = Some(guard);
    let command = &arguments.command;
    let mut started = match start::start(agent, &mut guard, &lease, command, arguments.wish.host_memory, voice).await {
        Ok(started) => started,
        Err(error) => {
            voice.warn(&error.why);
            give_back(agent.client(), lease.id, voice).await;
            return Ok(error.exit_code);
        }
    };
    ran.begins();
    let times = Times { timeout: arguments.timeout, kill_after: arguments.kill_after() };
    let followed = follow(&mut started, signals, times, voice).await;
    let (kills, stuck) = (started.memory.kills(&started.job), started.job.stuck());
    // An error above leaves the command running; dropping it ends it, before its GPUs are somebody else's.
    drop(started.job);
    let released = give_back(agent.client(), lease.id, voice).await;
    let (end, cut) = followed?;
    let ended = Ended { end, cut, kills, stuck, lost: released.as_ref().and_then(lost_by_others) };
    for message in ended.messages(arguments) {
        voice.warn(message);
    }
    Ok(ended.exit_code())
}

/// Gives the lease back. Where the agent is away it sees our end instead.
async fn give_back(client: &AgentClient, lease: u64, voice: Voice) -> Option<Lease> {
    match client.release_within(lease, GIVE_BACK_PATIENCE).await {
        Ok(lease) => lease,
        Err(error) if error.is_passing() => {
            voice.warn(format_args!("the agent is away; it takes lease {lease} back when it is there again"));
            None
        }
        Err(error) => {
            voice.warn(format_args!("lease {lease} could not be given back ({error}); it ends by itself"));
            None
        }
    }
}
