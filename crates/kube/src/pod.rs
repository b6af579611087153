//! Relevant fields of the pod in a manifest, for every kind of workload.

use std::collections::BTreeMap;

use crate::check::is_own_annotation;
use crate::error::{KubeError, shortened};
use crate::manifest::NodeCursor;

/// Supported kinds, as listed in errors.
pub(crate) const KINDS_ALLOWED: &str =
    "Pod, Deployment, StatefulSet, DaemonSet, ReplicaSet, Job, CronJob, or a List of these";

/// Kind of workload, its API groups, and the path to its pod template.
struct WorkloadKind {
    name: &'static str,
    groups: &'static [&'static str],
    template: &'static [&'static str],
}

const APPS_GROUPS: &[&str] = &["apps", "extensions"];
const TEMPLATE_PATH: &[&str] = &["spec", "template"];
const WORKLOAD_KINDS: &[WorkloadKind] = &[
    WorkloadKind { name: "Pod", groups: &[""], template: &[] },
    WorkloadKind { name: "Deployment", groups: APPS_GROUPS, template: TEMPLATE_PATH },
    WorkloadKind { name: "StatefulSet", groups: APPS_GROUPS, template: TEMPLATE_PATH },
    WorkloadKind { name: "DaemonSet", groups: APPS_GROUPS, template: TEMPLATE_PATH },
    WorkloadKind { name: "ReplicaSet", groups: APPS_GROUPS, template: TEMPLATE_PATH },
    WorkloadKind { name: "Job", groups: &["batch"], template: TEMPLATE_PATH },
    WorkloadKind { name: "CronJob", groups: &["batch"], template: &["spec", "jobTemplate", "spec", "template"] },
];

/// Kinds without a pod that often share a file with pods: API group, then kinds.
const KINDS_WITHOUT_PODS: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "ConfigMap",
            "Endpoints",
            "LimitRange",
            "Namespace",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "ResourceQuota",
            "Secret",
            "Service",
            "ServiceAccount",
        ],
    ),
    ("autoscaling", &["HorizontalPodAutoscaler"]),
    ("networking.k8s.io", &["Ingress", "IngressClass", "NetworkPolicy"]),
    ("policy", &["PodDisruptionBudget"]),
    ("rbac.authorization.k8s.io", &["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"]),
    ("scheduling.k8s.io", &["PriorityClass"]),
    ("storage.k8s.io", &["StorageClass"]),
];

/// Returns whether the object is of a kind without a pod.
pub(crate) fn has_no_pod(object: &NodeCursor<'_>) -> Result<bool, KubeError> {
    let name = object.text("kind")?.unwrap_or_default();
    let Some((group, _)) = KINDS_WITHOUT_PODS.iter().find(|(_, kinds)| kinds.contains(&name)) else { return Ok(false) };
    Ok(object.text("apiVersion")?.is_none_or(|version| group_of(version) == *group))
}

fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

/// Time at which a container runs; decides how its resources count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContainerRole {
    /// Concurrently with the other containers of the pod.
    App,
    /// Alone, before the other containers.
    Init,
    /// From its position among the init containers until the end.
    Sidecar,
}

/// Container with its resources as text.
#[derive(Debug, Clone)]
pub(crate) struct PodContainer {
    pub(crate) name: String,
    pub(crate) role: ContainerRole,
    pub(crate) resources: ResourceAmounts,
}

/// Requests and limits as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResourceAmounts {
    pub(crate) requests: BTreeMap<String, String>,
    pub(crate) limits: BTreeMap<String, String>,
}

/// Relevant fields of a pod.
#[derive(Debug, Clone)]
pub(crate) struct PodFields {
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) labels: BTreeMap<String, String>,
    /// Containers in the order of their start, init containers first.
    pub(crate) containers: Vec<PodContainer>,
    /// Resources of the pod, which replace the sum of the containers.
    pub(crate) resources: ResourceAmounts,
    pub(crate) priority: i32,
    pub(crate) deadline_secs: Option<u64>,
}

/// Kind, namespace and name of an object, as far as they can be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObjectIdentity {
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: Option<String>,
}

/// Returns the identity of an object without checking it.
pub(crate) fn parse_identity(object: &NodeCursor<'_>) -> ObjectIdentity {
    let metadata = object.get("metadata").ok().flatten();
    let meta = |key| metadata.as_ref().and_then(|at| at.text(key).ok().flatten()).filter(|text| !text.is_empty());
    ObjectIdentity {
        kind: object.text("kind").ok().flatten().unwrap_or_default().to_owned(),
        namespace: meta("namespace").unwrap_or("default").to_owned(),
        name: meta("name").map(str::to_owned),
    }
}

