//! Checks a manifest: combines the annotations and resources of each pod into a request.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{
    Bytes, DeviceSelector, IsolationLevel, Labels, Millis, Request, RequestedAmount, Share, Vendor, limits,
};

use crate::error::{KubeError, shortened};
use crate::limits::MIN_THOUSANDTHS;
use crate::manifest::NodeCursor;
use crate::pod::{ObjectIdentity, PodFields};
use crate::resources::{GpuResource, Quantity, ResourceAmount};
use crate::{manifest, pod, resources};

/// Checked object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedPod {
    /// Number of the document, from 1, without empty documents; the items of a `List` share theirs.
    pub document: usize,
    /// Kind; empty if the document cannot be read.
    pub kind: String,
    /// Namespace; `default` if not set.
    pub namespace: String,
    /// Name, if set.
    pub name: Option<String>,
    /// Request of one pod, or the error.
    pub verdict: Result<PodVerdict, KubeError>,
}

/// Request of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodVerdict {
    /// Request for GPUs, whole or in part.
    Gpu(Box<Request>),
    /// No GPU.
    NoGpu,
}

/// Checks every object of a manifest: YAML or JSON, one document or many, with lists expanded. Never panics.
pub fn check_manifest(text: &str) -> Vec<CheckedPod> {
    let mut all = Vec::new();
    for (index, document) in manifest::parse_documents(text).into_iter().enumerate() {
        match document {
            Ok(node) => unroll(&NodeCursor::top(&node), index + 1, &mut all),
            Err(error) => all.push(checked_pod(index + 1, ObjectIdentity::default(), Err(error))),
        }
    }
    all
}

fn unroll(object: &NodeCursor<'_>, document: usize, all: &mut Vec<CheckedPod>) {
    let identity = pod::parse_identity(object);
    if identity.kind != "List" {
        let verdict = check_object(object, &identity);
        return all.push(checked_pod(document, identity, verdict));
    }
    match object.list("items") {
        Ok(items) => items.iter().for_each(|item| unroll(item, document, all)),
        Err(error) => all.push(checked_pod(document, identity, Err(error))),
    }
}

fn checked_pod(document: usize, identity: ObjectIdentity, verdict: Result<PodVerdict, KubeError>) -> CheckedPod {
    let ObjectIdentity { kind, namespace, name } = identity;
    CheckedPod { document, kind, namespace, name, verdict }
}

fn check_object(object: &NodeCursor<'_>, identity: &ObjectIdentity) -> Result<PodVerdict, KubeError> {
    if pod::has_no_pod(object)? {
        return Ok(PodVerdict::NoGpu);
    }
    let pod = pod::parse_pod(object)?;
    let annotations = Annotations::read(&pod.annotations)?;
    let resource = resources::pod_gpus(&pod)?;
    let Some((gpus, amount)) = requested_gpus(&annotations, resource.as_ref())? else {
        return Ok(PodVerdict::NoGpu);
    };
    let vendor = resource.as_ref().map(GpuResource::vendor);
    let (cpus, host_memory) = resources::host_resources(&pod)?;
    let request = Request {
        gpus,
        amount,
        isolation: requested_isolation(&annotations, resource.as_ref())?,
        select: Arc::new(DeviceSelector { vendor, ..DeviceSelector::default() }),
        cpus,
        host_memory,
        owner: Arc::from(identity.namespace.as_str()),
        worker_id: identity.name.as_deref().map(Arc::from),
        labels: Arc::new(pod_labels(&pod)),
        // Kubernetes allows priorities up to 2·10⁹; higher ones become our maximum.
        priority: pod.priority.clamp(-limits::MAX_PRIORITY, limits::MAX_PRIORITY),
        max_duration: pod.deadline_secs.map(Millis::from_secs),
        ..Request::default()
    };
    request.validate()?;
    Ok(PodVerdict::Gpu(Box::new(request)))
}

