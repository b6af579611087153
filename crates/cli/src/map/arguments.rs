//! What `gpupool map` is asked for.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::feeder::Named;
use super::stop::Halt;
use crate::connect::Connect;
use crate::output::WrongUsage;
use crate::units::{duration, mebibytes, some_time};
use crate::wish::Wish;

/// Most that `--queue-size` can ask for: all of them are held.
const QUEUE_MOST: usize = 1_000_000;
/// Most workers of a run.
const WORKERS_MOST: u32 = 4_096;

const TASKS: &str = "Tasks";
const LIMITS: &str = "Time and limits";
const LOG: &str = "Order, log and output";

/// What to run, for which arguments, on which GPUs.
#[derive(Args)]
pub(crate) struct Map {
    #[command(flatten)]
    pub(super) wish: Wish,
    #[command(flatten)]
    pub(super) connect: Connect,

    /// Workers on each GPU, so many tasks at once; 1 unless given. With --gpus 0: workers in all, one for each CPU unless given.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MOST)), help_heading = TASKS)]
    pub(super) jobs: Option<u32>,
    /// A file with an argument in each line; - is standard input. May be given several times, as `::::` with several files.
    #[arg(long, short = 'a', value_name = "FILE", help_heading = TASKS)]
    pub(super) arg_file: Vec<PathBuf>,
    /// Arguments end with a zero byte and not with a line.
    #[arg(long, short = '0', help_heading = TASKS)]
    pub(super) null: bool,
    /// COMMAND is a worker, started once and given a task for each argument. What it speaks on its input and output.
    #[arg(long, value_name = "HOW", help_heading = TASKS)]
    pub(super) speaks: Option<Speaks>,
    /// How often a task that failed is tried again.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = TASKS)]
    pub(super) retries: u32,
    /// When to give up: now or soon, with fail=N, fail=N%, success=N or done=N, such as now,fail=1.
    #[arg(long, value_name = "WHEN,WHY", default_value = "never", value_parser = str::parse::<Halt>, help_heading = TASKS)]
    pub(super) halt: Halt,
    /// How many tasks are read ahead; 1024 unless given.
    #[arg(long, value_name = "N", value_parser = queue_size, help_heading = TASKS)]
    pub(super) queue_size: Option<usize>,
    /// Print what would be run, and run nothing.
    #[arg(long, help_heading = TASKS)]
    pub(super) dry_run: bool,

    /// How long a task may take: 90s, 10m. It is then told to end.
    #[arg(long, short = 't', value_name = "TIME", value_parser = some_time, help_heading = LIMITS)]
    pub(super) timeout: Option<Duration>,
    /// How long a task that was told to end may take before it is killed; 10 s unless given.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = LIMITS)]
    pub(super) kill_after: Option<Duration>,
    /// How long a worker may take until it is ready.
    #[arg(long, value_name = "TIME", value_parser = some_time, help_heading = LIMITS)]
    pub(super) setup_timeout: Option<Duration>,
    /// How long a worker lives before another takes its place, between two tasks.
    #[arg(long, value_name = "TIME", value_parser = some_time, help_heading = LIMITS)]
    pub(super) worker_lifetime: Option<Duration>,
    /// Most host memory of a worker and all it starts: 4GiB.
    #[arg(long, value_name = "SIZE", value_parser = mebibytes, help_heading = LIMITS)]
    pub(super) worker_memory: Option<u64>,
    /// Most GPU memory of a worker and all it starts, as the agent sees it: 8GiB.
    #[arg(long, value_name = "SIZE", value_parser = mebibytes, help_heading = LIMITS)]
    pub(super) gpu_memory_limit: Option<u64>,
    /// Most CPU time of a task.
    #[arg(long, value_name = "TIME", value_parser = some_time, help_heading = LIMITS)]
    pub(super) cpu_time: Option<Duration>,
    /// Most processes and threads of a worker and all it starts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = LIMITS)]
    pub(super) processes: Option<u64>,

    /// Output in the order of the arguments, not as tasks end.
    #[arg(long, short, help_heading = LOG)]
    pub(super) keep_order: bool,
    /// Write a line for each task that is over to this file, in the columns of GNU parallel.
    #[arg(long, value_name = "FILE", help_heading = LOG)]
    pub(super) joblog: Option<PathBuf>,
    /// Skip what the job log says is over.
    #[arg(long, requires = "joblog", help_heading = LOG)]
    pub(super) resume: bool,
    /// Skip what the job log says is done, and do again what failed.
    #[arg(long, requires = "joblog", help_heading = LOG)]
    pub(super) resume_failed: bool,
    /// Tasks write straight to the output, mixed as it comes.
    #[arg(long, short, conflicts_with_all = ["keep_order", "tag", "json", "speaks"], help_heading = LOG)]
    pub(super) ungroup: bool,
    /// Begin each line of a task's output with its argument and a tab.
    #[arg(long, help_heading = LOG)]
    pub(super) tag: bool,
    /// What happens, as a line of JSON for each event.
    #[arg(long, conflicts_with = "tag", help_heading = LOG)]
    pub(super) json: bool,
    /// Show progress with --quiet or --json too, in plain lines there.
    #[arg(long, overrides_with = "no_progress", help_heading = LOG)]
    pub(super) progress: bool,
    /// Show no progress.
    #[arg(long, overrides_with = "progress", help_heading = LOG)]
    pub(super) no_progress: bool,
    /// Say nothing but what went wrong.
    #[arg(long, short, help_heading = LOG)]
    pub(super) quiet: bool,

