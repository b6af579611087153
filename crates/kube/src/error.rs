//! Errors of a manifest.

use gpupool_core::FieldError;

use crate::check::KNOWN_ANNOTATIONS;
use crate::limits::MAX_SHOWN_CHARS;
use crate::pod::KINDS_ALLOWED;

/// Error in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KubeError {
    /// The manifest exceeds a limit.
    #[error("the manifest has more than {limit} {what}; split it into several files")]
    TooLarge {
        /// Unit of the limit.
        what: &'static str,
        /// Limit.
        limit: usize,
    },
    /// The text is neither YAML nor JSON.
    #[error("{reason}{}", location_suffix(.place))]
    Malformed {
        /// Line and column, from 1, if known.
        place: Option<(u64, u64)>,
        /// Message of the parser.
        reason: String,
    },
    /// The object is not a pod and contains none.
    #[error("kind: {kind:?} is not supported; it must be one of {KINDS_ALLOWED}")]
    Kind {
        /// Kind, with its API group if that is the reason.
        kind: String,
    },
    /// A field is missing or invalid.
    #[error("{path}: {value} is not allowed; it must be {allowed}")]
    Field {
        /// Path from the top of the object, such as `spec.containers[0].resources`.
        path: String,
        /// Value of the field.
        value: String,
        /// Allowed values.
        allowed: &'static str,
    },
    /// The value of an annotation or label is a number or boolean.
    #[error("{what} {name}: {value} is not a string, and Kubernetes rejects it; quote it: {name}: \"{value}\"")]
    NotAString {
        /// `annotation` or `label`.
        what: &'static str,
        name: String,
        value: String,
    },
    /// The value of an annotation is invalid.
    #[error("annotation {name}: {value:?} is not allowed; it must be {allowed}")]
    Annotation { name: &'static str, value: String, allowed: &'static str },
    /// Unknown `kaiwo.ai/gpu-*` annotation.
    #[error("annotation {name}: unknown{}", suggestion_suffix(.nearest))]
    UnknownAnnotation {
        name: String,
        value: String,
        /// Known annotation that it resembles.
        nearest: Option<&'static str>,
    },
    /// The annotation is on the workload instead of its pods.
    #[error("annotation {name}: {value:?} is on the {kind}, not on its pods; move it to {path}")]
    Misplaced { name: String, value: String, kind: String, path: String },
    /// The value of a container's resource is invalid.
    #[error("container {container}: resource {resource}: {value:?} is not allowed; it must be {allowed}")]
    Resource { container: String, resource: String, value: String, allowed: &'static str },
    /// The resources of the containers are valid one by one, but not together.
    #[error("resource {resource}: {value} is not allowed; {allowed}")]
    CombinedResources {
        /// Name of the resource, or names.
        resource: String,
        /// Requests of the containers.
        value: String,
        allowed: &'static str,
    },
    /// An annotation and a resource contradict each other.
    #[error("annotation {annotation}: {annotated:?} contradicts resource {resource}: {requested:?}; {allowed}")]
    Contradiction {
        annotation: &'static str,
        annotated: String,
        resource: &'static str,
        requested: String,
        /// Correction.
        allowed: String,
    },
    /// The request as a whole is invalid.
    #[error(transparent)]
    Request(#[from] FieldError),
}

impl KubeError {
    /// Returns the stable code of the error.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "too_large",
            Self::Malformed { .. } => "malformed",
            Self::Kind { .. } => "unknown_kind",
            Self::Field { .. } => "invalid_field",
            Self::NotAString { .. } => "not_a_string",
            Self::Annotation { .. } => "invalid_annotation",
            Self::UnknownAnnotation { .. } => "unknown_annotation",
            Self::Misplaced { .. } => "misplaced_annotation",
            Self::Resource { .. } => "invalid_resource",
            Self::CombinedResources { .. } => "invalid_resources",
            Self::Contradiction { .. } => "contradiction",
            Self::Request(_) => "invalid_request",
        }
    }

    /// Returns the annotation, resource or field.
    pub fn field(&self) -> String {
        match self {
            Self::TooLarge { what, .. } => (*what).to_owned(),
            Self::Malformed { place: Some((line, column)), .. } => format!("line {line}, column {column}"),
            Self::Malformed { place: None, .. } => "manifest".to_owned(),
            Self::Kind { .. } => "kind".to_owned(),
            Self::Field { path, .. } => path.clone(),
            Self::NotAString { name, .. } | Self::UnknownAnnotation { name, .. } | Self::Misplaced { name, .. } => {
                name.clone()
            }
            Self::Annotation { name, .. } => (*name).to_owned(),
            Self::Resource { resource, .. } | Self::CombinedResources { resource, .. } => resource.clone(),
            Self::Contradiction { annotation, resource, .. } => format!("{annotation}, {resource}"),
            Self::Request(error) => error.field.to_owned(),
        }
    }

    pub fn value(&self) -> String {
        match self {
            Self::TooLarge { limit, .. } => format!("more than {limit}"),
            Self::Malformed { .. } => String::new(),
            Self::Kind { kind } => kind.clone(),
            Self::Field { value, .. }
            | Self::NotAString { value, .. }
            | Self::Annotation { value, .. }
            | Self::UnknownAnnotation { value, .. }
            | Self::Misplaced { value, .. }
            | Self::Resource { value, .. }
            | Self::CombinedResources { value, .. } => value.clone(),
            Self::Contradiction { annotated, requested, .. } => format!("{annotated}, {requested}"),
            Self::Request(error) => error.value.clone(),
        }
    }

    pub fn allowed(&self) -> String {
        match self {
            Self::TooLarge { limit, .. } => format!("at most {limit}"),
            Self::Malformed { .. } => "YAML or JSON".to_owned(),
            Self::Kind { .. } => KINDS_ALLOWED.to_owned(),
            Self::NotAString { .. } => "a string: quote it".to_owned(),
            Self::UnknownAnnotation { nearest: Some(nearest), .. } => (*nearest).to_owned(),
            Self::UnknownAnnotation { nearest: None, .. } => KNOWN_ANNOTATIONS.join(", "),
            Self::Misplaced { path, .. } => format!("in {path}"),
            Self::Field { allowed, .. }
            | Self::Annotation { allowed, .. }
            | Self::Resource { allowed, .. }
            | Self::CombinedResources { allowed, .. } => (*allowed).to_owned(),
            Self::Contradiction { allowed, .. } => allowed.clone(),
            Self::Request(error) => error.allowed.to_owned(),
        }
    }
}

/// Shortens a value for a message.
pub(crate) fn shortened(value: &str) -> String {
    match value.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

fn location_suffix(place: &Option<(u64, u64)>) -> String {
    place.map_or_else(String::new, |(line, column)| format!(" (line {line}, column {column})"))
}

fn suggestion_suffix(nearest: &Option<&'static str>) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean {nearest}?"),
        None => format!("; it must be one of {}", KNOWN_ANNOTATIONS.join(", ")),
    }
}
