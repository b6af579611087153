//! A manifest's verdicts: what each of its pods asks for, annotations and resources put together.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{
    Bytes, DeviceSelector, IsolationLevel, Labels, Millis, Request, RequestedAmount, Share, Vendor, limits,
};

use crate::error::{KubeError, shown};
use crate::limits::MIN_THOUSANDTHS;
use crate::manifest::At;
use crate::pod::{Identity, Pod};
use crate::resources::{AskedAmount, AskedGpus, Quantity};
use crate::{manifest, pod, resources};

/// One object of a manifest, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedPod {
    /// In which document it is, counted from 1; the items of a `List` share theirs. Empty documents do not count.
    pub document: usize,
    /// Its kind; empty where the document cannot be read.
    pub kind: String,
    /// Its namespace, `default` unless said.
    pub namespace: String,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// What one pod of it asks for.
    pub verdict: Result<PodVerdict, KubeError>,
}

/// What a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodVerdict {
    /// GPUs, whole or in part.
    Gpu(Box<Request>),
    /// No GPU.
    NoGpu,
}

/// Judges every object of a manifest: YAML or JSON, one document or many, lists unrolled. Never panics.
pub fn check_manifest(text: &str) -> Vec<CheckedPod> {
    let mut all = Vec::new();
    for (index, document) in manifest::read(text).into_iter().enumerate() {
        match document {
            Ok(node) => unroll(&At::top(&node), index + 1, &mut all),
            Err(error) => all.push(checked(index + 1, Identity::default(), Err(error))),
        }
    }
    all
}

fn unroll(object: &At<'_>, document: usize, all: &mut Vec<CheckedPod>) {
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

fn checked(document: usize, identity: Identity, verdict: Result<PodVerdict, KubeError>) -> CheckedPod {
    let Identity { kind, namespace, name } = identity;
    CheckedPod { document, kind, namespace, name, verdict }
}

fn judge(object: &At<'_>, identity: &Identity) -> Result<PodVerdict, KubeError> {
    if pod::carries_no_pod(object)? {
        return Ok(PodVerdict::NoGpu);
    }
    let pod = pod::pod(object)?;
    let said = Annotations::read(&pod.annotations)?;
    let asked = resources::gpus(&pod)?;
    let Some((gpus, amount)) = gpus(&said, asked.as_ref())? else { return Ok(PodVerdict::NoGpu) };
    let vendor = asked.as_ref().map(AskedGpus::vendor);
    let (cpus, host_memory) = resources::host(&pod)?;
    let request = Request {
        gpus,
        amount,
        isolation: isolation(&said, asked.as_ref())?,
        select: Arc::new(DeviceSelector { vendor, ..DeviceSelector::default() }),
        cpus,
        host_memory,
        owner: Arc::from(identity.namespace.as_str()),
        worker_id: identity.name.as_deref().map(Arc::from),
        labels: Arc::new(labels(&pod)),
        // Kubernetes allows priorities up to 2·10⁹; beyond our bound all are the most urgent there are.
        priority: pod.priority.clamp(-limits::MAX_PRIORITY, limits::MAX_PRIORITY),
        max_duration: pod.deadline_secs.map(Millis::from_secs),
        ..Request::default()
    };
    request.validate()?;
    Ok(PodVerdict::Gpu(Box::new(request)))
}

/// How many GPUs and how much of each; `None` where none is asked for.
fn gpus(said: &Annotations, asked: Option<&AskedGpus>) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
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
                    let fix = format!("write {FRACTION_ANNOTATION}: \"{share}\", or leave one of them out");
                    Err(contradiction(FRACTION_ANNOTATION, fraction, asked, fix))
                }
                _ => Ok(Some((1, part(share, memory)))),
            }
        }
    }
}