    /// The command, then `::: ARGUMENT…` or `:::: FILE…`; without them, a task for each line of standard input.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) words: Vec<OsString>,
}

/// What a worker speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Speaks {
    /// A line in for each task, a line out for each result.
    Lines,
    /// The protocol of docs/worker-protocol.md.
    Frames,
}

/// The command, and where its arguments come from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub command: Vec<OsString>,
    pub sources: Vec<Named>,
}

impl Map {
    /// Takes the words apart at `:::` and `::::`.
    pub(super) fn work(&self) -> Result<Work, WrongUsage> {
        let is_mark = |word: &&OsString| word.as_bytes().starts_with(b":::");
        let command: Vec<OsString> = self.words.iter().take_while(|word| !is_mark(word)).cloned().collect();
        let mut sources: Vec<Named> = self.arg_file.iter().cloned().map(Named::File).collect();
        let mut rest = self.words[command.len()..].iter().peekable();
        while let Some(mark) = rest.next() {
            let values: Vec<OsString> = std::iter::from_fn(|| rest.next_if(|word| !is_mark(word))).cloned().collect();
            match mark.as_bytes() {
                b":::" => sources.push(Named::Given(values)),
                b"::::" if values.is_empty() => return Err(WrongUsage::of("`::::` needs the name of a file")),
                b"::::" => sources.extend(values.into_iter().map(|path| Named::File(path.into()))),
                _ => {
                    let mark = mark.to_string_lossy();
                    return Err(WrongUsage::of(format!("`{mark}` is not known; allowed are `:::` and `::::`")));
                }
            }
        }
        if sources.is_empty() {
            sources.push(Named::File("-".into()));
        }
        if self.speaks.is_some() && (command.is_empty() || sources.len() > 1) {
            return Err(WrongUsage::of("--speaks needs the COMMAND of a worker, and one source of arguments"));
        }
        if self.gpu_memory_limit.is_some() && self.is_without_gpus() {
            return Err(WrongUsage::of(
                "--gpu-memory-limit: there is no GPU with --gpus 0; allowed is --gpus 1 and more",
            ));
        }
        Ok(Work { command, sources })
    }

    pub(super) fn is_without_gpus(&self) -> bool {
        self.wish.gpus == Some(0)
    }
}

fn queue_size(text: &str) -> Result<usize, String> {
    let allowed = format!("allowed are numbers from 1 to {QUEUE_MOST}");
    text.parse().ok().filter(|size| (1..=QUEUE_MOST).contains(size)).ok_or(allowed)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        map: Map,
    }

    fn parse(arguments: &[&str]) -> Result<Map, String> {
        Line::try_parse_from(["map"].iter().chain(arguments)).map(|line| line.map).map_err(|error| error.to_string())
    }

    fn work(arguments: &[&str]) -> Work {
        parse(arguments).unwrap().work().unwrap_or_else(|error| panic!("{error}"))
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn words_are_taken_apart_where_parallel_does() {
        let (given, file) = (|of: &[&str]| Named::Given(words(of)), |of: &str| Named::File(of.into()));
        let work_of = |arguments: &[&str]| {
            let work = work(arguments);
            (work.command, work.sources)
        };
        assert_eq!(work_of(&["ls", "-l", "-k"]), (words(&["ls", "-l", "-k"]), vec![file("-")]));
        assert_eq!(
            work_of(&["-k", "-j", "2", "a {}", ":::", "-x", "y", ":::"]),
            (words(&["a {}"]), vec![given(&["-x", "y"]), given(&[])])
        );
        assert_eq!(
            work_of(&["-a", "f", "x", "::::", "g", "-"]),
            (words(&["x"]), vec![file("f"), file("g"), file("-")])
        );
        assert_eq!(work_of(&[":::", "true"]), (vec![], vec![given(&["true"])]));
    }

    #[test]
    fn wrong_usage_names_the_option_the_value_and_what_is_allowed() {
        for (arguments, says) in [
            (&["--halt", "often", "x"][..], &["--halt", "often", "now,fail=1"][..]),
            (&["-j", "0", "x"], &["--jobs", "0", "1..=4096"]),
            (&["--timeout", "0", "x"], &["--timeout", "above zero"]),
            (&["--queue-size", "0", "x"], &["--queue-size", "1 to 1000000"]),
            (&["--speaks", "klingon", "x"], &["--speaks", "klingon", "lines", "frames"]),
            (&["--resume", "x"], &["--joblog"]),
            (&["-u", "-k", "x"], &["--ungroup", "--keep-order"]),
            (&["--worker-memory", "much", "x"], &["--worker-memory", "much", "8GiB"]),
            (&["x", ":::+", "a"], &[":::+", "`::::`"]),
            (&["x", "::::"], &["::::", "file"]),
            (&["--speaks", "lines", "x", ":::", "a", ":::", "b"], &["--speaks", "one source"]),
        ] {
            let error = parse(arguments).and_then(|map| map.work().map(drop).map_err(|error| error.to_string()));
            let error = error.expect_err("this should be refused");
            for part in says {
                assert!(error.contains(part), "{arguments:?}: {error}");
            }
        }
    }
}
