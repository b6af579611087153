//! The pod in a manifest: the few fields that matter here, whatever kind of workload carries it.

use std::collections::BTreeMap;

use crate::check::is_ours;
use crate::error::{KubeError, shown};
use crate::manifest::At;

/// The kinds that are read, as an error lists them.
pub(crate) const KINDS_ALLOWED: &str =
    "Pod, Deployment, StatefulSet, DaemonSet, ReplicaSet, Job, CronJob, or a List of these";

/// A kind, the API groups in which it means what we think, and the way to its pod.
struct Kind {
    name: &'static str,
    groups: &'static [&'static str],
    template: &'static [&'static str],
}

const APPS: &[&str] = &["apps", "extensions"];
const TEMPLATE: &[&str] = &["spec", "template"];
const KINDS: &[Kind] = &[
    Kind { name: "Pod", groups: &[""], template: &[] },
    Kind { name: "Deployment", groups: APPS, template: TEMPLATE },
    Kind { name: "StatefulSet", groups: APPS, template: TEMPLATE },
    Kind { name: "DaemonSet", groups: APPS, template: TEMPLATE },
    Kind { name: "ReplicaSet", groups: APPS, template: TEMPLATE },
    Kind { name: "Job", groups: &["batch"], template: TEMPLATE },
    Kind { name: "CronJob", groups: &["batch"], template: &["spec", "jobTemplate", "spec", "template"] },
];

/// Kinds of Kubernetes itself that often share a file with pods and never carry one: API group, then kind.
const PODLESS: &[(&str, &[&str])] = &[
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

/// Whether `object` is of a kind that carries no pod.
pub(crate) fn carries_no_pod(object: &At<'_>) -> Result<bool, KubeError> {
    let name = object.text("kind")?.unwrap_or_default();
    let Some((group, _)) = PODLESS.iter().find(|(_, kinds)| kinds.contains(&name)) else { return Ok(false) };
    Ok(object.text("apiVersion")?.is_none_or(|version| group_of(version) == *group))
}

fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

/// When a container runs, which decides how its resources count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Together with the other containers of the pod.
    App,
    /// Alone, before them.
    Init,
    /// From its turn among the init containers on, beside everything that follows.
    Sidecar,
}

/// A container and its resources, as written.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) resources: Resources,
}

/// Requests and limits, as written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resources {
    pub(crate) requests: BTreeMap<String, String>,
    pub(crate) limits: BTreeMap<String, String>,
}

/// What matters of a pod.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) labels: BTreeMap<String, String>,
    /// Init containers first, in order, as Kubernetes starts them.
    pub(crate) containers: Vec<Container>,
    /// Resources of the pod as a whole, which replace the containers' sum.
    pub(crate) resources: Resources,
    pub(crate) priority: i32,
    pub(crate) deadline_secs: Option<u64>,
}

/// Kind, namespace and name of an object, as far as they can be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Identity {
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: Option<String>,
}

/// Who `object` is, without judging it.
pub(crate) fn identity(object: &At<'_>) -> Identity {
    let metadata = object.get("metadata").ok().flatten();
    let meta = |key| metadata.as_ref().and_then(|at| at.text(key).ok().flatten()).filter(|text| !text.is_empty());
    Identity {
        kind: object.text("kind").ok().flatten().unwrap_or_default().to_owned(),
        namespace: meta("namespace").unwrap_or("default").to_owned(),
        name: meta("name").map(str::to_owned),
    }
}

/// The pod that `object` is or carries.
pub(crate) fn pod(object: &At<'_>) -> Result<Pod, KubeError> {
    let kind = kind(object)?;
    let mut template = object.clone();
    let mut deadlines = Vec::new();
    for step in kind.template {
        template = template.need(step, "a pod template")?;
        // A job's own deadline ends its pods too.
        if *step == "spec" && kind.groups == ["batch"] {
            deadlines.extend(deadline(&template)?);
        }
    }
    let metadata = template.get("metadata")?;
    let strings = |key, what| metadata.as_ref().map_or_else(|| Ok(BTreeMap::new()), |at| strings(at, key, what));
    let annotations = strings("annotations", "annotation")?;
    if !kind.template.is_empty() {
        refuse_misplaced(object, kind, &annotations)?;
    }
    let spec = template.need("spec", "a pod spec with at least one container")?;
    deadlines.extend(deadline(&spec)?);
    Ok(Pod {
        annotations,
        labels: strings("labels", "label")?,
        containers: containers(&spec)?,
        resources: resources(&spec)?,
        priority: spec.integer("priority", i32::MIN, "a whole number from -2147483648 to 2147483647")?.unwrap_or(0),
        deadline_secs: deadlines.into_iter().min(),
    })
}