/// What the annotations ask for by themselves: always a part of one GPU, or one GPU.
fn annotated(said: &Annotations) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
    let memory = said.memory.as_ref().map(|memory| memory.value);
    match (&said.fraction, memory) {
        (Some(fraction), memory) => Ok(Some((1, part(fraction.value, memory)))),
        (None, Some(memory)) => Ok(Some((1, RequestedAmount::Memory(memory)))),
        (None, None) if said.sharing.is_some() => Ok(Some((1, RequestedAmount::Shared))),
        (None, None) => match &said.isolation {
            Some(isolation) if isolation.value != IsolationLevel::None => Err(KubeError::Annotation {
                name: ISOLATION_ANNOTATION,
                value: shown(&isolation.text),
                allowed: "on a pod that asks for a GPU: add kaiwo.ai/gpu-fraction, kaiwo.ai/gpu-memory, \
                          kaiwo.ai/gpu-sharing or a resource amd.com/gpu or nvidia.com/gpu",
            }),
            _ => Ok(None),
        },
    }
}

/// A resource of 0 says "no GPU" as clearly as an annotation says the opposite.
fn none(said: &Annotations, asked: &AskedGpus) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
    let fix = "leave the resource out, or ask for 1..=16 whole GPUs or 100..=1000 thousandths".to_owned();
    match (&said.fraction, &said.memory, &said.sharing) {
        (Some(fraction), _, _) => Err(contradiction(FRACTION_ANNOTATION, fraction, asked, fix)),
        (_, Some(memory), _) => Err(contradiction(MEMORY_ANNOTATION, memory, asked, fix)),
        (_, _, Some(sharing)) => Err(contradiction(SHARING_ANNOTATION, sharing, asked, fix)),
        (None, None, None) => annotated(said),
    }
}

fn whole(said: &Annotations, asked: &AskedGpus, count: u16) -> Result<(u16, RequestedAmount), KubeError> {
    let resource = asked.resource;
    match (&said.fraction, &said.memory, &said.sharing) {
        (Some(fraction), _, _) if count > 1 || fraction.value != Share::WHOLE => {
            let fix = format!(
                "write {resource}: {} for that part of one GPU, or leave {FRACTION_ANNOTATION} out for whole GPUs",
                fraction.value.0
            );
            Err(contradiction(FRACTION_ANNOTATION, fraction, asked, fix))
        }
        (_, _, Some(sharing)) => {
            let fix = format!(
                "whole GPUs are not shared; leave the resource out and give a {FRACTION_ANNOTATION} or {MEMORY_ANNOTATION}, or leave {SHARING_ANNOTATION} \
                 out"
            );
            Err(contradiction(SHARING_ANNOTATION, sharing, asked, fix))
        }
        (_, memory, _) => Ok((count, part(Share::WHOLE, memory.as_ref().map(|memory| memory.value)))),
    }
}

fn part(share: Share, memory: Option<Bytes>) -> RequestedAmount {
    match memory {
        Some(memory) => RequestedAmount::Both(share, memory),
        None if share == Share::WHOLE => RequestedAmount::Whole,
        None => RequestedAmount::Share(share),
    }
}

