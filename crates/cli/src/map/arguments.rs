//! Options of `gpupool map`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::run_stopper::HaltRule;
use super::task_feeder::ArgumentSource;
use crate::endpoint_args::EndpointArgs;
use crate::output::UsageError;
use crate::request_args::RequestArgs;
use crate::units::{parse_duration, parse_mebibytes, parse_nonzero_duration};

/// Upper limit of `--queue-size`; the whole queue is held in memory.
const MAX_QUEUE_SIZE: usize = 1_000_000;
/// Upper limit of `--jobs`.
const MAX_WORKERS: u32 = 4_096;

const TASKS: &str = "Tasks";
const LIMITS: &str = "Limits";
const LOG: &str = "Output and log";

/// Options of `gpupool map`.
#[derive(Args)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(super) request_args: RequestArgs,
    #[command(flatten)]
    pub(super) endpoint_args: EndpointArgs,

    /// Concurrent tasks per GPU [default: 1]; with --gpus 0, concurrent tasks in all [default: one per CPU].
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)), help_heading = TASKS)]
    pub(super) jobs: Option<u32>,
    /// File with one argument per line; - for standard input. Repeat for several sources, as after `::::`.
    #[arg(long, short = 'a', value_name = "FILE", help_heading = TASKS)]
    pub(super) arg_file: Vec<PathBuf>,
    /// Separate the arguments in files by NUL bytes instead of newlines.
    #[arg(long, short = '0', help_heading = TASKS)]
    pub(super) null: bool,
    /// Start COMMAND once per worker and send it the arguments.
    #[arg(long, value_name = "HOW", help_heading = TASKS)]
    pub(super) speaks: Option<WorkerDialect>,
    /// Number of retries of a failed task.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = TASKS)]
    pub(super) retries: u32,
    /// Stop early: now or soon, then fail=N, fail=N%, success=N or done=N, such as now,fail=1.
    #[arg(long, value_name = "WHEN,WHY", default_value = "never", value_parser = str::parse::<HaltRule>, help_heading = TASKS)]
    pub(super) halt: HaltRule,
    /// Number of tasks to read ahead, up to 1000000 [default: 1024].
    #[arg(long, value_name = "N", value_parser = parse_queue_size, help_heading = TASKS)]
    pub(super) queue_size: Option<usize>,
    /// Print the commands without running them.
    #[arg(long, help_heading = TASKS)]
    pub(super) dry_run: bool,

    /// Time limit of a task, such as 90s or 10m; afterwards the task gets SIGTERM.
    #[arg(long, short = 't', value_name = "TIME", value_parser = parse_nonzero_duration, help_heading = LIMITS)]
    pub(super) timeout: Option<Duration>,
    /// Time between SIGTERM and SIGKILL when a task is stopped [default: 10s].
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = LIMITS)]
    pub(super) kill_after: Option<Duration>,
    /// Time limit for a worker to become ready.
    #[arg(long, value_name = "TIME", value_parser = parse_nonzero_duration, help_heading = LIMITS)]
    pub(super) setup_timeout: Option<Duration>,
    /// Lifetime of a worker, which is then replaced between two tasks.
    #[arg(long, value_name = "TIME", value_parser = parse_nonzero_duration, help_heading = LIMITS)]
    pub(super) worker_lifetime: Option<Duration>,
    /// Host memory limit of a worker and its processes, such as 4GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_mebibytes, help_heading = LIMITS)]
    pub(super) worker_memory: Option<u64>,
    /// GPU memory limit of a worker and its processes, such as 8GiB, as measured by the agent.
    #[arg(long, value_name = "SIZE", value_parser = parse_mebibytes, help_heading = LIMITS)]
    pub(super) gpu_memory_limit: Option<u64>,
    /// CPU time limit of a task.
    #[arg(long, value_name = "TIME", value_parser = parse_nonzero_duration, help_heading = LIMITS)]
    pub(super) cpu_time: Option<Duration>,
    /// Limit on the processes and threads of a worker.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = LIMITS)]
    pub(super) processes: Option<u64>,

    /// Print output in the order of the arguments.
    #[arg(long, short, help_heading = LOG)]
    pub(super) keep_order: bool,
    /// Log each finished task to this file, in the format of GNU parallel.
    #[arg(long, value_name = "FILE", help_heading = LOG)]
    pub(super) joblog: Option<PathBuf>,
    /// Skip the tasks in the job log.
    #[arg(long, requires = "joblog", help_heading = LOG)]
    pub(super) resume: bool,
    /// Skip the successful tasks in the job log and repeat the failed ones.
    #[arg(long, requires = "joblog", help_heading = LOG)]
    pub(super) resume_failed: bool,
    /// Let tasks write directly to the output, interleaved.
    #[arg(long, short, conflicts_with_all = ["keep_order", "tag", "json", "speaks"], help_heading = LOG)]
    pub(super) ungroup: bool,
    /// Prefix each line of output with the argument and a tab.
    #[arg(long, help_heading = LOG)]
    pub(super) tag: bool,
    /// Print events as JSON lines.
    #[arg(long, conflicts_with = "tag", help_heading = LOG)]
    pub(super) json: bool,
    /// Show progress even with --quiet or --json, as plain lines.
    #[arg(long, overrides_with = "no_progress", help_heading = LOG)]
    pub(super) progress: bool,
    /// Hide progress.
    #[arg(long, overrides_with = "progress", help_heading = LOG)]
    pub(super) no_progress: bool,
    /// Print only warnings and errors.
    #[arg(long, short, help_heading = LOG)]
    pub(super) quiet: bool,

    /// Pass GPUPOOL_TOKEN to the command.
    #[arg(long)]
    pub(super) keep_token: bool,

    /// Command, followed by `::: ARGUMENT…` or `:::: FILE…`; without them, standard input has one argument per line.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) words: Vec<OsString>,
}