fn kind(object: &At<'_>) -> Result<&'static Kind, KubeError> {
    // The kind first: other fields of an unknown kind may be anything.
    let name = object.text("kind")?.unwrap_or_default();
    let unknown = |kind: &str| KubeError::Kind { kind: shown(kind) };
    let kind = KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| unknown(name))?;
    match object.text("apiVersion")? {
        Some(version) if !kind.groups.contains(&group_of(version)) => Err(unknown(&format!("{version} {name}"))),
        _ => Ok(kind),
    }
}

fn deadline(spec: &At<'_>) -> Result<Option<u64>, KubeError> {
    let secs = spec.integer("activeDeadlineSeconds", 1, "a whole number of seconds from 1 to 2147483647")?;
    Ok(secs.map(|secs| u64::from(secs.unsigned_abs())))
}

fn strings(metadata: &At<'_>, key: &str, what: &'static str) -> Result<BTreeMap<String, String>, KubeError> {
    let mut all = BTreeMap::new();
    for (name, at) in metadata.entries(key)? {
        let not_a_string = |value: String| KubeError::NotAString { what, name: shown(name), value: shown(&value) };
        all.insert(name.to_owned(), at.string()?.map_err(not_a_string)?.to_owned());
    }
    Ok(all)
}

/// People write the annotations on the Deployment and wonder why its pods get nothing.
fn refuse_misplaced(object: &At<'_>, kind: &Kind, pods: &BTreeMap<String, String>) -> Result<(), KubeError> {
    let Some(metadata) = object.get("metadata")? else { return Ok(()) };
    let own = strings(&metadata, "annotations", "annotation")?;
    match own.into_iter().find(|(name, value)| is_ours(name) && pods.get(name) != Some(value)) {
        None => Ok(()),
        Some((name, value)) => Err(KubeError::Misplaced {
            name: shown(&name),
            value: shown(&value),
            kind: kind.name.to_owned(),
            path: format!("{}.metadata.annotations", kind.template.join(".")),
        }),
    }
}

fn containers(spec: &At<'_>) -> Result<Vec<Container>, KubeError> {
    let mut all = Vec::new();
    for at in spec.list("initContainers")? {
        let role = if at.text("restartPolicy")? == Some("Always") { Role::Sidecar } else { Role::Init };
        all.push(container(&at, role)?);
    }
    spec.need("containers", "a list of at least one container")?;
    let apps = spec.list("containers")?;
    if apps.is_empty() {
        let path = format!("{}.containers", spec.path());
        return Err(KubeError::Field { path, value: "[]".to_owned(), allowed: "a list of at least one container" });
    }
    for at in apps {
        all.push(container(&at, Role::App)?);
    }
    Ok(all)
}

fn container(at: &At<'_>, role: Role) -> Result<Container, KubeError> {
    let name = at.text("name")?.map_or_else(|| at.path().to_owned(), shown);
    Ok(Container { name, role, resources: resources(at)? })
}

fn resources(at: &At<'_>) -> Result<Resources, KubeError> {
    let Some(at) = at.get("resources")? else { return Ok(Resources::default()) };
    Ok(Resources { requests: amounts(&at, "requests")?, limits: amounts(&at, "limits")? })
}

fn amounts(resources: &At<'_>, key: &str) -> Result<BTreeMap<String, String>, KubeError> {
    let amount = |(name, at): (&str, At<'_>)| Ok((name.to_owned(), at.quantity()?.to_owned()));
    resources.entries(key)?.into_iter().map(amount).collect()
}