/// Returns the number of GPUs and the amount of each; `None` if no GPU is requested.
fn requested_gpus(
    annotations: &Annotations,
    resource: Option<&GpuResource>,
) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
    let memory = annotations.memory.as_ref().map(|memory| memory.value);
    let Some(resource) = resource else { return from_annotations(annotations) };
    match resource.amount {
        ResourceAmount::None => check_no_gpu(annotations, resource),
        ResourceAmount::Whole(count) => whole_gpus(annotations, resource, count).map(Some),
        ResourceAmount::Thousandths(1000) => whole_gpus(annotations, resource, 1).map(Some),
        ResourceAmount::Thousandths(count) => {
            let share = Share(count);
            match &annotations.fraction {
                Some(fraction) if fraction.value != share => {
                    let fix = format!("write {FRACTION_ANNOTATION}: \"{share}\", or remove one of them");
                    Err(contradiction(FRACTION_ANNOTATION, fraction, resource, fix))
                }
                _ => Ok(Some((1, amount_of(share, memory)))),
            }
        }
    }
}

/// Returns the request of the annotations alone: one GPU or a part of one.
fn from_annotations(annotations: &Annotations) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
    let memory = annotations.memory.as_ref().map(|memory| memory.value);
    match (&annotations.fraction, memory) {
        (Some(fraction), memory) => Ok(Some((1, amount_of(fraction.value, memory)))),
        (None, Some(memory)) => Ok(Some((1, RequestedAmount::Memory(memory)))),
        (None, None) if annotations.sharing.is_some() => Ok(Some((1, RequestedAmount::Shared))),
        (None, None) => match &annotations.isolation {
            Some(isolation) if isolation.value != IsolationLevel::None => Err(KubeError::Annotation {
                name: ISOLATION_ANNOTATION,
                value: shortened(&isolation.text),
                allowed: "on a pod that requests a GPU: add kaiwo.ai/gpu-fraction, kaiwo.ai/gpu-memory, \
                          kaiwo.ai/gpu-sharing or a resource amd.com/gpu or nvidia.com/gpu",
            }),
            _ => Ok(None),
        },
    }
}

/// Handles a resource of 0, which contradicts annotations that request a GPU.
fn check_no_gpu(
    annotations: &Annotations,
    resource: &GpuResource,
) -> Result<Option<(u16, RequestedAmount)>, KubeError> {
    let fix = "remove the resource, or request 1..=16 whole GPUs or 100..=1000 thousandths".to_owned();
    match (&annotations.fraction, &annotations.memory, &annotations.sharing) {
        (Some(fraction), _, _) => Err(contradiction(FRACTION_ANNOTATION, fraction, resource, fix)),
        (_, Some(memory), _) => Err(contradiction(MEMORY_ANNOTATION, memory, resource, fix)),
        (_, _, Some(sharing)) => Err(contradiction(SHARING_ANNOTATION, sharing, resource, fix)),
        (None, None, None) => from_annotations(annotations),
    }
}

fn whole_gpus(
    annotations: &Annotations,
    resource: &GpuResource,
    count: u16,
) -> Result<(u16, RequestedAmount), KubeError> {
    let name = resource.name;
    match (&annotations.fraction, &annotations.memory, &annotations.sharing) {
        (Some(fraction), _, _) if count > 1 || fraction.value != Share::WHOLE => {
            let fix = format!(
                "write {name}: {} for that fraction of one GPU, or remove {FRACTION_ANNOTATION} for whole GPUs",
                fraction.value.0
            );
            Err(contradiction(FRACTION_ANNOTATION, fraction, resource, fix))
        }
        (_, _, Some(sharing)) => {
            let fix = format!(
                "whole GPUs are not shared; remove the resource and set {FRACTION_ANNOTATION} or {MEMORY_ANNOTATION}, or remove \
                 {SHARING_ANNOTATION}"
            );
            Err(contradiction(SHARING_ANNOTATION, sharing, resource, fix))
        }
        (_, memory, _) => Ok((count, amount_of(Share::WHOLE, memory.as_ref().map(|memory| memory.value)))),
    }
}