/// Protocol of a worker on its standard input and output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WorkerDialect {
    /// One line per task and one line per result.
    Lines,
    /// The protocol of docs/worker-protocol.md.
    Frames,
}

/// Command and the sources of its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MapInput {
    pub command: Vec<OsString>,
    pub sources: Vec<ArgumentSource>,
}

impl MapArgs {
    /// Splits the words at `:::` and `::::`.
    pub(super) fn split_words(&self) -> Result<MapInput, UsageError> {
        let is_mark = |word: &&OsString| word.as_bytes().starts_with(b":::");
        let command: Vec<OsString> = self.words.iter().take_while(|word| !is_mark(word)).cloned().collect();
        let mut sources: Vec<ArgumentSource> = self.arg_file.iter().cloned().map(ArgumentSource::File).collect();
        let mut rest = self.words[command.len()..].iter().peekable();
        while let Some(mark) = rest.next() {
            let values: Vec<OsString> = std::iter::from_fn(|| rest.next_if(|word| !is_mark(word))).cloned().collect();
            match mark.as_bytes() {
                b":::" => sources.push(ArgumentSource::Given(values)),
                b"::::" if values.is_empty() => return Err(UsageError::new("`::::` needs a file name")),
                b"::::" => sources.extend(values.into_iter().map(|path| ArgumentSource::File(path.into()))),
                _ => {
                    let mark = mark.to_string_lossy();
                    return Err(UsageError::new(format!("unknown separator `{mark}`; allowed: `:::` and `::::`")));
                }
            }
        }
        if sources.is_empty() {
            sources.push(ArgumentSource::File("-".into()));
        }
        if self.speaks.is_some() && (command.is_empty() || sources.len() > 1) {
            return Err(UsageError::new("--speaks needs a COMMAND and only one source of arguments"));
        }
        if self.gpu_memory_limit.is_some() && self.is_without_gpus() {
            return Err(UsageError::new(
                "--gpu-memory-limit needs GPUs: it cannot be used with --gpus 0; use --gpus 1 or more",
            ));
        }
        Ok(MapInput { command, sources })
    }

    pub(super) fn is_without_gpus(&self) -> bool {
        self.request_args.gpus == Some(0)
    }
}

fn parse_queue_size(text: &str) -> Result<usize, String> {
    let allowed = format!("expected a number from 1 to {MAX_QUEUE_SIZE}");
    text.parse().ok().filter(|size| (1..=MAX_QUEUE_SIZE).contains(size)).ok_or(allowed)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct TestArgs {
        #[command(flatten)]
        map: MapArgs,
    }

    fn parse(arguments: &[&str]) -> Result<MapArgs, String> {
        TestArgs::try_parse_from(["map"].iter().chain(arguments))
            .map(|line| line.map)
            .map_err(|error| error.to_string())
    }

    fn input_of(arguments: &[&str]) -> MapInput {
        parse(arguments).unwrap().split_words().unwrap_or_else(|error| panic!("{error}"))
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn words_are_split_as_gnu_parallel_does() {
        let (given, file) =
            (|of: &[&str]| ArgumentSource::Given(words(of)), |of: &str| ArgumentSource::File(of.into()));
        let parts_of = |arguments: &[&str]| {
            let work = input_of(arguments);
            (work.command, work.sources)
        };
        assert_eq!(parts_of(&["ls", "-l", "-k"]), (words(&["ls", "-l", "-k"]), vec![file("-")]));
        assert_eq!(
            parts_of(&["-k", "-j", "2", "a {}", ":::", "-x", "y", ":::"]),
            (words(&["a {}"]), vec![given(&["-x", "y"]), given(&[])])
        );
        assert_eq!(
            parts_of(&["-a", "f", "x", "::::", "g", "-"]),
            (words(&["x"]), vec![file("f"), file("g"), file("-")])
        );
        assert_eq!(parts_of(&[":::", "true"]), (vec![], vec![given(&["true"])]));
    }

    #[test]
    fn a_usage_error_names_the_option_the_value_and_the_allowed_values() {
        for (arguments, expected_parts) in [
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
            let error = parse(arguments).and_then(|map| map.split_words().map(drop).map_err(|error| error.to_string()));
            let error = error.expect_err("this should be refused");
            for part in expected_parts {
                assert!(error.contains(part), "{arguments:?}: {error}");
            }
        }
    }
}
