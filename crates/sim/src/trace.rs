//! Reader for a folder of traces: nodes of the cluster, types of tasks, and their order of arrival.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::{Bytes, MilliCpus, Share};

/// Error in a folder of traces.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A line is invalid.
    #[error("{path}, line {line}: {what}")]
    Line { path: PathBuf, line: usize, what: String },
    /// The folder has no trace.
    #[error("{path} has no trace: expected arrivals/<trace>_types.csv and arrivals/<trace>_seed<n>.txt")]
    Empty { path: PathBuf },
}

#[derive(Debug, Clone)]
pub struct TraceNode {
    pub name: Arc<str>,
    pub cpus: MilliCpus,
    pub memory: Bytes,
    pub gpus: u16,
    pub model: Arc<str>,
}

#[derive(Debug, Clone)]
pub struct TaskType {
    pub cpus: MilliCpus,
    pub memory: Bytes,
    pub gpus: u16,
    /// Share of each GPU; whole for several GPUs.
    pub share: Share,
    /// Allowed models as written, `A|B`; empty for any.
    pub models: Arc<str>,
    /// Number of occurrences in the trace.
    pub count: u64,
}

impl TaskType {
    /// Returns the thousandths it takes of all GPUs together.
    pub fn gpu_milli(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.share.0)
    }
}

/// Order of arrivals for one seed.
#[derive(Debug, Clone)]
pub struct TraceArrivals {
    pub types: Vec<usize>,
    /// Rank of each node in name order: equal scores go to the lowest.
    pub node_ranks: Vec<usize>,
}

#[derive(Debug, Clone)]
pub struct TraceFolder {
    root: PathBuf,
    /// Nodes of the cluster in name order.
    pub nodes: Vec<TraceNode>,
}

impl TraceFolder {
    /// Opens a folder and reads its nodes.
    pub fn open(root: &Path) -> Result<Self, TraceError> {
        let path = root.join("openb_node_list_gpu_node.csv");
        let mut nodes = Vec::new();
        for row in rows(&path, &read(&path)?, &["sn", "cpu_milli", "memory_mib", "gpu", "model"])? {
            nodes.push(TraceNode {
                name: row.text(0).into(),
                cpus: MilliCpus(row.number(1)?),
                memory: row.mib(2)?,
                gpus: row.number(3)?,
                model: row.text(4).into(),
            });
        }
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { root: root.to_owned(), nodes })
    }

    /// Returns the names of the traces.
    pub fn traces(&self) -> Result<Vec<String>, TraceError> {
        let names = self.arrival_files()?;
        let mut traces: Vec<String> =
            names.iter().filter_map(|name| name.strip_suffix("_types.csv")).map(str::to_owned).collect();
        traces.sort();
        if traces.is_empty() {
            return Err(TraceError::Empty { path: self.root.clone() });
        }
        Ok(traces)
    }

    /// Returns the seeds of a trace.
    pub fn seeds(&self, trace: &str) -> Result<Vec<u64>, TraceError> {
        let seed = |name: &String| name.strip_prefix(trace)?.strip_prefix("_seed")?.strip_suffix(".txt")?.parse().ok();
        let mut seeds: Vec<u64> = self.arrival_files()?.iter().filter_map(seed).collect();
        seeds.sort_unstable();
        Ok(seeds)
    }

    /// Reads the task types of a trace.
    pub fn types(&self, trace: &str) -> Result<Vec<TaskType>, TraceError> {
        let path = self.root.join("arrivals").join(format!("{trace}_types.csv"));
        let columns = ["type", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "count_in_trace"];
        let mut types = Vec::new();
        for row in rows(&path, &read(&path)?, &columns)? {
            if row.number::<usize>(0)? != types.len() {
                return Err(row.error(format!("type {} should be {}", row.text(0), types.len())));
            }
            let (gpus, share): (u16, u32) = (row.number(3)?, row.number(4)?);
            if share > Share::WHOLE.0 || (gpus == 0) != (share == 0) || (gpus > 1 && share != Share::WHOLE.0) {
                return Err(row.error(format!("{gpus} GPUs of {share} thousandths is not a valid task")));
            }
            types.push(TaskType {
                cpus: MilliCpus(row.number(1)?),
                memory: row.mib(2)?,
                gpus,
                share: Share(share),
                models: row.text(5).into(),
                count: row.number(6)?,
            });
        }
        Ok(types)
    }

    /// Reads the arrivals of a trace for a seed.
    pub fn arrivals(&self, trace: &str, seed: u64, types: usize) -> Result<TraceArrivals, TraceError> {
        let path = self.root.join("arrivals").join(format!("{trace}_seed{seed}.txt"));
        let text = read(&path)?;
        let mut lines = text.lines();
        let mut numbers = |line: usize, below: usize| -> Result<Vec<usize>, TraceError> {
            let wrong = |what| TraceError::Line { path: path.clone(), line, what };
            let words = lines.next().ok_or_else(|| wrong("missing line".into()))?.split_ascii_whitespace();
            let number = |word: &str| match word.parse::<usize>() {
                Ok(number) if number < below => Ok(number),
                _ => Err(wrong(format!("{word:?} is not a number below {below}"))),
            };
            words.map(number).collect()
        };
        let types = numbers(1, types)?;
        let node_ranks = numbers(2, self.nodes.len())?;
        if node_ranks.len() != self.nodes.len() {
            let what = format!("{} ranks for {} nodes", node_ranks.len(), self.nodes.len());
            return Err(TraceError::Line { path, line: 2, what });
        }
        Ok(TraceArrivals { types, node_ranks })
    }

    fn arrival_files(&self) -> Result<Vec<String>, TraceError> {
        let path = self.root.join("arrivals");
        let entries = fs::read_dir(&path).map_err(|source| TraceError::Read { path: path.clone(), source })?;
        Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
    }
}

