//! What the evidence means. Each check is a pure function of its own; adding one is adding a line to the table.

mod confinement;
mod devices;
mod driver;
mod kernel_log;
mod nodes;
mod presence;
#[cfg(test)]
pub(super) mod samples;
mod sources;
mod variables;

use std::fmt;

use serde::Serialize;

use crate::doctor::evidence::Evidence;

/// How bad a finding is, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Devices cannot be used.
    Error,
    /// They can, and not as they should.
    Warning,
    /// Good to know.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// One thing that is wrong or good to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its name for programs, which never changes.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What it is, in one sentence.
    pub summary: String,
    /// What was seen that says so.
    pub evidence: Vec<String>,
    /// What to do.
    pub remedy: String,
    /// The devices it is about; empty where it is about the machine.
    pub devices: Vec<String>,
}

impl Finding {
    fn new(code: &'static str, severity: Severity, summary: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (summary, remedy) = (summary.into(), remedy.into());
        Self { code, severity, summary, evidence: Vec::new(), remedy, devices: Vec::new() }
    }

    /// Adds what was seen.
    fn because(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.evidence.extend(lines.into_iter().take(Self::LINES.saturating_sub(self.evidence.len())));
        self
    }

    /// Adds the devices it is about.
    fn about<D: fmt::Display>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.devices.extend(devices.into_iter().map(|device| device.to_string()));
        self
    }

    /// So many lines of evidence are kept of one finding.
    const LINES: usize = 64;
}

type Check = fn(&Evidence) -> Vec<Finding>;

/// Every check there is, in the order in which findings of one severity are told.
const CHECKS: &[Check] = &[
    driver::version_mismatch,
    driver::not_loaded,
    driver::not_bound,
    driver::nouveau,
    driver::legacy_radeon,
    driver::passed_through,
    sources::unresponsive,
    sources::failed,
    sources::library_missing,
    nodes::no_permission,
    nodes::forbidden_by_control_group,
    nodes::missing,
    confinement::container_without_devices,
    presence::not_reported,
    presence::not_on_bus,
    devices::lost,
    devices::unhealthy,
    devices::hot,
    devices::mig_without_instances,
    devices::utilization_stuck,
    variables::invalid_entries,
    variables::hide_all,
    variables::both_amd,
    kernel_log::trouble,
    confinement::other_pid_namespace,
    confinement::limits_missing,
    devices::unified_memory,
    presence::asleep,
    driver::persistence_off,
    sources::rocm_tools_missing,
    sources::warned,
    presence::no_gpu,
    confinement::not_looked_at,
];

/// What is wrong on a machine, worst first.
pub fn examine(evidence: &Evidence) -> Vec<Finding> {
    let mut findings: Vec<Finding> = CHECKS.iter().flat_map(|check| check(evidence)).collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

#[cfg(test)]
mod tests {
    use super::samples::{amd, codes, nvidia};
    use super::*;
    use crate::told::Told;

    #[test]
    fn nothing_is_found_on_a_healthy_machine() {
        assert_eq!(examine(&nvidia()), []);
        assert_eq!(examine(&amd()), []);
    }

    #[test]
    fn nothing_at_all_to_look_at_is_said_and_not_feared() {
        assert_eq!(codes(&Evidence::default()), ["no_gpu"]);
    }

    #[test]
    fn the_worst_is_told_first() {
        let mut evidence = nvidia();
        evidence.persistence_daemon = Told::Value(false);
        evidence.nodes = Told::Value(Vec::new());
        let severities: Vec<Severity> = examine(&evidence).iter().map(|finding| finding.severity).collect();
        assert_eq!(severities, [Severity::Error, Severity::Note]);
    }

    #[test]
    fn every_finding_says_what_it_is_and_what_to_do() {
        for finding in samples::every_kind() {
            assert!(finding.summary.ends_with('.') && finding.remedy.ends_with('.'), "{finding:?}");
            assert!(!finding.evidence.is_empty(), "{finding:?}");
        }
    }

    #[test]
    fn a_finding_is_plain_data_for_programs() {
        let finding =
            Finding::new("no_gpu", Severity::Note, "None.", "Look.").because(["seen".to_owned()]).about(["x"]);
        let json = serde_json::to_value(&finding).unwrap();
        let expected = serde_json::json!({"code": "no_gpu", "severity": "note", "summary": "None.",
            "evidence": ["seen"], "remedy": "Look.", "devices": ["x"]});
        assert_eq!(json, expected);
    }
}
