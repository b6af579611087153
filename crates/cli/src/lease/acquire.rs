//! `gpupool lease acquire`: asks, waits its turn, and prints what it got.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use gpupool_api::RequestBody;
use gpupool_api::job_environment as job;
use gpupool_api::lease::{Lease, State};
use gpupool_client::{AgentClient, ClientBuilder, IdempotencyKey, LeaseGuard, Progress, Update, WaitOptions};

use super::export::exports;
use super::hold::hold;
use super::lasts;
use crate::connect::{Connect, converse, explained};
use crate::output::{WrongUsage, note, write_json, write_text};
use crate::signals::Ending;
use crate::text::clean;
use crate::units;
use crate::wish::Wish;

/// Longer than anybody waits.
const FOR_EVER: Duration = Duration::from_secs(86_400 * 365);

/// What to take, and how to tell.
#[derive(Args)]
pub(crate) struct Acquire {
    #[command(flatten)]
    wish: Wish,
    /// How long it lives without a renewal; what the agent finds right unless given.
    #[arg(long, value_name = "TIME", value_parser = units::some_time)]
    ttl: Option<Duration>,
    /// How long it may be held at all: 2h. Others are let pass sooner by what says so.
    #[arg(long, value_name = "TIME", value_parser = units::some_time)]
    max_duration: Option<Duration>,
    /// Print lines for a shell: eval "$(gpupool lease acquire --export)".
    #[arg(long)]
    export: bool,
    /// Keep it until this command is ended (Ctrl-C, kill), in place of its ttl.
    #[arg(long)]
    hold: bool,
    #[command(flatten)]
    connect: Connect,
}

pub(super) fn run(arguments: &Acquire) -> anyhow::Result<ExitCode> {
    let body = RequestBody {
        ttl_secs: arguments.ttl.map(|ttl| ttl.as_secs_f64()),
        max_duration_secs: arguments.max_duration.map(|most| most.as_secs_f64()),
        ..arguments.wish.body()?
    };
    if let Some(several) = arguments.connect.several()? {
        return converse(at_any(arguments, several, body));
    }
    let client = arguments.connect.client()?;
    converse(async {
        let mut ending = Ending::new()?;
        let Some(guard) = take(&client, body, &mut ending).await? else { return Ok(ending.exit_code()) };
        if arguments.hold {
            return hold(&client, guard, &mut ending, |lease| tell(lease, arguments.export)).await;
        }
        let lease = guard.let_go_on();
        tell(&lease, arguments.export)?;
        note(&format!("lease {} {}", lease.id, lasts(&lease)));
        Ok(ExitCode::SUCCESS)
    })
}

/// From whichever of several agents has room, or first comes to have it.
async fn at_any(arguments: &Acquire, several: ClientBuilder, body: RequestBody) -> anyhow::Result<ExitCode> {
    // Whoever sits here says when to end it.
    let client = several.worker_timeout(FOR_EVER).build().map_err(WrongUsage::of)?;
    let mut ending = Ending::new()?;
    client.start().await.map_err(explained)?;
    let mut updates = client.updates();
    let told = tokio::spawn(async move {
        while let Some(update) = updates.next().await {
            if matches!(update, Update::Blocked { .. }) {
                note("no agent has room; waiting at all of them");
            }
        }
    });
    let granted = tokio::select! {
        granted = client.request(body) => granted.map_err(explained)?,
        () = ending.told() => {
            client.stop().await;
            note("not waited for any more");
            return Ok(ending.exit_code());
        }
    };
    told.abort();
    let (agent, guard) = granted.into_guard().map_err(|lease| {
        let endpoint_id = lease.endpoint_id().to_owned();
        anyhow::anyhow!(
            "{endpoint_id} only tells statistics: nobody decides there, and nothing can be taken for longer than \
                         this command runs"
        )
    })?;
    let with_endpoint = |lease: &Lease| {
        let mut lease = lease.clone();
        lease.env.insert(job::LEASE_ENDPOINT.into(), Some(agent.endpoint().to_string()));
        tell(&lease, arguments.export)
    };
    if arguments.hold {
        return hold(&agent, guard, &mut ending, with_endpoint).await;
    }
    let lease = guard.let_go_on();
    with_endpoint(&lease)?;
    note(&format!("lease {} of {} {}", lease.id, agent.endpoint(), lasts(&lease)));
    Ok(ExitCode::SUCCESS)
}

/// The lease once it is granted; `None` where the wish was taken back because the command was ended.
async fn take(client: &AgentClient, body: RequestBody, ending: &mut Ending) -> anyhow::Result<Option<LeaseGuard>> {
    let key = IdempotencyKey::random();
    // Asked for first without a way out, which takes a moment only: so its number is known when it has to be taken back.
    let asked = client.request_as(&body, &key).await.map_err(explained)?;
    let mut say = progress();
    if asked.state == State::Queued {
        say(Progress::Waiting { lease: asked.id, position: asked.queue_position, reason: asked.reason.clone() });
    }
    let options = WaitOptions { key: Some(key), ..WaitOptions::default() };
    let granted = tokio::select! {
        granted = client.wait_until_granted(body, options, say) => granted,
        () = ending.told() => {
            client.release(asked.id).await.map_err(explained)?;
            note(&format!("lease {} is not waited for any more", asked.id));
            return Ok(None);
        }
    };
    match granted {
        Ok(guard) => Ok(Some(guard)),
        Err(gpupool_client::ClientError::Ended(lease)) => bail!("{}", why_not(&lease)),
        Err(error) => Err(explained(error)),
    }
}

fn why_not(lease: &Lease) -> String {
    let reason = lease.reason.as_deref().unwrap_or("the agent does not say why");
    format!("nothing was granted: lease {} {} ({})", lease.id, lease.state.name(), clean(reason))
}

/// Tells how the waiting goes, each thing once.
fn progress() -> impl FnMut(Progress) {
    let mut told = String::new();
    move |progress| {
        let line = clean(&progress.to_string());
        if line != told {
            note(&line);
            told = line;
        }
    }
}

fn tell(lease: &Lease, as_exports: bool) -> anyhow::Result<()> {
    if as_exports { write_text(&exports(lease)) } else { write_json(lease) }
}
