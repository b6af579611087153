//! Diagnosis of the GPUs of a machine: problems, causes and remedies.
//!
//! Three steps: [`DoctorEvidence::gather`] inspects the machine without waking or opening a device, [`diagnose`] is a
//! pure function from evidence to [`DoctorFinding`]s, and [`render_findings`] formats them for a terminal.
//! [`DiagnosticBundle`] packs the machine's state for a maintainer.

mod bundle;
mod evidence;
mod findings;
mod redact;

pub use crate::pci_bus::PciGpu;
pub use bundle::{BundleRequest, DiagnosticBundle};
pub use evidence::{
    CgroupMode, CgroupSupport, ContainerEvidence, DeviceNode, DoctorEvidence, NodeAccess, NvidiaVersions, SourceResult,
};
pub use findings::{DoctorFinding, DoctorSeverity, diagnose};
pub use redact::RedactionOptions;

use std::fmt::Write;

use crate::reported::Reported;

/// Maximum width of a line.
const MAX_COLUMNS: usize = 100;
/// Column at which the text of a finding starts, after the longest severity.
const TEXT_INDENT: usize = 9;

/// Formats the findings, worst first, and a summary of the inspected evidence.
pub fn render_findings(evidence: &DoctorEvidence, findings: &[DoctorFinding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let head = format!("{} [{}]", finding.summary, finding.code);
        push_wrapped(&mut text, &format!("{:<TEXT_INDENT$}", finding.severity), TEXT_INDENT, &head);
        for line in &finding.evidence {
            push_wrapped(&mut text, &format!("{:TEXT_INDENT$}- ", ""), TEXT_INDENT + 2, line);
        }
        push_wrapped(&mut text, &format!("{:TEXT_INDENT$}> ", ""), TEXT_INDENT + 2, &finding.remedy);
        text.push('\n');
    }
    if findings.is_empty() {
        text.push_str("No problems found.\n");
    }
    push_wrapped(&mut text, "", 0, &format!("Checked: {}.", inspected_evidence(evidence).join("; ")));
    text
}

/// Summarizes the inspected evidence.
fn inspected_evidence(evidence: &DoctorEvidence) -> Vec<String> {
    fn count<T>(reported: &Reported<Vec<T>>) -> String {
        reported.value().map_or("unknown".to_owned(), |list| list.len().to_string())
    }
    let mut parts = vec![
        format!("display adapters and accelerators on the PCI bus: {}", count(&evidence.gpus)),
        format!("device nodes: {}", count(&evidence.nodes)),
    ];
    if let Some(modules) = evidence.modules.value().filter(|modules| !modules.is_empty()) {
        parts.push(format!("loaded modules: {}", modules.iter().cloned().collect::<Vec<_>>().join(", ")));
    }
    for source in &evidence.sources {
        parts.push(match &source.result {
            Ok(reading) => format!("{}: {} devices", source.kind, reading.devices.len()),
            Err(error) => format!("{}: {}", source.kind, error.code()),
        });
    }
    if let Some(cgroup) = evidence.confinement.cgroup.value() {
        let limits: Vec<&str> =
            ["cpu", "memory", "pids", "dmem"].into_iter().filter(|name| cgroup.controllers.contains(*name)).collect();
        parts.push(format!("{} with {}", cgroup.mode.name(), limits.join(", ")));
    }
    if evidence.in_container() {
        parts.push("from inside a container".to_owned());
    }
    if let Some(release) = evidence.kernel_release.value() {
        parts.push(format!("Linux {release}"));
    }
    parts
}

/// Appends `words` after `head`, wrapped at `COLUMNS` and continued at `indent`. Control characters become spaces.
fn push_wrapped(text: &mut String, head: &str, indent: usize, words: &str) {
    let room = MAX_COLUMNS - indent;
    let mut line = String::new();
    let mut lines = Vec::new();
    let printable: String = words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    for word in printable.split_whitespace().flat_map(|word| split_word(word, room)) {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > room {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&word);
    }
    lines.push(line);
    for (number, line) in lines.iter().enumerate() {
        let _ = if number == 0 { writeln!(text, "{head}{line}") } else { writeln!(text, "{:indent$}{line}", "") };
    }
}

/// Splits a word that is too long for a line.
fn split_word(word: &str, room: usize) -> Vec<String> {
    let characters: Vec<char> = word.chars().collect();
    characters.chunks(room).map(|piece| piece.iter().collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::diagnose;
    use crate::doctor::findings::tests::samples::{amd, every_kind, nvidia};

    #[test]
    fn a_healthy_machine_gets_a_summary_of_the_evidence() {
        let text = render_findings(&nvidia(), &[]);
        assert!(text.starts_with("No problems found.\nChecked: "), "{text}");
        assert!(text.contains("nvml: 2 devices") && text.contains("cgroup v2 with cpu, memory, pids"), "{text}");
    }

    #[test]
    fn a_finding_has_its_severity_evidence_and_remedy() {
        let mut evidence = amd();
        evidence.tools.values_mut().for_each(|path| *path = None);
        let text = render_findings(&evidence, &diagnose(&evidence));
        let expected = "note     AMD's compute driver is loaded (/dev/kfd), but amd-smi and rocm-smi are missing.\n\
        \x20        [rocm_tools_missing]\n\
        \x20        - /dev/kfd exists\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("\n         > gpupool works without them"), "{text}");
    }

    #[test]
    fn lines_have_at_most_a_hundred_columns_and_no_control_characters() {
        let mut findings = every_kind();
        findings[0].evidence.push(format!("{} \u{1b}[31mred", "é".repeat(333)));
        let text = render_findings(&nvidia(), &findings);
        assert!(text.lines().all(|line| line.chars().count() <= MAX_COLUMNS), "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
    }
}
