//! Findings, for people and for programs.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use super::{Finding, Severity};

/// A paragraph for each finding; a sentence where there is none.
pub fn findings_as_text(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "Nothing wrong was found.\n".to_owned();
    }
    let mut text = String::new();
    for Finding { severity, code, what, place, remedy } in findings {
        // Writing to a text cannot fail.
        let _ = writeln!(text, "{}: {what} [{code}]\n  where: {place}\n  to do: {remedy}", severity.name());
    }
    text
}

/// `{findings: [{severity, code, what, place, remedy}]}`.
pub fn findings_as_json(findings: &[Finding]) -> Json {
    json!({ "findings": findings })
}

impl Severity {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}