fn read(path: &Path) -> Result<String, TraceError> {
    fs::read_to_string(path).map_err(|source| TraceError::Read { path: path.to_owned(), source })
}

/// Row of comma-separated values without quotes.
struct TraceCsvRow<'a> {
    path: &'a Path,
    line: usize,
    cells: Vec<&'a str>,
}

/// Reads the rows of a file whose first line names the columns, with the cells of `columns` in that order.
fn rows<'a>(path: &'a Path, text: &'a str, columns: &[&str]) -> Result<Vec<TraceCsvRow<'a>>, TraceError> {
    let mut lines = text.lines().enumerate();
    let wrong = |line: usize, what| TraceError::Line { path: path.to_owned(), line, what };
    let header: Vec<&str> = lines.next().map(|(_, line)| line.split(',').collect()).unwrap_or_default();
    let find = |column: &&str| {
        let found = header.iter().position(|name| name.trim() == *column);
        found.ok_or_else(|| wrong(1, format!("missing column {column:?}")))
    };
    let positions = columns.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let mut rows = Vec::new();
    for (number, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != header.len() {
            return Err(wrong(number + 1, format!("{} cells, the header has {}", cells.len(), header.len())));
        }
        rows.push(TraceCsvRow {
            path,
            line: number + 1,
            cells: positions.iter().map(|&position| cells[position]).collect(),
        });
    }
    Ok(rows)
}

impl TraceCsvRow<'_> {
    fn text(&self, cell: usize) -> &str {
        self.cells[cell]
    }

    fn number<T: FromStr>(&self, cell: usize) -> Result<T, TraceError> {
        self.cells[cell].parse().map_err(|_| self.error(format!("{:?} is not a number in range", self.cells[cell])))
    }

    fn mib(&self, cell: usize) -> Result<Bytes, TraceError> {
        Bytes::from_mib(self.number(cell)?).ok_or_else(|| self.error(format!("{} MiB is too much", self.cells[cell])))
    }

    fn error(&self, what: String) -> TraceError {
        TraceError::Line { path: self.path.to_owned(), line: self.line, what }
    }
}