fn isolation(said: &Annotations, asked: Option<&AskedGpus>) -> Result<IsolationLevel, KubeError> {
    match (&said.isolation, asked) {
        (None, _) => Ok(IsolationLevel::None),
        (Some(isolation), Some(asked))
            if asked.vendor() == Vendor::Amd
                && matches!(isolation.value, IsolationLevel::Mps | IsolationLevel::Mig) =>
        {
            let fix = "AMD GPUs have neither mps nor mig, they can do none or time-slicing".to_owned();
            Err(contradiction(ISOLATION_ANNOTATION, isolation, asked, fix))
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

// The `kaiwo.ai/gpu-*` annotations of a pod.

/// How much of one GPU: 0.1 to 1.0.
pub const FRACTION_ANNOTATION: &str = "kaiwo.ai/gpu-fraction";
/// How much memory of each GPU, in MiB.
pub const MEMORY_ANNOTATION: &str = "kaiwo.ai/gpu-memory";
/// Whether a place on a shared GPU will do.
pub const SHARING_ANNOTATION: &str = "kaiwo.ai/gpu-sharing";
/// How well parts of a GPU are kept apart.
pub const ISOLATION_ANNOTATION: &str = "kaiwo.ai/gpu-isolation";
pub(crate) const KNOWN: [&str; 4] = [FRACTION_ANNOTATION, MEMORY_ANNOTATION, SHARING_ANNOTATION, ISOLATION_ANNOTATION];

const PREFIX: &str = "kaiwo.ai/gpu";
const FRACTION_ALLOWED: &str = "a decimal number from 0.1 to 1.0, such as 0.5";
const MEMORY_ALLOWED: &str = "a whole number of MiB above 0, such as 4000, 4000Mi or 4Gi";
const ISOLATION_ALLOWED: &str = "none, time-slicing, mps or mig";

/// What a pod's annotations say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Annotations {
    pub(crate) fraction: Option<Said<Share>>,
    pub(crate) memory: Option<Said<Bytes>>,
    /// Set where sharing is true.
    pub(crate) sharing: Option<Said<()>>,
    pub(crate) isolation: Option<Said<IsolationLevel>>,
}

/// A value, and how it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Said<T> {
    pub(crate) value: T,
    pub(crate) text: String,
}

impl Annotations {
    /// Reads those that are ours; the others are none of our business.
    pub(crate) fn read(all: &BTreeMap<String, String>) -> Result<Self, KubeError> {
        let mut annotations = Self::default();
        for (name, text) in all.iter().filter(|(name, _)| is_ours(name)) {
            match name.as_str() {
                FRACTION_ANNOTATION => {
                    annotations.fraction = Some(said(FRACTION_ANNOTATION, text, fraction(text), FRACTION_ALLOWED)?)
                }
                MEMORY_ANNOTATION => {
                    annotations.memory = Some(said(MEMORY_ANNOTATION, text, memory(text), MEMORY_ALLOWED)?)
                }
                ISOLATION_ANNOTATION => {
                    let isolation = text.trim().parse().ok();
                    annotations.isolation = Some(said(ISOLATION_ANNOTATION, text, isolation, ISOLATION_ALLOWED)?);
                }
                SHARING_ANNOTATION => {
                    let sharing = text.eq_ignore_ascii_case("true");
                    annotations.sharing = sharing.then(|| Said { value: (), text: text.clone() });
                }
                _ => {
                    let nearest = nearest(name);
                    return Err(KubeError::UnknownAnnotation { name: shown(name), value: shown(text), nearest });
                }
            }
        }
        Ok(annotations)
    }
}

/// Whether an annotation is meant for us, its name right or wrong.
pub(crate) fn is_ours(name: &str) -> bool {
    let begins = name.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX));
    begins || nearest(name).is_some_and(|known| distance(name, known) <= 2)
}

fn said<T>(name: &'static str, text: &str, value: Option<T>, allowed: &'static str) -> Result<Said<T>, KubeError> {
    match value {
        Some(value) => Ok(Said { value, text: text.to_owned() }),
        None => Err(KubeError::Annotation { name, value: shown(text), allowed }),
    }
}

/// Plain decimals only, within 0.1 to 1.0 as written, kept to the nearest thousandth as in a request to the pool.
fn fraction(text: &str) -> Option<Share> {
    let text = text.trim();
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if (whole.is_empty() && decimals.is_empty()) || !digits(whole) || !digits(decimals) {
        return None;
    }
    let decimals = decimals.trim_end_matches('0');
    let whole = whole.trim_start_matches('0');
    if whole.len() > 1 {
        return None;
    }
    let (kept, rest) = decimals.split_at(decimals.len().min(3));
    let thousandths: u64 = format!("{whole}{kept:0<3}").parse().ok()?;
    let one = u64::from(Share::WHOLE.0);
    if thousandths < MIN_THOUSANDTHS || thousandths > one || (thousandths == one && !rest.is_empty()) {
        return None;
    }
    let rounded = thousandths + u64::from(rest.as_bytes().first().is_some_and(|digit| *digit >= b'5'));
    Some(Share(rounded as u32))
}

/// A bare integer is MiB; a binary suffix says its own unit. A decimal one (`4G`) is refused: it may be meant either
/// way, and so is anything that is not whole MiB.
fn memory(text: &str) -> Option<Bytes> {
    let text = text.trim();
    let bytes = if text.bytes().all(|byte| byte.is_ascii_digit()) {
        Bytes::from_mib(text.parse().ok()?)?
    } else if text.starts_with(|c: char| c.is_ascii_digit()) && text.ends_with('i') {
        Bytes(u64::try_from(text.parse::<Quantity>().ok()?.whole()?).ok()?)
    } else {
        return None;
    };
    let whole_mib = Bytes::from_mib(bytes.as_mib()) == Some(bytes);
    (whole_mib && !bytes.is_zero()).then_some(bytes)
}

