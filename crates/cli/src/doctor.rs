//! `gpupool doctor`: what is wrong with the GPUs of this machine, and what to do about it.

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

use crate::devices::{places, read_sources};
use crate::output::{write_json, write_text};

/// How to answer, and what to collect.
#[derive(Args)]
pub(crate) struct Doctor {
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    /// Also collect what a maintainer needs into this archive (.tar.gz), for `gpupool devices --from`.
    ///
    /// Serial numbers, process names and the host's name are replaced in it.
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// Replace UUIDs in the archive too, each by the same other one everywhere.
    #[arg(long, requires = "bundle")]
    redact_uuids: bool,
    /// Replace nothing in the archive.
    #[arg(long, requires = "bundle", conflicts_with = "redact_uuids")]
    no_redact: bool,
    /// Also run tools that wake a GPU that sleeps.
    #[arg(long, requires = "bundle")]
    wake: bool,
}

#[derive(Serialize)]
struct Limit {
    /// What is limited.
    limit: &'static str,
    /// `kernel`, `looking` or `nothing`.
    by: &'static str,
    /// The same for people, with the reason.
    how: String,
}

pub(crate) fn run(arguments: &Doctor) -> anyhow::Result<ExitCode> {
    let places = places();
    let evidence = DoctorEvidence::gather(&places, &|name| std::env::var(name).ok(), read_sources(&places)?);
    let findings = diagnose(&evidence);
    let bundled = arguments.bundle.as_deref().map(|path| bundle(arguments, &places, &evidence, path)).transpose()?;
    let cgroups = CgroupManager::detect();
    let (confinement, limits) = (cgroups.describe(), limits(&cgroups));
    if arguments.json {
        write_json(&json!({"findings": findings, "confinement": confinement, "limits": limits}))?;
    } else {
        let findings = render_findings(&evidence, &findings);
        let limits: String = limits.iter().map(|Limit { limit, how, .. }| format!("  {limit:<12} {how}\n")).collect();
        write_text(&format!("{findings}Jobs are confined by: {confinement}.\nTheir limits are kept:\n{limits}"))?;
    }
    if let Some(said) = bundled {
        eprintln!("{said}");
    }
    let broken = findings.iter().any(|finding| finding.severity == DoctorSeverity::Error);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// By what each limit of a job of this user would be kept.
fn limits(cgroups: &CgroupManager) -> Vec<Limit> {
    let by = |means: &EnforcementMethod| match means {
        EnforcementMethod::Kernel(_) => "kernel",
        EnforcementMethod::Polling { .. } => "looking",
        EnforcementMethod::Unenforced { .. } => "nothing",
    };
    let told = BoundsEnforcement::for_cgroups(cgroups);
    told.bounds().map(|(limit, means)| Limit { limit, by: by(means), how: means.to_string() }).collect()
}

/// Writes the archive, and says what is in it.
fn bundle(arguments: &Doctor, places: &SourcePaths, evidence: &DoctorEvidence, path: &Path) -> anyhow::Result<String> {
    let mut wish = BundleRequest::new(env!("CARGO_PKG_VERSION"), SystemTime::now());
    wish.wake = arguments.wake;
    wish.redact = RedactionOptions { identities: !arguments.no_redact, uuids: arguments.redact_uuids };
    let bundle = DiagnosticBundle::collect(places, evidence, &wish);
    let hint = "give the path of a file that does not exist yet";
    bundle.write_to(path).with_context(|| format!("cannot write {}; {hint}", path.display()))?;
    let path = path.display();
    Ok(format!("wrote {} files to {path}; read it back with: gpupool devices --from {path}", bundle.files().count()))
}