/// Parses the pod that the object is or contains.
pub(crate) fn parse_pod(object: &NodeCursor<'_>) -> Result<PodFields, KubeError> {
    let kind = workload_kind(object)?;
    let mut template = object.clone();
    let mut deadlines = Vec::new();
    for step in kind.template {
        template = template.required(step, "a pod template")?;
        // The deadline of a job ends its pods as well.
        if *step == "spec" && kind.groups == ["batch"] {
            deadlines.extend(active_deadline(&template)?);
        }
    }
    let metadata = template.get("metadata")?;
    let strings = |key, what| metadata.as_ref().map_or_else(|| Ok(BTreeMap::new()), |at| string_map(at, key, what));
    let annotations = strings("annotations", "annotation")?;
    if !kind.template.is_empty() {
        refuse_misplaced(object, kind, &annotations)?;
    }
    let spec = template.required("spec", "a pod spec with at least one container")?;
    deadlines.extend(active_deadline(&spec)?);
    Ok(PodFields {
        annotations,
        labels: strings("labels", "label")?,
        containers: all_containers(&spec)?,
        resources: parse_resources(&spec)?,
        priority: spec.integer("priority", i32::MIN, "a whole number from -2147483648 to 2147483647")?.unwrap_or(0),
        deadline_secs: deadlines.into_iter().min(),
    })
}

fn workload_kind(object: &NodeCursor<'_>) -> Result<&'static WorkloadKind, KubeError> {
    // The kind is checked first because fields of an unknown kind can have any type.
    let name = object.text("kind")?.unwrap_or_default();
    let unknown = |kind: &str| KubeError::Kind { kind: shortened(kind) };
    let kind = WORKLOAD_KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| unknown(name))?;
    match object.text("apiVersion")? {
        Some(version) if !kind.groups.contains(&group_of(version)) => Err(unknown(&format!("{version} {name}"))),
        _ => Ok(kind),
    }
}

fn active_deadline(spec: &NodeCursor<'_>) -> Result<Option<u64>, KubeError> {
    let secs = spec.integer("activeDeadlineSeconds", 1, "a whole number of seconds from 1 to 2147483647")?;
    Ok(secs.map(|secs| u64::from(secs.unsigned_abs())))
}

fn string_map(metadata: &NodeCursor<'_>, key: &str, what: &'static str) -> Result<BTreeMap<String, String>, KubeError> {
    let mut all = BTreeMap::new();
    for (name, at) in metadata.entries(key)? {
        let not_a_string =
            |value: String| KubeError::NotAString { what, name: shortened(name), value: shortened(&value) };
        all.insert(name.to_owned(), at.string()?.map_err(not_a_string)?.to_owned());
    }
    Ok(all)
}

/// Refuses annotations on the workload that its pods do not have, a common mistake.
fn refuse_misplaced(
    object: &NodeCursor<'_>,
    kind: &WorkloadKind,
    pods: &BTreeMap<String, String>,
) -> Result<(), KubeError> {
    let Some(metadata) = object.get("metadata")? else { return Ok(()) };
    let own = string_map(&metadata, "annotations", "annotation")?;
    match own.into_iter().find(|(name, value)| is_own_annotation(name) && pods.get(name) != Some(value)) {
        None => Ok(()),
        Some((name, value)) => Err(KubeError::Misplaced {
            name: shortened(&name),
            value: shortened(&value),
            kind: kind.name.to_owned(),
            path: format!("{}.metadata.annotations", kind.template.join(".")),
        }),
    }
}

fn all_containers(spec: &NodeCursor<'_>) -> Result<Vec<PodContainer>, KubeError> {
    let mut all = Vec::new();
    for at in spec.list("initContainers")? {
        let role =
            if at.text("restartPolicy")? == Some("Always") { ContainerRole::Sidecar } else { ContainerRole::Init };
        all.push(parse_container(&at, role)?);
    }
    spec.required("containers", "a list of at least one container")?;
    let apps = spec.list("containers")?;
    if apps.is_empty() {
        let path = format!("{}.containers", spec.path());
        return Err(KubeError::Field { path, value: "[]".to_owned(), allowed: "a list of at least one container" });
    }
    for at in apps {
        all.push(parse_container(&at, ContainerRole::App)?);
    }
    Ok(all)
}

fn parse_container(at: &NodeCursor<'_>, role: ContainerRole) -> Result<PodContainer, KubeError> {
    let name = at.text("name")?.map_or_else(|| at.path().to_owned(), shortened);
    Ok(PodContainer { name, role, resources: parse_resources(at)? })
}

fn parse_resources(at: &NodeCursor<'_>) -> Result<ResourceAmounts, KubeError> {
    let Some(at) = at.get("resources")? else { return Ok(ResourceAmounts::default()) };
    Ok(ResourceAmounts { requests: parse_amounts(&at, "requests")?, limits: parse_amounts(&at, "limits")? })
}

fn parse_amounts(resources: &NodeCursor<'_>, key: &str) -> Result<BTreeMap<String, String>, KubeError> {
    let amount = |(name, at): (&str, NodeCursor<'_>)| Ok((name.to_owned(), at.quantity()?.to_owned()));
    resources.entries(key)?.into_iter().map(amount).collect()
}
