//! `gpupool sim placement`: replays traces to compare placement strategies.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use gpupool_core::PlacementStrategy;
use gpupool_sim::churn::ChurnResult;
use gpupool_sim::plot::{self, PlotCurve};
use gpupool_sim::replay::ReplayResult;
use gpupool_sim::trace::TraceFolder;
use gpupool_sim::{NodeOrdering, Scenario, WorkloadSource};

use crate::output::print_output;

#[derive(Subcommand)]
pub(crate) enum SimCommand {
    /// Replay placement traces and report how much GPU capacity stays unallocated.
    ///
    /// The simulation runs the agent's own scheduler.
    Placement(PlacementArgs),
}

/// Options of `gpupool sim placement`.
#[derive(Args)]
pub(crate) struct PlacementArgs {
    /// Folder with the traces: a node list and arrivals/.
    #[arg(long, value_name = "DIR")]
    traces: PathBuf,
    /// Traces to replay, separated by commas [default: all].
    #[arg(long, value_delimiter = ',')]
    trace: Vec<String>,
    /// Placement strategies, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = parse_strategy,
        default_value = "first-fit,best-fit,paper-best-fit,fgd,least-fragmentation"
    )]
    strategy: Vec<PlacementStrategy>,
    /// Seeds, such as 42-46 or 42,44 [default: all of the trace; 42-46 with --churn].
    #[arg(long, value_parser = parse_seeds)]
    seeds: Option<SeedList>,
    /// Whether strategies know the workload in advance or learn it from arrivals.
    #[arg(long, default_value = "known", value_parser = named_value(WORKLOADS))]
    workload: WorkloadSource,
    /// Let tasks end after exponential lifetimes instead of filling the cluster once.
    #[arg(long)]
    churn: bool,
    /// With --churn: long-term GPU demand, as a fraction of capacity.
    #[arg(long, default_value = "1.0", requires = "churn", allow_negative_numbers = true, value_parser = parse_load)]
    load: f64,
    /// With --churn: number of arriving tasks.
    #[arg(long, default_value_t = 60_000, requires = "churn", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    arrivals: u64,
    /// Order of the nodes, which breaks ties between equal scores.
    #[arg(long, default_value = "trace", value_parser = named_value(NODE_ORDERS))]
    node_order: NodeOrdering,
    /// Print a JSON array with one row per trace, strategy and seed.
    #[arg(long, conflicts_with = "table")]
    json: bool,
    /// Print a table of means over the seeds (default).
    #[arg(long)]
    table: bool,
    /// Write an SVG plot of the unallocated share over arrivals (one trace, without --churn).
    #[arg(long, value_name = "FILE", conflicts_with = "churn")]
    svg: Option<PathBuf>,
}

const WORKLOADS: [(&str, WorkloadSource); 2] = [("known", WorkloadSource::Known), ("learned", WorkloadSource::Learned)];
const NODE_ORDERS: [(&str, NodeOrdering); 3] = [
    ("trace", NodeOrdering::Trace),
    ("gpus-desc", NodeOrdering::GpusDesc),
    ("cpu-per-gpu-asc", NodeOrdering::CpuPerGpuAsc),
];

/// Returns a parser for one of several named values.
pub(crate) fn named_value<T: Clone + Send + Sync + 'static, const N: usize>(
    named_rows: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(named_rows.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    names.try_map(move |given| {
        named_rows.iter().find(|(name, _)| *name == given).map(|(_, value)| value.clone()).ok_or("unknown value")
    })
}

fn parse_strategy(text: &str) -> Result<PlacementStrategy, String> {
    text.parse().map_err(|error: gpupool_core::FieldError| error.to_string())
}

/// Seeds of a command line.
#[derive(Clone)]
struct SeedList(Vec<u64>);

fn parse_seeds(text: &str) -> Result<SeedList, String> {
    let parse_number = |text: &str| text.trim().parse::<u64>();
    let mut seeds = Vec::new();
    for part in text.split(',') {
        let range = part.split_once('-').map_or((part, part), |range| range);
        match (parse_number(range.0), parse_number(range.1)) {
            (Ok(first), Ok(last)) if first <= last && last - first < 10_000 => seeds.extend(first..=last),
            _ => return Err(format!("{part:?} is not a number or a range such as 42-46")),
        }
    }
    Ok(SeedList(seeds))
}

fn parse_load(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(load) if load > 0.0 && load <= 100.0 => Ok(load),
        _ => Err("must be a number above 0 and at most 100".to_owned()),
    }
}

pub(crate) fn run(command: &SimCommand) -> anyhow::Result<ExitCode> {
    let SimCommand::Placement(placement) = command;
    let folder = TraceFolder::open(&placement.traces)?;
    let available = folder.traces()?;
    for trace in &placement.trace {
        ensure!(
            available.contains(trace),
            "no trace {trace:?} in {}; available: {}",
            placement.traces.display(),
            available.join(", ")
        );
    }
    let traces = if placement.trace.is_empty() { available } else { placement.trace.clone() };
    if placement.churn { churn(placement, &folder, &traces) } else { replay(placement, &folder, &traces) }
}

impl PlacementArgs {
    /// Returns the requested seeds, or all available ones.
    fn select_seeds(&self, trace: &str, available: &[u64]) -> anyhow::Result<Vec<u64>> {
        let Some(SeedList(seeds)) = &self.seeds else { return Ok(available.to_vec()) };
        match seeds.iter().find(|seed| !available.contains(seed)) {
            Some(missing) => bail!("no seed {missing} for trace {trace:?}; available: {available:?}"),
            None => Ok(seeds.clone()),
        }
    }

