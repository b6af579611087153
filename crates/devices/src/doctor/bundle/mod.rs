//! One file with what somebody elsewhere needs to see a machine as it is: what tools print, the kernel's files, findings.
//!
//! A machine that needs a report may be broken, so everything here is bounded: the number and size of files, the time
//! a tool or a single file may take, and the time of it all. What is missing is listed with the reason. There is no
//! environment, no command line and no user name in it; serial numbers, process names and host names are replaced
//! unless asked otherwise.

mod pile;
mod redact;
mod tools;
mod trees;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde_json::json;

use crate::doctor::evidence::Evidence;
use crate::doctor::{examine, render};
use crate::kernel_file;
use crate::places::Places;

use pile::{Entry, Pile};
pub use redact::Redact;

/// What a bundle should be like.
#[derive(Debug, Clone)]
pub struct Wish {
    /// The version of gpupool that makes it.
    pub version: String,
    /// When it is made.
    pub created: SystemTime,
    /// How long one run of a tool may take.
    pub tool_deadline: Duration,
    /// How long one file of the kernel may take.
    pub file_deadline: Duration,
    /// How long all of it may take; what is not there by then is left out.
    pub deadline: Duration,
    /// Whether tools are run although that wakes a sleeping GPU.
    pub wake: bool,
    /// What is replaced.
    pub redact: Redact,
}

impl Wish {
    /// The usual bundle.
    pub fn new(version: impl Into<String>, created: SystemTime) -> Self {
        Self {
            version: version.into(),
            created,
            tool_deadline: Duration::from_secs(30),
            file_deadline: Duration::from_secs(5),
            deadline: Duration::from_secs(120),
            wake: false,
            redact: Redact::default(),
        }
    }
}

/// Files for a report, by name.
#[derive(Debug)]
pub struct Bundle {
    files: BTreeMap<String, Vec<u8>>,
    created_unix_secs: u64,
}

/// Says what is in a bundle and what is not.
#[derive(Serialize)]
struct Manifest<'a> {
    gpupool: &'a str,
    created_unix_secs: u64,
    kernel: Option<&'a String>,
    redacted: Redact,
    notes: &'a [&'a str],
    nodes: Vec<String>,
    files: Vec<serde_json::Value>,
    missing: Vec<serde_json::Value>,
}

impl Bundle {
    /// Collects what there is on the machine at `places`, of which `evidence` was gathered before.
    pub fn collect(places: &Places, evidence: &Evidence, wish: &Wish) -> Self {
        let mut pile = Pile::new(Instant::now() + wish.deadline, wish.file_deadline);
        let findings = examine(evidence);
        let in_json = serde_json::to_vec_pretty(&findings).unwrap_or_default();
        pile.add("findings.json", "the doctor", in_json);
        pile.add("report.txt", "the doctor", render(evidence, &findings).into_bytes());
        trees::copy(&mut pile, places, evidence);
        tools::run(&mut pile, evidence, wish);
        let host = kernel_file::text(&places.proc.join("sys/kernel/hostname"));
        let (mut files, missing) = pile.into_parts();
        redact::redact(&mut files, host.value().map(String::as_str), wish.redact);
        Self::pack(files, &missing, evidence, wish)
    }

    /// The files, by name.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// Writes a compressed archive that only its owner can read; a file that is already there is not replaced.
    pub fn write_to(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        let mut archive = tar::Builder::new(GzEncoder::new(&mut file, Compression::default()));
        for (name, bytes) in self.files() {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            header.set_mtime(self.created_unix_secs);
            archive.append_data(&mut header, name, bytes)?;
        }
        archive.into_inner()?.finish()?.flush()?;
        file.persist_noclobber(path).map_err(|error| error.error)?;
        Ok(())
    }

    fn pack(files: BTreeMap<String, Entry>, missing: &[(String, String)], evidence: &Evidence, wish: &Wish) -> Self {
        const NAMES_REPLACED: &str = "nvidia-smi prints the paths of programs; they were replaced";
        const NAMES_KEPT: &str = "nvidia-smi prints the paths of programs; they were kept as asked";
        const ASLEEP: &str = "of a device that was asleep only its identity and power state were read";
        let names = if wish.redact.identities { NAMES_REPLACED } else { NAMES_KEPT };
        let created_unix_secs = wish.created.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let node = |node: &crate::doctor::Node| {
            format!("/dev/{} {:04o} {}:{} {:?}", node.name, node.mode, node.uid, node.gid, node.access)
        };
        let listed = |(name, entry): (&String, &Entry)| json!({ "name": name, "source": entry.source, "bytes": entry.bytes.len() });
        let manifest = Manifest {
            gpupool: &wish.version,
            created_unix_secs,
            kernel: evidence.kernel_release.value(),
            redacted: wish.redact,
            notes: &[names, ASLEEP],
            nodes: evidence.nodes().iter().map(node).collect(),
            files: files.iter().map(listed).collect(),
            missing: missing.iter().map(|(name, why)| json!({ "name": name, "why": why })).collect(),
        };
        let manifest = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
        let mut files: BTreeMap<String, Vec<u8>> = files.into_iter().map(|(name, entry)| (name, entry.bytes)).collect();
        files.insert("manifest.json".to_owned(), manifest);
        Self { files, created_unix_secs }
    }
}