/// The known name that `name` resembles most, if it resembles any.
fn nearest(name: &str) -> Option<&'static str> {
    // A name far longer than ours resembles none, and need not be measured.
    if name.len() > 64 {
        return None;
    }
    let closest = KNOWN.into_iter().min_by_key(|known| distance(name, known))?;
    (distance(name, closest) <= 4).then_some(closest)
}

/// How many letters must be added, left out or changed to make `a` into `b`, case apart.
fn distance(a: &str, b: &str) -> usize {
    strsim::levenshtein(&a.to_ascii_lowercase(), &b.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Annotations, KubeError> {
        Annotations::read(&BTreeMap::from([(name.to_owned(), value.to_owned())]))
    }

    #[test]
    fn a_fraction_is_kept_in_thousandths() {
        for (text, thousandths) in [
            ("0.1", 100),
            ("0.5", 500),
            (" 0.25 ", 250),
            ("0.333", 333),
            ("0.5000", 500),
            (".5", 500),
            ("1", 1000),
            ("1.", 1000),
            ("1.000", 1000),
            ("00.75", 750),
        ] {
            assert_eq!(fraction(text), Some(Share(thousandths)), "{text:?}");
        }
    }

    #[test]
    fn a_fraction_that_is_out_of_range_or_no_plain_decimal_is_refused() {
        for text in [
            "", " ", ".", "0", "0.0", "0.099", "0.09", "1.001", "1.5", "10", "-0.5", "+0.5", "0.0999", "1.0001",
            "5e-1", "1e0", "NaN", "inf", "0,5", "50%", "1/2", "0.5.0", "0x1", "٠.٥", "0.5 0", "500m",
        ] {
            assert_eq!(fraction(text), None, "{text:?}");
        }
    }

    #[test]
    fn memory_is_mib_unless_a_binary_suffix_says_otherwise() {
        for (text, mib) in
            [("4000", 4000), (" 1 ", 1), ("4000Mi", 4000), ("4Gi", 4096), ("1.5Gi", 1536), ("1048576Ki", 1024)]
        {
            assert_eq!(memory(text).map(Bytes::as_mib), Some(mib), "{text:?}");
        }
        for text in [
            "",
            "0",
            "0Gi",
            "-1",
            "+1",
            "1.5",
            "4G",
            "4000M",
            "4GB",
            "512Ki",
            "1e3",
            "4 Gi",
            "99999999999999999999",
            "17592186044416",
            "16Ei",
            "i",
        ] {
            assert_eq!(memory(text), None, "{text:?}");
        }
    }

    #[test]
    fn sharing_is_true_only_for_true_in_any_case() {
        for text in ["true", "TRUE", "True"] {
            assert!(read(SHARING_ANNOTATION, text).unwrap().sharing.is_some(), "{text}");
        }
        for text in ["", "yes", "1", "false", "t", " true"] {
            assert_eq!(read(SHARING_ANNOTATION, text), Ok(Annotations::default()), "{text}");
        }
    }

    #[test]
    fn an_unknown_annotation_suggests_the_known_one_it_resembles() {
        for (name, known) in [
            ("kaiwo.ai/gpu-fractoin", Some(FRACTION_ANNOTATION)),
            ("kaiwo.ai/gpu_memory", Some(MEMORY_ANNOTATION)),
            ("Kaiwo.ai/GPU-sharing", Some(SHARING_ANNOTATION)),
            ("kawio.ai/gpu-isolation", Some(ISOLATION_ANNOTATION)),
            ("kaiwo.ai/gpu-colour-of-the-fan", None),
        ] {
            match read(name, "1") {
                Err(KubeError::UnknownAnnotation { nearest, .. }) => assert_eq!(nearest, known, "{name}"),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn annotations_of_others_are_left_alone() {
        for name in ["kaiwo.ai/queue", "kaiwo.ai/", "gpu-fraction", "example.com/gpu-fraction", "ü", ""] {
            assert_eq!(read(name, "1"), Ok(Annotations::default()), "{name}");
        }
    }
}
