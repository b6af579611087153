//! A manifest's verdicts: what each of its pods asks for, annotations and resources put together.

use std::sync::Arc;

use gpupool_core::device::Vendor;
use gpupool_core::ids::Labels;
use gpupool_core::request::{Isolation, Select};
use gpupool_core::{Amount, Bytes, Millis, Request, Share, limits};

use crate::annotations::{Annotations, FRACTION, ISOLATION, MEMORY, SHARING, Said};
use crate::error::{KubeError, shown};
use crate::manifest;
use crate::node::At;
use crate::pod::{self, Identity, Pod};
use crate::resources::{self, AskedAmount, AskedGpus};

/// One object of a manifest, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// In which document it is, counted from 1; the items of a `List` share theirs. Empty documents do not count.
    pub document: usize,
    /// Its kind; empty where the document cannot be read.
    pub kind: String,
    /// Its namespace, `default` unless said.
    pub namespace: String,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// What one pod of it asks for.
    pub verdict: Result<Verdict, KubeError>,
}

/// What a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// GPUs, whole or in part.
    Gpu(Box<Request>),
    /// No GPU.
    NoGpu,
}

/// Judges every object of a manifest: YAML or JSON, one document or many, lists unrolled. Never panics.
pub fn check(text: &str) -> Vec<Checked> {
    let mut all = Vec::new();
    for (index, document) in manifest::read(text).into_iter().enumerate() {
        match document {
            Ok(node) => unroll(&At::top(&node), index + 1, &mut all),
            Err(error) => all.push(checked(index + 1, Identity::default(), Err(error))),
        }
    }
    all
}

fn unroll(object: &At<'_>, document: usize, all: &mut Vec<Checked>) {
    let identity = pod::identity(object);
    if identity.kind != "List" {
        let verdict = judge(object, &identity);
        return all.push(checked(document, identity, verdict));
    }
    match object.list("items") {
        Ok(items) => items.iter().for_each(|item| unroll(item, document, all)),
        Err(error) => all.push(checked(document, identity, Err(error))),
    }
}

fn checked(document: usize, identity: Identity, verdict: Result<Verdict, KubeError>) -> Checked {
    let Identity { kind, namespace, name } = identity;
    Checked { document, kind, namespace, name, verdict }
}

fn judge(object: &At<'_>, identity: &Identity) -> Result<Verdict, KubeError> {
    if pod::carries_no_pod(object)? {
        return Ok(Verdict::NoGpu);
    }
    let pod = pod::pod(object)?;
    let said = Annotations::read(&pod.annotations)?;
    let asked = resources::gpus(&pod)?;
    let Some((gpus, amount)) = gpus(&said, asked.as_ref())? else { return Ok(Verdict::NoGpu) };
    let vendor = asked.as_ref().map(AskedGpus::vendor);
    let (cpus, host_memory) = resources::host(&pod)?;
    let request = Request {
        gpus,
        amount,
        isolation: isolation(&said, asked.as_ref())?,
        select: Arc::new(Select { vendor, ..Select::default() }),
        cpus,
        host_memory,
        owner: Arc::from(identity.namespace.as_str()),
        worker_id: identity.name.as_deref().map(Arc::from),
        labels: Arc::new(labels(&pod)),
        // Kubernetes allows priorities up to 2·10⁹; beyond our bound all are the most urgent there are.
        priority: pod.priority.clamp(-limits::PRIORITY, limits::PRIORITY),
        max_duration: pod.deadline_secs.map(Millis::from_secs),
        ..Request::default()
    };
    request.validate()?;
    Ok(Verdict::Gpu(Box::new(request)))
}

/// How many GPUs and how much of each; `None` where none is asked for.
fn gpus(said: &Annotations, asked: Option<&AskedGpus>) -> Result<Option<(u16, Amount)>, KubeError> {
    let memory = said.memory.as_ref().map(|memory| memory.value);
    let Some(asked) = asked else { return annotated(said) };
    match asked.amount {
        AskedAmount::None => none(said, asked),
        AskedAmount::Whole(count) => whole(said, asked, count).map(Some),
        AskedAmount::Thousandths(1000) => whole(said, asked, 1).map(Some),
        AskedAmount::Thousandths(count) => {
            let share = Share(count);
            match &said.fraction {
                Some(fraction) if fraction.value != share => {
                    let fix = format!("write {FRACTION}: \"{share}\", or leave one of them out");
                    Err(contradiction(FRACTION, fraction, asked, fix))
                }
                _ => Ok(Some((1, part(share, memory)))),
            }
        }
    }
}

