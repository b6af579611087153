//! `gpupool kube check`: reports the GPUs that the pods of a manifest request.

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

use crate::output::print_output;
use crate::units::{mib_rounded_up, plural};

#[derive(Subcommand)]
pub(crate) enum KubeCommand {
    /// Report the GPU request of each pod in a manifest.
    ///
    /// Exits with 1 if a document has an error.
    Check(KubeCheckArgs),
}

/// Options of `gpupool kube check`.
#[derive(Args)]
pub(crate) struct KubeCheckArgs {
    /// Manifest in YAML or JSON; `-` for standard input.
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &KubeCommand) -> anyhow::Result<ExitCode> {
    let KubeCommand::Check(check) = command;
    let all = gpupool_kube::check_manifest(&read_manifest(&check.file)?);
    let objects: Vec<ObjectReport<'_>> = all.iter().map(object_report).collect();
    let done = print_output(check.json, &objects, || all.iter().map(object_line).collect())?;
    anyhow::ensure!(!all.is_empty(), "{} contains no document; add a Pod", check.file.display());
    let fine = all.iter().all(|checked| checked.verdict.is_ok());
    Ok(if fine { done } else { ExitCode::FAILURE })
}

/// Reads the manifest, at most one byte more than the size limit.
fn read_manifest(file: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let limit = MAX_MANIFEST_BYTES as u64 + 1;
    if file == Path::new("-") {
        io::stdin().take(limit).read_to_end(&mut bytes).context("cannot read standard input")?;
    } else {
        File::open(file).and_then(|file| file.take(limit).read_to_end(&mut bytes)).with_context(|| {
            format!("cannot read {}; give the path of a manifest, or - to read standard input", file.display())
        })?;
    }
    // A manifest cut in the middle of a character is too long, not badly encoded.
    if bytes.len() > MAX_MANIFEST_BYTES {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes)
        .with_context(|| format!("{} is not UTF-8 text; save it as UTF-8 and try again", file.display()))
}

fn object_line(checked: &CheckedPod) -> String {
    let verdict = match &checked.verdict {
        Ok(PodVerdict::Gpu(request)) => format!("requests {}", describe_request(request)),
        Ok(PodVerdict::NoGpu) => "requests no GPU".to_owned(),
        Err(error) => format!("error: {error}"),
    };
    format!("{}: {verdict}\n", object_name(checked))
}

fn object_name(checked: &CheckedPod) -> String {
    if checked.kind.is_empty() {
        return format!("document {}", checked.document);
    }
    let kind = checked.kind.to_lowercase();
    let name = checked.name.as_deref().unwrap_or("(no name)");
    // Escaped, because the manifest is foreign text that is printed to a terminal.
    format!("{} {}/{}", kind.escape_debug(), checked.namespace.escape_debug(), name.escape_debug())
}

fn describe_request(request: &Request) -> String {
    let gpus = plural(request.gpus, "GPU");
    let vendor = request.select.vendor.map_or_else(String::new, |vendor| format!(" ({vendor})"));
    let mut text = match request.amount {
        RequestedAmount::Whole => format!("{gpus}{vendor}, whole"),
        RequestedAmount::Both(Share::WHOLE, memory) => {
            format!("{gpus}{vendor}, whole, with at least {memory} of memory")
        }
        RequestedAmount::Share(share) => format!("{share} of {gpus}{vendor}"),
        RequestedAmount::Both(share, memory) => format!("{share} of {gpus}{vendor}, {memory} of its memory"),
        RequestedAmount::Memory(memory) => format!("{memory} of memory on {gpus}{vendor}"),
        RequestedAmount::Shared => format!("an equal share of {gpus}{vendor}"),
    };
    let _ = write!(text, ", isolation {}", request.isolation);
    if !request.cpus.is_zero() {
        let _ = write!(text, ", {} {}", request.cpus, if request.cpus.0 == 1000 { "CPU" } else { "CPUs" });
    }
    if !request.host_memory.is_zero() {
        let _ = write!(text, ", {} MiB host memory", mib_rounded_up(request.host_memory));
    }
    if request.priority != 0 {
        let _ = write!(text, ", priority {}", request.priority);
    }
    if let Some(most) = request.max_duration {
        let _ = write!(text, ", for at most {} s", most.0 / 1000);
    }
    text
}

/// Result for one object, as JSON.
#[derive(Serialize)]
struct ObjectReport<'a> {
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

fn object_report(checked: &CheckedPod) -> ObjectReport<'_> {
    let (verdict, request, error) = match &checked.verdict {
        Ok(PodVerdict::Gpu(request)) => ("gpu", Some(request_body(request)), None),
        Ok(PodVerdict::NoGpu) => ("no_gpu", None, None),
        Err(error) => {
            let (field, value, allowed) = (error.field(), error.value(), error.allowed());
            let (code, message) = (error.code(), error.to_string());
            let body = json!({"code": code, "field": field, "value": value, "allowed": allowed, "message": message});
            ("error", None, Some(body))
        }
    };
    let CheckedPod { document, kind, namespace, name, .. } = checked;
    ObjectReport { document: *document, kind, namespace, name: name.as_deref(), verdict, request, error }
}

/// Converts the request into the body of `POST /v1/leases`.
fn request_body(request: &Request) -> RequestBody {
    let (fraction, memory) = request.amount.share_and_memory();
    RequestBody {
        gpus: Some(request.gpus),
        fraction: fraction.map(Share::as_fraction),
        memory_mib: memory.map(mib_rounded_up),
        sharing: request.amount == RequestedAmount::Shared,
        isolation: Some(request.isolation.name().to_owned()),
        select: SelectBody { vendor: request.select.vendor, ..SelectBody::default() },
        cpus: Some(request.cpus.0 as f64 / 1000.0),
        host_memory_mib: Some(mib_rounded_up(request.host_memory)),
        owner: Some(request.owner.clone()),
        worker_id: request.worker_id.clone(),
        labels: (*request.labels).clone(),
        priority: Some(request.priority),
        max_duration_secs: request.max_duration.map(|most| most.0 as f64 / 1000.0),
        ..RequestBody::default()
    }
}
