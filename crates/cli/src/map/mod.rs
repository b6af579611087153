//! `gpupool map`: runs a command for each of many arguments, on the GPUs it is granted.
//!
//! This thread starts the workers and deals with what happens; others read the arguments, keep the GPUs, show progress and
//! listen for signals. Each way to an early end goes through [`stop::Stop`], and every way ends here: all tasks are over, no
//! process is left, the GPUs are given back, and the exit code says how it went.

mod arguments;
mod ending;
mod feeder;
mod follow;
mod gpu_memory;
mod gpus;
mod halt;
mod json;
mod limits;
mod outlet;
mod progress;
mod say;
mod signals;
mod sources;
mod stop;
mod summary;
mod tasks;
mod template;
mod ticking;
mod workers;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Instant;

use gpupool_dispatch::joblog::{Again, Finished, JobLog};
use gpupool_dispatch::{DispatchError, Dispatcher, Stats};

pub(crate) use arguments::Map;

use crate::output::{WrongUsage, written};
use feeder::{Feeder, Kind, Total};
use follow::{Following, Telling};
use gpus::{Gpus, Hands, Wanted};
use halt::Trigger;
use outlet::Outlet;
use progress::{Shown, Style, Waiting};
use say::Say;
use signals::Listening;
use sources::{Named, Sources};
use stop::{Reason, Stop};
use summary::{Failures, last_line};
use tasks::OpenTasks;
use template::Template;

pub(crate) fn run(map: &Map) -> anyhow::Result<ExitCode> {
    let work = map.work()?;
    let kind = match map.speaks {
        None => Kind::Command(Template::parse(&work.command, work.sources.len()).map_err(WrongUsage::of)?),
        Some(_) => Kind::Argument,
    };
    let reads_terminal = work.sources.contains(&Named::File("-".into())) && std::io::stdin().is_terminal();
    let sources = Sources::open(work.sources, if map.null { b'\0' } else { b'\n' })?;
    if map.dry_run {
        return dry_run(&kind, sources);
    }
    let wanted = if map.is_without_gpus() { None } else { Some(Wanted::find(map)?) };
    let (log, finished) = open_log(map)?;
    // Listened for before anything is started: from here on every way out is ours.
    let listening = Listening::start()?;
    let begun = Instant::now();
    let mut dispatcher = Dispatcher::start(workers::plan(map, &work.command))?;
    let remote = dispatcher.remote();
    let stop = Stop::new(remote.clone());

    let is_shown = map.progress || !(map.no_progress || map.quiet || map.json);
    let style = Style::here(is_shown, !(map.json || map.ungroup || reads_terminal));
    let say = Say::new(map.quiet || map.json, style.bars());
    listening.obey(stop.clone(), say.clone())?;
    if reads_terminal {
        say.note("arguments are read from the terminal, one in each line; Ctrl-D ends them");
    }
    let skipped = finished.as_ref().map_or(0, Finished::count);
    let total = Total::new(sources.total().map(|total| total.saturating_sub(skipped)));
    let (tasks, waiting) = (OpenTasks::default(), Waiting::default());
    let telling = Telling { is_commands: map.speaks.is_none(), is_json: map.json, is_tagged: map.tag };
    let mut following = Following {
        telling,
        halt: map.halt,
        tasks: tasks.clone(),
        outlet: Outlet::new(style.bars())?,
        log,
        stop: stop.clone(),
        say: say.clone(),
        failures: Failures::default(),
        succeeded: 0,
        failed: 0,
        is_mute: false,
    };
    let hands = Hands { remote: remote.clone(), stop: stop.clone(), say: say.clone(), waiting: waiting.clone() };
    let shown = Shown { remote: remote.clone(), tasks: tasks.clone(), total: total.clone(), waiting };
    let progress = progress::show(style, shown, say.clone())?;
    let gpus = wanted.map(|wanted| Gpus::start(wanted, hands)).transpose()?;
    Feeder { kind, sources, finished, tasks, remote, stop: stop.clone(), total }.start()?;
    while let Some(event) = dispatcher.next_event() {
        following.on(event);
        if !dispatcher.has_event() {
            following.pause();
        }
    }
    drop(progress);
    let stats = dispatcher.stats();
    let failure = dispatcher.finish().err();
    // No process is left on them.
    drop(gpus);
    let ended = Ended { stats, failure, skipped, begun };
    ended.tell(map, &mut following, &stop, &say)
}

/// What is left to tell when all is over.
struct Ended {
    stats: Stats,
    failure: Option<DispatchError>,
    skipped: u64,
    begun: Instant,
}

impl Ended {
    fn tell(self, map: &Map, following: &mut Following, stop: &Stop, say: &Say) -> anyhow::Result<ExitCode> {
        let log = following.finish_log();
        let reason = stop.reason();
        let some_failed = u8::from(following.failed > 0);
        let (code, error) = match reason {
            Some(Reason::OutputClosed) => return Ok(ExitCode::from(BROKEN_PIPE)),
            Some(Reason::Signal(signal)) => (crate::run::signals::exit_code(signal), None),
            Some(Reason::Failed(error)) => (1, Some(error)),
            Some(Reason::Halted(Trigger::Succeeded(_))) => (0, None),
            Some(Reason::Halted(trigger)) => {
                say.note(format_args!("given up, as --halt {trigger} says"));
                (some_failed, None)
            }
            None => match self.failure {
                Some(failure) => (1, Some(failure.into())),
                None => (some_failed, None),
            },
        };
        let took = self.begun.elapsed();
        if map.json {
            let event = json::summary(&self.stats, self.skipped, took, code);
            written(following.outlet.line(event.to_string().as_bytes(), None).and_then(|()| following.outlet.flush()))?;
        }
        for line in std::mem::take(&mut following.failures).lines() {
            say.note(line);
        }
        say.note(last_line(&self.stats, self.skipped, took));
        match (error, log) {
            (Some(error), _) | (None, Err(error)) => Err(error),
            (None, Ok(())) => Ok(ExitCode::from(code)),
        }
    }
}

/// What a shell says of a command that wrote where nobody reads.
const BROKEN_PIPE: u8 = 128 + 13;

fn open_log(map: &Map) -> anyhow::Result<(Option<JobLog>, Option<Finished>)> {
    let Some(path) = &map.joblog else { return Ok((None, None)) };
    let again = if map.resume_failed { Again::Failed } else { Again::Nothing };
    if map.resume || map.resume_failed {
        let (log, finished) = JobLog::resume(path, again)?;
        return Ok((Some(log), Some(finished)));
    }
    Ok((Some(JobLog::start(path)?), None))
}

fn dry_run(kind: &Kind, mut sources: Sources) -> anyhow::Result<ExitCode> {
    let mut outlet = Outlet::new(None)?;
    let mut seq = 0;
    while let Some(arguments) = sources.next()? {
        seq += 1;
        let line = outlet.line(&kind.shown(&arguments, seq), None);
        if line.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe) {
            return Ok(ExitCode::from(BROKEN_PIPE));
        }
        written(line)?;
    }
    written(outlet.flush())?;
    Ok(ExitCode::SUCCESS)
}