fn amount_of(share: Share, memory: Option<Bytes>) -> RequestedAmount {
    match memory {
        Some(memory) => RequestedAmount::Both(share, memory),
        None if share == Share::WHOLE => RequestedAmount::Whole,
        None => RequestedAmount::Share(share),
    }
}

fn requested_isolation(annotations: &Annotations, resource: Option<&GpuResource>) -> Result<IsolationLevel, KubeError> {
    match (&annotations.isolation, resource) {
        (None, _) => Ok(IsolationLevel::None),
        (Some(isolation), Some(resource))
            if resource.vendor() == Vendor::Amd
                && matches!(isolation.value, IsolationLevel::Mps | IsolationLevel::Mig) =>
        {
            let fix = "AMD GPUs support neither mps nor mig; use none or time-slicing".to_owned();
            Err(contradiction(ISOLATION_ANNOTATION, isolation, resource, fix))
        }
        (Some(isolation), _) => Ok(isolation.value),
    }
}

fn contradiction<T>(
    annotation: &'static str,
    annotations: &AnnotationValue<T>,
    resource: &GpuResource,
    allowed: String,
) -> KubeError {
    KubeError::Contradiction {
        annotation,
        annotated: shortened(&annotations.text),
        resource: resource.name,
        requested: resource.requested(),
        allowed,
    }
}

fn pod_labels(pod: &PodFields) -> Labels {
    pod.labels.iter().map(|(key, value)| (Arc::from(key.as_str()), Arc::from(value.as_str()))).collect()
}

// The `kaiwo.ai/gpu-*` annotations of a pod.

/// Annotation with the fraction of one GPU: 0.1 to 1.0.
pub const FRACTION_ANNOTATION: &str = "kaiwo.ai/gpu-fraction";
/// Annotation with the memory of each GPU, in MiB.
pub const MEMORY_ANNOTATION: &str = "kaiwo.ai/gpu-memory";
/// Annotation that accepts a shared GPU.
pub const SHARING_ANNOTATION: &str = "kaiwo.ai/gpu-sharing";
/// Annotation with the isolation between leases on one GPU.
pub const ISOLATION_ANNOTATION: &str = "kaiwo.ai/gpu-isolation";
pub(crate) const KNOWN_ANNOTATIONS: [&str; 4] =
    [FRACTION_ANNOTATION, MEMORY_ANNOTATION, SHARING_ANNOTATION, ISOLATION_ANNOTATION];

const ANNOTATION_PREFIX: &str = "kaiwo.ai/gpu";
const FRACTION_ALLOWED: &str = "a decimal number from 0.1 to 1.0, such as 0.5";
const MEMORY_ALLOWED: &str = "a whole number of MiB above 0, such as 4000, 4000Mi or 4Gi";
const ISOLATION_ALLOWED: &str = "none, time-slicing, mps or mig";

/// GPU annotations of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Annotations {
    pub(crate) fraction: Option<AnnotationValue<Share>>,
    pub(crate) memory: Option<AnnotationValue<Bytes>>,
    /// Set if sharing is true.
    pub(crate) sharing: Option<AnnotationValue<()>>,
    pub(crate) isolation: Option<AnnotationValue<IsolationLevel>>,
}

/// Parsed value with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AnnotationValue<T> {
    pub(crate) value: T,
    pub(crate) text: String,
}

impl Annotations {
    /// Reads our annotations and ignores all others.
    pub(crate) fn read(all: &BTreeMap<String, String>) -> Result<Self, KubeError> {
        let mut annotations = Self::default();
        for (name, text) in all.iter().filter(|(name, _)| is_own_annotation(name)) {
            match name.as_str() {
                FRACTION_ANNOTATION => {
                    annotations.fraction =
                        Some(parsed(FRACTION_ANNOTATION, text, parse_fraction(text), FRACTION_ALLOWED)?)
                }
                MEMORY_ANNOTATION => {
                    annotations.memory = Some(parsed(MEMORY_ANNOTATION, text, parse_memory(text), MEMORY_ALLOWED)?)
                }
                ISOLATION_ANNOTATION => {
                    let isolation = text.trim().parse().ok();
                    annotations.isolation = Some(parsed(ISOLATION_ANNOTATION, text, isolation, ISOLATION_ALLOWED)?);
                }
                SHARING_ANNOTATION => {
                    let sharing = text.eq_ignore_ascii_case("true");
                    annotations.sharing = sharing.then(|| AnnotationValue { value: (), text: text.clone() });
                }
                _ => {
                    let nearest = nearest_annotation(name);
                    return Err(KubeError::UnknownAnnotation {
                        name: shortened(name),
                        value: shortened(text),
                        nearest,
                    });
                }
            }
        }
        Ok(annotations)
    }
}