/// What the annotations ask for by themselves: always a part of one GPU, or one GPU.
fn annotated(said: &Annotations) -> Result<Option<(u16, Amount)>, KubeError> {
    let memory = said.memory.as_ref().map(|memory| memory.value);
    match (&said.fraction, memory) {
        (Some(fraction), memory) => Ok(Some((1, part(fraction.value, memory)))),
        (None, Some(memory)) => Ok(Some((1, Amount::Memory(memory)))),
        (None, None) if said.sharing.is_some() => Ok(Some((1, Amount::Shared))),
        (None, None) => match &said.isolation {
            Some(isolation) if isolation.value != Isolation::None => Err(KubeError::Annotation {
                name: ISOLATION,
                value: shown(&isolation.text),
                allowed: "on a pod that asks for a GPU: add kaiwo.ai/gpu-fraction, kaiwo.ai/gpu-memory, \
                          kaiwo.ai/gpu-sharing or a resource amd.com/gpu or nvidia.com/gpu",
            }),
            _ => Ok(None),
        },
    }
}

/// A resource of 0 says "no GPU" as clearly as an annotation says the opposite.
fn none(said: &Annotations, asked: &AskedGpus) -> Result<Option<(u16, Amount)>, KubeError> {
    let fix = "leave the resource out, or ask for 1..=16 whole GPUs or 100..=1000 thousandths".to_owned();
    match (&said.fraction, &said.memory, &said.sharing) {
        (Some(fraction), _, _) => Err(contradiction(FRACTION, fraction, asked, fix)),
        (_, Some(memory), _) => Err(contradiction(MEMORY, memory, asked, fix)),
        (_, _, Some(sharing)) => Err(contradiction(SHARING, sharing, asked, fix)),
        (None, None, None) => annotated(said),
    }
}

fn whole(said: &Annotations, asked: &AskedGpus, count: u16) -> Result<(u16, Amount), KubeError> {
    let resource = asked.resource;
    match (&said.fraction, &said.memory, &said.sharing) {
        (Some(fraction), _, _) if count > 1 || fraction.value != Share::WHOLE => {
            let fix = format!(
                "write {resource}: {} for that part of one GPU, or leave {FRACTION} out for whole GPUs",
                fraction.value.0
            );
            Err(contradiction(FRACTION, fraction, asked, fix))
        }
        (_, _, Some(sharing)) => {
            let fix = format!(
                "whole GPUs are not shared; leave the resource out and give a {FRACTION} or {MEMORY}, or leave {SHARING} \
                 out"
            );
            Err(contradiction(SHARING, sharing, asked, fix))
        }
        (_, memory, _) => Ok((count, part(Share::WHOLE, memory.as_ref().map(|memory| memory.value)))),
    }
}

fn part(share: Share, memory: Option<Bytes>) -> Amount {
    match memory {
        Some(memory) => Amount::Both(share, memory),
        None if share == Share::WHOLE => Amount::Whole,
        None => Amount::Share(share),
    }
}

fn isolation(said: &Annotations, asked: Option<&AskedGpus>) -> Result<Isolation, KubeError> {
    match (&said.isolation, asked) {
        (None, _) => Ok(Isolation::None),
        (Some(isolation), Some(asked))
            if asked.vendor() == Vendor::Amd && matches!(isolation.value, Isolation::Mps | Isolation::Mig) =>
        {
            let fix = "AMD GPUs have neither mps nor mig, they can do none or time-slicing".to_owned();
            Err(contradiction(ISOLATION, isolation, asked, fix))
        }
        (Some(isolation), _) => Ok(isolation.value),
    }
}

fn contradiction<T>(annotation: &'static str, said: &Said<T>, asked: &AskedGpus, allowed: String) -> KubeError {
    KubeError::Contradiction {
        annotation,
        annotated: shown(&said.text),
        resource: asked.resource,
        requested: asked.requested(),
        allowed,
    }
}

fn labels(pod: &Pod) -> Labels {
    pod.labels.iter().map(|(key, value)| (Arc::from(key.as_str()), Arc::from(value.as_str()))).collect()
}
