//! Why a manifest cannot be a request: what is wrong, where, and what is allowed.

use gpupool_core::FieldError;

use crate::check::KNOWN;
use crate::limits::SHOWN_CHARS;
use crate::pod::KINDS_ALLOWED;

/// Something in a manifest that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KubeError {
    /// More than is read.
    #[error("the manifest has more than {limit} {what}; split it into several files")]
    TooLarge {
        /// Of what there is too much.
        what: &'static str,
        /// How much is read.
        limit: usize,
    },
    /// Neither YAML nor JSON.
    #[error("{reason}{}", at(.place))]
    Malformed {
        /// Line and column, both counted from 1, where they are known.
        place: Option<(u64, u64)>,
        /// What the parser says.
        reason: String,
    },
    /// Not a pod, and nothing that carries one.
    #[error("kind: {kind:?} is not allowed, it must be one of {KINDS_ALLOWED}")]
    Kind {
        /// What it is, with its API group where that is the reason.
        kind: String,
    },
    /// A field of the manifest that is missing or not what Kubernetes says it is.
    #[error("{path}: {value} is not allowed, it must be {allowed}")]
    Field {
        /// Where, from the top of the object: `spec.containers[0].resources`.
        path: String,
        /// What is there.
        value: String,
        /// What may be there.
        allowed: &'static str,
    },
    /// An annotation or label whose value is a number or a boolean.
    #[error("{what} {name}: {value} is not a string, which Kubernetes rejects; quote it: {name}: \"{value}\"")]
    NotAString {
        /// `annotation` or `label`.
        what: &'static str,
        name: String,
        value: String,
    },
    /// An annotation's value.
    #[error("annotation {name}: {value:?} is not allowed, it must be {allowed}")]
    Annotation { name: &'static str, value: String, allowed: &'static str },
    /// A `kaiwo.ai/gpu-*` annotation that nobody knows.
    #[error("annotation {name}: unknown{}", hint(.nearest))]
    UnknownAnnotation {
        name: String,
        value: String,
        /// The known name it resembles, if there is one.
        nearest: Option<&'static str>,
    },
    /// An annotation on the workload that its pods do not carry.
    #[error("annotation {name}: {value:?} is on the {kind} itself, which its pods never see; move it to {path}")]
    Misplaced { name: String, value: String, kind: String, path: String },
    /// A container's resource.
    #[error("container {container}: resource {resource}: {value:?} is not allowed, it must be {allowed}")]
    Resource { container: String, resource: String, value: String, allowed: &'static str },
    /// What containers ask for one by one is fine, what they ask for together is not.
    #[error("resource {resource}: {value} is not allowed, {allowed}")]
    Together {
        /// The resource's name, or names.
        resource: String,
        /// Who asks for what.
        value: String,
        allowed: &'static str,
    },
    /// An annotation and a resource that cannot both be meant.
    #[error("annotation {annotation}: {annotated:?} contradicts resource {resource}: {requested:?}; {allowed}")]
    Contradiction {
        annotation: &'static str,
        annotated: String,
        resource: &'static str,
        requested: String,
        /// What to write instead.
        allowed: String,
    },
    /// The request as a whole.
    #[error(transparent)]
    Request(#[from] FieldError),
}

impl KubeError {
    /// A short name of what is wrong, for programs.
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
            Self::Together { .. } => "invalid_resources",
            Self::Contradiction { .. } => "contradiction",
            Self::Request(_) => "invalid_request",
        }
    }

    /// Which annotation, resource or field.
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
            Self::Resource { resource, .. } | Self::Together { resource, .. } => resource.clone(),
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
            | Self::Together { value, .. } => value.clone(),
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
            Self::UnknownAnnotation { nearest: None, .. } => KNOWN.join(", "),
            Self::Misplaced { path, .. } => format!("in {path}"),
            Self::Field { allowed, .. }
            | Self::Annotation { allowed, .. }
            | Self::Resource { allowed, .. }
            | Self::Together { allowed, .. } => (*allowed).to_owned(),
            Self::Contradiction { allowed, .. } => allowed.clone(),
            Self::Request(error) => error.allowed.to_owned(),
        }
    }
}

/// A value as an error repeats it: not all of it where it is long.
pub(crate) fn shown(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

fn at(place: &Option<(u64, u64)>) -> String {
    place.map_or_else(String::new, |(line, column)| format!(" (line {line}, column {column})"))
}

fn hint(nearest: &Option<&'static str>) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean {nearest}?"),
        None => format!("; it must be one of {}", KNOWN.join(", ")),
    }
}
