//! What the vendors' tools print, for a bundle.

use std::path::Path;

use super::Wish;
use super::pile::Pile;
use crate::doctor::evidence::{Evidence, vendor_of};
use crate::source::SourceKind;
use crate::tool::{Output, Tool};

/// What one tool is asked: the arguments, the name of the file and how it ends.
type Question = (&'static [&'static str], &'static str, &'static str);

/// Every run of every tool.
const RUNS: [(SourceKind, &[Question]); 3] = [
    (
        SourceKind::NvidiaSmi,
        &[
            (&["-q", "-x"], "nvidia-smi-q", "xml"),
            (&["-L"], "nvidia-smi-L", "txt"),
            (&["topo", "-m"], "nvidia-smi-topo", "txt"),
            (&[], "nvidia-smi", "txt"),
        ],
    ),
    (
        SourceKind::AmdSmi,
        &[
            (&["list", "--json"], "amd-smi-list", "json"),
            (&["static", "--json"], "amd-smi-static", "json"),
            (&["metric", "--json"], "amd-smi-metric", "json"),
        ],
    ),
    (SourceKind::RocmSmi, &[(&["-a", "--json"], "rocm-smi-a", "json")]),
];

/// Runs the tools that are here. A failure is a file of its own, `<name>.error.txt`.
pub(super) fn run(pile: &mut Pile, evidence: &Evidence, wish: &Wish) {
    for (kind, questions) in RUNS {
        match runnable(evidence, wish, kind) {
            Ok(path) => {
                let mut tool = Tool::new(path, wish.tool_deadline);
                for (arguments, name, ending) in questions {
                    ask(pile, &mut tool, arguments, name, ending);
                }
            }
            Err(why) => questions.iter().for_each(|(_, name, ending)| pile.miss(&format!("{name}.{ending}"), why)),
        }
    }
}

/// Where a tool is, or why it is not run.
fn runnable<'a>(evidence: &'a Evidence, wish: &Wish, kind: SourceKind) -> Result<&'a Path, &'static str> {
    let path = evidence.tools.get(&kind).and_then(Option::as_deref).ok_or("the tool is not on the PATH")?;
    let asleep = vendor_of(kind).is_some_and(|vendor| evidence.gpus_of(vendor).any(|gpu| gpu.asleep));
    if asleep && !wish.wake {
        return Err("not run: it would wake a GPU that is asleep");
    }
    Ok(path)
}

fn ask(pile: &mut Pile, tool: &mut Tool, arguments: &[&str], name: &str, ending: &str) {
    let file = format!("{name}.{ending}");
    if pile.is_late() {
        return pile.miss(&file, "the time for the bundle was over");
    }
    let source = format!("{} {}", tool.path().display(), arguments.join(" "));
    let trouble = match tool.run(arguments) {
        Ok(Output { stdout, stderr, code }) => {
            let failed = code != Some(0);
            let trouble = failed.then(|| {
                let ended = code.map_or("ended by a signal".to_owned(), |code| format!("exit code {code}"));
                format!("{ended}\n{stderr}")
            });
            if !stdout.trim().is_empty() {
                pile.add(&file, source.trim_end(), stdout.into_bytes());
            }
            trouble
        }
        Err(error) => Some(format!("{}: {error}\n", error.code())),
    };
    if let Some(trouble) = trouble {
        pile.miss(&file, trouble.lines().next().unwrap_or_default());
        pile.add(&format!("{name}.error.txt"), source.trim_end(), trouble.into_bytes());
    }
}