/// Returns whether an annotation is one of ours, possibly misspelled.
pub(crate) fn is_own_annotation(name: &str) -> bool {
    let begins = name.get(..ANNOTATION_PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(ANNOTATION_PREFIX));
    begins || nearest_annotation(name).is_some_and(|known| edit_distance(name, known) <= 2)
}

fn parsed<T>(
    name: &'static str,
    text: &str,
    value: Option<T>,
    allowed: &'static str,
) -> Result<AnnotationValue<T>, KubeError> {
    match value {
        Some(value) => Ok(AnnotationValue { value, text: text.to_owned() }),
        None => Err(KubeError::Annotation { name, value: shortened(text), allowed }),
    }
}

/// Parses a plain decimal from 0.1 to 1.0, rounded to the nearest thousandth.
fn parse_fraction(text: &str) -> Option<Share> {
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

/// Parses memory. A bare integer is MiB; binary suffixes are allowed. Decimal suffixes (`4G`) are refused as ambiguous,
/// and so is anything but whole MiB.
fn parse_memory(text: &str) -> Option<Bytes> {
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

/// Returns the known annotation that `name` resembles, if any.
fn nearest_annotation(name: &str) -> Option<&'static str> {
    // A much longer name resembles none, and need not be measured.
    if name.len() > 64 {
        return None;
    }
    let closest = KNOWN_ANNOTATIONS.into_iter().min_by_key(|known| edit_distance(name, known))?;
    (edit_distance(name, closest) <= 4).then_some(closest)
}

/// Returns the edit distance, ignoring case.
fn edit_distance(a: &str, b: &str) -> usize {
    strsim::levenshtein(&a.to_ascii_lowercase(), &b.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Annotations, KubeError> {
        Annotations::read(&BTreeMap::from([(name.to_owned(), value.to_owned())]))
    }

    #[test]
    fn a_fraction_is_parsed_in_thousandths() {
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
            assert_eq!(parse_fraction(text), Some(Share(thousandths)), "{text:?}");
        }
    }

    #[test]
    fn a_fraction_out_of_range_or_in_another_form_is_refused() {
        for text in [
            "", " ", ".", "0", "0.0", "0.099", "0.09", "1.001", "1.5", "10", "-0.5", "+0.5", "0.0999", "1.0001",
            "5e-1", "1e0", "NaN", "inf", "0,5", "50%", "1/2", "0.5.0", "0x1", "٠.٥", "0.5 0", "500m",
        ] {
            assert_eq!(parse_fraction(text), None, "{text:?}");
        }
    }

    #[test]
    fn memory_is_in_mib_unless_it_has_a_binary_suffix() {
        for (text, mib) in
            [("4000", 4000), (" 1 ", 1), ("4000Mi", 4000), ("4Gi", 4096), ("1.5Gi", 1536), ("1048576Ki", 1024)]
        {
            assert_eq!(parse_memory(text).map(Bytes::as_mib), Some(mib), "{text:?}");
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
            assert_eq!(parse_memory(text), None, "{text:?}");
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
    fn an_unknown_annotation_suggests_the_most_similar_one() {
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
    fn other_annotations_are_ignored() {
        for name in ["kaiwo.ai/queue", "kaiwo.ai/", "gpu-fraction", "example.com/gpu-fraction", "ü", ""] {
            assert_eq!(read(name, "1"), Ok(Annotations::default()), "{name}");
        }
    }
}
