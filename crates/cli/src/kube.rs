//! `gpupool kube check FILE`: what the pods of a manifest ask for.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use gpupool_core::{Request, RequestBody, RequestedAmount, SelectBody, Share};
use gpupool_kube::{CheckedPod, MAX_MANIFEST_BYTES, PodVerdict};
use serde::Serialize;
use serde_json::{Value, json};

use crate::output::answer;
use crate::units::{count, mib_up};

/// Kubernetes manifests.
#[derive(Subcommand)]
pub(crate) enum Kube {
    /// Say what the pods of a manifest ask for, and what is wrong with it.
    ///
    /// Exits with 0 if every document is fine and with 1 if any is not.
    Check(Check),
}

/// Which manifest, and how to answer.
#[derive(Args)]
pub(crate) struct Check {
    /// The manifest, YAML or JSON; `-` for standard input.
    file: PathBuf,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Kube) -> anyhow::Result<ExitCode> {
    let Kube::Check(check) = command;
    let all = gpupool_kube::check_manifest(&read(&check.file)?);
    let objects: Vec<ObjectAnswer<'_>> = all.iter().map(object).collect();
    let done = answer(check.json, &objects, || all.iter().map(line).collect())?;
    anyhow::ensure!(!all.is_empty(), "{} holds no document; write a Pod into it", check.file.display());
    let fine = all.iter().all(|checked| checked.verdict.is_ok());
    Ok(if fine { done } else { ExitCode::FAILURE })
}

/// Reads no more than is needed to see that there is too much.
fn read(file: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let limit = MAX_MANIFEST_BYTES as u64 + 1;
    if file == Path::new("-") {
        io::stdin().take(limit).read_to_end(&mut bytes).context("cannot read standard input")?;
    } else {
        File::open(file).and_then(|file| file.take(limit).read_to_end(&mut bytes)).with_context(|| {
            format!("cannot read {}; give the path of a manifest, or - for standard input", file.display())
        })?;
    }
    // A cut through the last character of what is too long anyway must not look like a wrong encoding.
    if bytes.len() > MAX_MANIFEST_BYTES {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes)
        .with_context(|| format!("{} is not UTF-8 text; save it as UTF-8 and try again", file.display()))
}

fn line(checked: &CheckedPod) -> String {
    let what = match &checked.verdict {
        Ok(PodVerdict::Gpu(request)) => format!("asks for {}", sentence(request)),
        Ok(PodVerdict::NoGpu) => "asks for no GPU".to_owned(),
        Err(error) => format!("error: {error}"),
    };
    format!("{}: {what}\n", subject(checked))
}

fn subject(checked: &CheckedPod) -> String {
    if checked.kind.is_empty() {
        return format!("document {}", checked.document);
    }
    let kind = checked.kind.to_lowercase();
    let name = checked.name.as_deref().unwrap_or("(no name)");
    // Escaped, because a manifest is somebody else's text and this goes to a terminal.
    format!("{} {}/{}", kind.escape_debug(), checked.namespace.escape_debug(), name.escape_debug())
}

fn sentence(request: &Request) -> String {
    let gpus = count(request.gpus, "GPU");
    let vendor = request.select.vendor.map_or_else(String::new, |vendor| format!(" ({vendor})"));
    let mut said = match request.amount {
        RequestedAmount::Whole => format!("{gpus}{vendor}, whole"),
        RequestedAmount::Both(Share::WHOLE, memory) => {
            format!("{gpus}{vendor}, whole, with at least {memory} of memory")
        }
        RequestedAmount::Share(share) => format!("{share} of {gpus}{vendor}"),
        RequestedAmount::Both(share, memory) => format!("{share} of {gpus}{vendor}, {memory} of its memory"),
        RequestedAmount::Memory(memory) => format!("{memory} of the memory of {gpus}{vendor}"),
        RequestedAmount::Shared => format!("a place on {gpus}{vendor} shared with others"),
    };
    let _ = write!(said, ", isolation {}", request.isolation);
    if !request.cpus.is_zero() {
        let _ = write!(said, ", {} {}", request.cpus, if request.cpus.0 == 1000 { "CPU" } else { "CPUs" });
    }
    if !request.host_memory.is_zero() {
        let _ = write!(said, ", {} MiB host memory", mib_up(request.host_memory));
    }
    if request.priority != 0 {
        let _ = write!(said, ", priority {}", request.priority);
    }
    if let Some(most) = request.max_duration {
        let _ = write!(said, ", for at most {} s", most.0 / 1000);
    }
    said
}

/// One object's answer for programs.
#[derive(Serialize)]
struct ObjectAnswer<'a> {
    document: usize,
    kind: &'a str,
    namespace: &'a str,
    name: Option<&'a str>,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<RequestBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
}

fn object(checked: &CheckedPod) -> ObjectAnswer<'_> {
    let (verdict, request, error) = match &checked.verdict {
        Ok(PodVerdict::Gpu(request)) => ("gpu", Some(body(request)), None),
        Ok(PodVerdict::NoGpu) => ("no_gpu", None, None),
        Err(error) => {
            let (field, value, allowed) = (error.field(), error.value(), error.allowed());
            let (code, message) = (error.code(), error.to_string());
            let body = json!({"code": code, "field": field, "value": value, "allowed": allowed, "message": message});
            ("error", None, Some(body))
        }
    };
    let CheckedPod { document, kind, namespace, name, .. } = checked;
    ObjectAnswer { document: *document, kind, namespace, name: name.as_deref(), verdict, request, error }
}

/// The request as `POST /v1/leases` takes it.
fn body(request: &Request) -> RequestBody {
    let (fraction, memory) = request.amount.share_and_memory();
    RequestBody {
        gpus: Some(request.gpus),
        fraction: fraction.map(Share::as_fraction),
        memory_mib: memory.map(mib_up),
        sharing: request.amount == RequestedAmount::Shared,
        isolation: Some(request.isolation.name().to_owned()),
        select: SelectBody { vendor: request.select.vendor, ..SelectBody::default() },
        cpus: Some(request.cpus.0 as f64 / 1000.0),
        host_memory_mib: Some(mib_up(request.host_memory)),
        owner: Some(request.owner.clone()),
        worker_id: request.worker_id.clone(),
        labels: (*request.labels).clone(),
        priority: Some(request.priority),
        max_duration_secs: request.max_duration.map(|most| most.0 as f64 / 1000.0),
        ..RequestBody::default()
    }
}
