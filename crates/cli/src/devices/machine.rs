//! Reading this machine, or one that is made up.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use gpupool_devices::attribution::Attributor;
use gpupool_devices::detect::Choice;
use gpupool_devices::doctor::SourceResult;
use gpupool_devices::probe::Probe;
use gpupool_devices::report::ErrorReport;
use gpupool_devices::simulated::{Simulated, Spec, real_clock};
use gpupool_devices::{Places, Snapshot, Source, SourceError};

use super::Answer;

/// How long a source may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long one run of a tool may take: shorter, so that the tool is what is said to hang.
const TOOL_DEADLINE: Duration = Duration::from_secs(8);

/// Where this machine keeps things, as far as the environment says otherwise.
pub(crate) fn places() -> Places {
    Places::from_env(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

/// What each source of this machine answers, each on a thread of its own.
pub(crate) fn read_sources(places: &Places) -> anyhow::Result<Vec<SourceResult>> {
    let choice: Choice = std::env::var("GPUPOOL_BACKEND").unwrap_or_default().parse()?;
    let start = |source| Probe::start(source, DEADLINE).context("cannot start a thread to read devices");
    let mut probes =
        choice.sources(places, TOOL_DEADLINE).into_iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    probes.iter_mut().for_each(Probe::ask);
    let answer = |probe: &mut Probe| {
        let answer = probe.answer();
        SourceResult { kind: answer.kind, result: answer.result }
    };
    Ok(probes.iter_mut().map(answer).collect())
}

/// The devices of this machine, with the processes on them named.
pub(crate) fn read() -> anyhow::Result<Answer> {
    let places = places();
    let mut answer = together(read_sources(&places)?);
    Attributor::new(&places).attribute(&mut answer.snapshot);
    Ok(answer)
}

/// Devices that do not exist.
pub(crate) fn simulated(spec: &str) -> anyhow::Result<Answer> {
    let (mut source, _control) = Simulated::new(&Spec::load(spec)?, real_clock());
    Ok(Answer { snapshot: source.read()?, error: None })
}

/// All sources as one machine. One that is not here is no trouble; one that fails is a warning beside devices of
/// others, and the error where there is no device at all.
fn together(results: Vec<SourceResult>) -> Answer {
    let mut snapshot = Snapshot::default();
    let mut errors = Vec::new();
    for SourceResult { kind, result } in results {
        match result {
            Ok(found) => snapshot.merge(found),
            Err(SourceError::NotHere { .. }) => {}
            Err(error) => errors.push((kind, error)),
        }
    }
    let mut error = None;
    for (kind, failed) in errors {
        let code = failed.code();
        let message = format!("{kind}: {failed}; `gpupool doctor` says what to do");
        if snapshot.devices.is_empty() && error.is_none() {
            error = Some(ErrorReport { code, message });
        } else {
            snapshot.warn(message);
        }
    }
    Answer { snapshot, error }
}
