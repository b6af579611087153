//! What is wrong with the GPUs of a machine, why, and what to do about it.
//!
//! Three steps, each of its own kind: [`DoctorEvidence::gather`] looks at the machine without waking or opening a device,
//! [`diagnose`] is a pure function from evidence to [`DoctorFinding`]s, and [`render_findings`] puts them into words for a terminal.
//! [`DiagnosticBundle`] packs what somebody elsewhere needs to see the same machine.

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

/// No line is longer.
const COLUMNS: usize = 100;
/// Where the text of a finding starts, after the longest severity.
const INDENT: usize = 9;

/// The findings, worst first, and what was looked at.
pub fn render_findings(evidence: &DoctorEvidence, findings: &[DoctorFinding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let head = format!("{} [{}]", finding.summary, finding.code);
        put(&mut text, &format!("{:<INDENT$}", finding.severity), INDENT, &head);
        for line in &finding.evidence {
            put(&mut text, &format!("{:INDENT$}- ", ""), INDENT + 2, line);
        }
        put(&mut text, &format!("{:INDENT$}> ", ""), INDENT + 2, &finding.remedy);
        text.push('\n');
    }
    if findings.is_empty() {
        text.push_str("Nothing is wrong.\n");
    }
    put(&mut text, "", 0, &format!("Looked at: {}.", looked_at(evidence).join("; ")));
    text
}

/// What the evidence rests on.
fn looked_at(evidence: &DoctorEvidence) -> Vec<String> {
    fn count<T>(told: &Reported<Vec<T>>) -> String {
        told.value().map_or("unknown".to_owned(), |list| list.len().to_string())
    }
    let mut looked = vec![
        format!("display adapters and accelerators on the PCI bus: {}", count(&evidence.gpus)),
        format!("device nodes: {}", count(&evidence.nodes)),
    ];
    if let Some(modules) = evidence.modules.value().filter(|modules| !modules.is_empty()) {
        looked.push(format!("loaded: {}", modules.iter().cloned().collect::<Vec<_>>().join(", ")));
    }
    for answer in &evidence.sources {
        looked.push(match &answer.result {
            Ok(snapshot) => format!("{}: {} devices", answer.kind, snapshot.devices.len()),
            Err(error) => format!("{}: {}", answer.kind, error.code()),
        });
    }
    if let Some(cgroup) = evidence.confinement.cgroup.value() {
        let limits: Vec<&str> =
            ["cpu", "memory", "pids", "dmem"].into_iter().filter(|name| cgroup.controllers.contains(*name)).collect();
        looked.push(format!("{} with {}", cgroup.mode.name(), limits.join(", ")));
    }
    if evidence.in_container() {
        looked.push("from inside a container".to_owned());
    }
    if let Some(release) = evidence.kernel_release.value() {
        looked.push(format!("Linux {release}"));
    }
    looked
}

/// Adds `words` after `head`, broken at `COLUMNS` and continued at `indent`. What is no printable text becomes a space.
fn put(text: &mut String, head: &str, indent: usize, words: &str) {
    let room = COLUMNS - indent;
    let mut line = String::new();
    let mut lines = Vec::new();
    let printable: String = words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    for word in printable.split_whitespace().flat_map(|word| pieces(word, room)) {
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

/// A word that is too long for a line, in pieces.
fn pieces(word: &str, room: usize) -> Vec<String> {
    let characters: Vec<char> = word.chars().collect();
    characters.chunks(room).map(|piece| piece.iter().collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::diagnose;
    use crate::doctor::findings::tests::samples::{amd, every_kind, nvidia};

    #[test]
    fn a_healthy_machine_is_told_what_was_looked_at() {
        let text = render_findings(&nvidia(), &[]);
        assert!(text.starts_with("Nothing is wrong.\nLooked at: "), "{text}");
        assert!(text.contains("nvml: 2 devices") && text.contains("cgroup v2 with cpu, memory, pids"), "{text}");
    }

    #[test]
    fn a_finding_has_its_severity_evidence_and_remedy() {
        let mut evidence = amd();
        evidence.tools.values_mut().for_each(|path| *path = None);
        let text = render_findings(&evidence, &diagnose(&evidence));
        let expected = "note     AMD's compute driver is here (/dev/kfd) but neither amd-smi nor rocm-smi.\n\
        \x20        [rocm_tools_missing]\n\
        \x20        - /dev/kfd exists\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("\n         > Nothing needs them"), "{text}");
    }

    #[test]
    fn no_line_is_wider_than_a_hundred_columns_and_no_control_character_gets_through() {
        let mut findings = every_kind();
        findings[0].evidence.push(format!("{} \u{1b}[31mred", "é".repeat(333)));
        let text = render_findings(&nvidia(), &findings);
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
    }
}