    /// Returns one scenario per strategy and seed.
    fn scenarios<'a>(
        &'a self,
        folder: &'a TraceFolder,
        trace: &'a str,
        seeds: &'a [u64],
    ) -> impl Iterator<Item = Scenario<'a>> {
        let &Self { workload, node_order, .. } = self;
        self.strategy.iter().flat_map(move |&strategy| {
            seeds.iter().map(move |&seed| Scenario { folder, trace, seed, strategy, workload, node_order })
        })
    }
}

fn replay(placement: &PlacementArgs, folder: &TraceFolder, traces: &[String]) -> anyhow::Result<ExitCode> {
    ensure!(
        placement.svg.is_none() || traces.len() == 1,
        "--svg draws one trace; select it with --trace, one of {}",
        traces.join(", ")
    );
    let mut rows: Vec<ReplayResult> = Vec::new();
    for trace in traces {
        let seeds = placement.select_seeds(trace, &folder.seeds(trace)?)?;
        for scenario in placement.scenarios(folder, trace, &seeds) {
            rows.push(scenario.replay()?);
        }
    }
    if let Some(file) = &placement.svg {
        let title = format!("Unallocated GPU, trace {}, mean of the seeds", traces[0]);
        fs::write(file, plot::render_svg(&title, &mean_curves(&rows), 80))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    let headings = ["unallocated % at 100", "at 130", "failed", "multi-GPU refused %", "µs/decision", "µs/refresh"];
    let cells = |row: &ReplayResult| {
        [
            row.unallocated_100,
            row.unallocated_130,
            row.failed as f64,
            row.refused_multi_gpu_95,
            row.us_per_decision,
            row.us_per_refresh,
        ]
    };
    let named_rows = || rows.iter().map(|row| ((row.trace.as_str(), row.strategy), cells(row)));
    print_output(placement.json, &rows, || table_of_means(headings, named_rows()))
}

fn churn(placement: &PlacementArgs, folder: &TraceFolder, traces: &[String]) -> anyhow::Result<ExitCode> {
    let seeds = placement.seeds.clone().unwrap_or_else(|| SeedList((42..=46).collect())).0;
    let mut rows: Vec<ChurnResult> = Vec::new();
    for trace in traces {
        for scenario in placement.scenarios(folder, trace, &seeds) {
            rows.push(scenario.churn(placement.load, placement.arrivals)?);
        }
    }
    let headings = ["mean allocated %", "failed", "multi-GPU refused %", "µs/decision", "µs/refresh"];
    let cells = |row: &ChurnResult| {
        [row.mean_allocated, row.failed as f64, row.refused_multi_gpu, row.us_per_decision, row.us_per_refresh]
    };
    let named_rows = || rows.iter().map(|row| ((row.trace.as_str(), row.strategy), cells(row)));
    print_output(placement.json, &rows, || table_of_means(headings, named_rows()))
}

/// Formats a table of the mean cells of rows with the same name.
fn table_of_means<'a, const N: usize>(
    headings: [&str; N],
    rows: impl Iterator<Item = ((&'a str, &'a str), [f64; N])>,
) -> String {
    let mut order: Vec<(&str, &str)> = Vec::new();
    let mut sums: BTreeMap<(&str, &str), ([f64; N], u32)> = BTreeMap::new();
    for (name, cells) in rows {
        let (sum, count) = sums.entry(name).or_insert_with(|| {
            order.push(name);
            ([0.0; N], 0)
        });
        sum.iter_mut().zip(cells).for_each(|(sum, cell)| *sum += cell);
        *count += 1;
    }
    let width = |name: fn(&(&str, &str)) -> usize, least: usize| order.iter().map(name).max().unwrap_or(0).max(least);
    let (traces, strategies) = (width(|name| name.0.len(), 5), width(|name| name.1.len(), 8));
    let mut text = format!("{:traces$}  {:strategies$}  seeds  {}\n", "trace", "strategy", headings.join("  "));
    for name in order {
        let (sum, count) = sums[&name];
        let _ = write!(text, "{:traces$}  {:strategies$}  {count:5}", name.0, name.1);
        for (head, sum) in headings.iter().zip(sum) {
            let _ = write!(text, "  {:>width$.2}", sum / f64::from(count), width = head.chars().count());
        }
        text.push('\n');
    }
    text
}

/// Returns the mean curve of each strategy, up to the end of its shortest curve.
fn mean_curves(rows: &[ReplayResult]) -> Vec<PlotCurve> {
    let mut curves: Vec<(PlotCurve, usize)> = Vec::new();
    for row in rows {
        match curves.iter_mut().find(|(curve, _)| curve.name == row.strategy) {
            None => curves.push((PlotCurve { name: row.strategy.to_owned(), values: row.curve.clone() }, 1)),
            Some((curve, seeds)) => {
                curve.values.truncate(row.curve.len());
                curve.values.iter_mut().zip(&row.curve).for_each(|(sum, value)| *sum += value);
                *seeds += 1;
            }
        }
    }
    let mean = |(mut curve, seeds): (PlotCurve, usize)| {
        curve.values.iter_mut().for_each(|sum| *sum /= seeds as f64);
        curve
    };
    curves.into_iter().map(mean).collect()
}
