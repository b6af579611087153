//! `config check`: everything that is wrong or probably not meant, where it was written, and what to do.
//!
//! The rules are pure. What must be looked up (files, directories, the port) comes as [`Facts`]; without them only what
//! was written is judged.

mod facts;
mod look;
mod machine;
mod monitoring;
mod network;
mod policies;
mod report;
mod variables;

use serde::Serialize;

pub use facts::{DirectoryFact, Facts, FileFact, PortFact};
pub use report::{findings_as_json, findings_as_text};

use crate::load::{Inputs, Loaded, load};
use crate::problem::{Origin, Problem, Problems};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The agent will not start, or the setting cannot work.
    Error,
    /// It works, but probably not as it was meant.
    Warning,
    /// Good to know.
    Notice,
}

/// One thing that is wrong or probably not meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// A short name that never changes.
    pub code: &'static str,
    /// What is wrong.
    pub what: String,
    /// Where it was written.
    pub place: String,
    /// What to do.
    pub remedy: String,
}

/// All findings about what `inputs` make, the worst first. Facts are judged only where the configuration can be loaded.
pub fn check(inputs: &Inputs, look: impl FnOnce(&Loaded) -> Facts) -> Vec<Finding> {
    let mut findings = variables::findings(&inputs.env);
    match load(inputs) {
        Err(Problems(problems)) => findings.extend(problems.iter().map(Finding::from)),
        Ok(loaded) => {
            let facts = look(&loaded);
            findings.extend(loaded.warnings.iter().map(|warning| Finding {
                severity: Severity::Warning,
                what: warning.to_string(),
                ..Finding::from(&warning.problem)
            }));
            findings.extend(network::findings(&loaded));
            findings.extend(monitoring::findings(&loaded));
            findings.extend(policies::findings(&loaded));
            findings.extend(machine::findings(&loaded, &facts));
        }
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

impl From<&Problem> for Finding {
    fn from(problem: &Problem) -> Self {
        let (code, remedy) = match problem {
            Problem::BadValue { hint: Some(hint), .. } => ("bad_value", format!("Write {hint}.")),
            Problem::BadValue { allowed, .. } => ("bad_value", format!("Write {allowed}.")),
            Problem::UnknownKey { hint: Some(hint), .. } => {
                ("unknown_key", format!("Write {hint} instead, or remove it."))
            }
            Problem::UnknownKey { .. } => ("unknown_key", "Remove it; `gpupool config show` lists every key.".into()),
            Problem::Contradiction { .. } => ("contradiction", "Change one of the two.".into()),
            Problem::Syntax { .. } => {
                ("syntax", "Correct the line; texts stand in quotes, sections in [brackets].".into())
            }
            Problem::Unreadable { .. } => {
                ("unreadable", "Name another file with --config, or correct this one.".into())
            }
        };
        Self { severity: Severity::Error, code, what: problem.to_string(), place: problem.place(), remedy }
    }
}

/// Makes findings about the values of one configuration.
struct Finder<'l> {
    loaded: &'l Loaded,
    found: Vec<Finding>,
}

impl<'l> Finder<'l> {
    fn new(loaded: &'l Loaded) -> Self {
        Self { loaded, found: Vec::new() }
    }

    /// Notes a finding about the value of `key`.
    fn add(
        &mut self,
        severity: Severity,
        code: &'static str,
        key: &str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let place = match self.loaded.origin_of(key) {
            Origin::Default => format!("{key} (default)"),
            origin => format!("{key} ({origin})"),
        };
        self.found.push(Finding { severity, code, what: what.into(), place, remedy: remedy.into() });
    }
}
