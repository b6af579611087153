//! `gpupool doctor`: diagnoses problems with the GPUs of this machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Context;
use clap::Args;
use gpupool_confine::bounds::{BoundsEnforcement, EnforcementMethod};
use gpupool_confine::cgroup::CgroupManager;
use gpupool_devices::SourcePaths;
use gpupool_devices::doctor::{
    BundleRequest, DiagnosticBundle, DoctorEvidence, DoctorSeverity, RedactionOptions, diagnose, render_findings,
};
use serde::Serialize;
use serde_json::json;

use crate::devices::{read_sources, source_paths};
use crate::output::{print_json, print_text};

/// Options of `gpupool doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write a support archive (.tar.gz) that `gpupool devices --from` can read.
    ///
    /// Serial numbers, process names and the host name are replaced in the archive.
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// Replace UUIDs in the archive as well, each consistently by the same other UUID.
    #[arg(long, requires = "bundle")]
    redact_uuids: bool,
    /// Keep all identities in the archive.
    #[arg(long, requires = "bundle", conflicts_with = "redact_uuids")]
    no_redact: bool,
    /// Run tools for the archive even if they wake a sleeping GPU.
    #[arg(long, requires = "bundle")]
    wake: bool,
}

#[derive(Serialize)]
struct LimitReport {
    /// Limited resource.
    limit: &'static str,
    /// Mechanism: `kernel`, `looking` (polling) or `nothing`.
    by: &'static str,
    /// Description of the mechanism and its reason.
    how: String,
}

pub(crate) fn run(arguments: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let paths = source_paths();
    let evidence = DoctorEvidence::gather(&paths, &|name| std::env::var(name).ok(), read_sources(&paths)?);
    let findings = diagnose(&evidence);
    let bundle_message =
        arguments.bundle.as_deref().map(|path| write_bundle(arguments, &paths, &evidence, path)).transpose()?;
    let cgroups = CgroupManager::detect();
    let (confinement, limits) = (cgroups.describe(), job_limits(&cgroups));
    if arguments.json {
        print_json(&json!({"findings": findings, "confinement": confinement, "limits": limits}))?;
    } else {
        let findings = render_findings(&evidence, &findings);
        let limits: String =
            limits.iter().map(|LimitReport { limit, how, .. }| format!("  {limit:<12} {how}\n")).collect();
        print_text(&format!("{findings}Jobs are confined by: {confinement}.\nLimits on jobs:\n{limits}"))?;
    }
    if let Some(message) = bundle_message {
        eprintln!("{message}");
    }
    let broken = findings.iter().any(|finding| finding.severity == DoctorSeverity::Error);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Describes how each limit of a job of this user would be enforced.
fn job_limits(cgroups: &CgroupManager) -> Vec<LimitReport> {
    let by = |means: &EnforcementMethod| match means {
        EnforcementMethod::Kernel(_) => "kernel",
        EnforcementMethod::Polling { .. } => "looking",
        EnforcementMethod::Unenforced { .. } => "nothing",
    };
    let enforcement = BoundsEnforcement::for_cgroups(cgroups);
    enforcement.bounds().map(|(limit, means)| LimitReport { limit, by: by(means), how: means.to_string() }).collect()
}

/// Writes the archive and returns a message about it.
fn write_bundle(
    arguments: &DoctorArgs,
    paths: &SourcePaths,
    evidence: &DoctorEvidence,
    path: &Path,
) -> anyhow::Result<String> {
    let mut request = BundleRequest::new(env!("CARGO_PKG_VERSION"), SystemTime::now());
    request.wake = arguments.wake;
    request.redact = RedactionOptions { identities: !arguments.no_redact, uuids: arguments.redact_uuids };
    let bundle = DiagnosticBundle::collect(paths, evidence, &request);
    let hint = "choose a file that does not exist yet";
    bundle.write_to(path).with_context(|| format!("cannot write {}; {hint}", path.display()))?;
    let path = path.display();
    Ok(format!("Wrote {} files to {path}. To read them: gpupool devices --from {path}", bundle.files().count()))
}
