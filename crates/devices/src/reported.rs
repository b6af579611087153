//! A field as a source reported it: a value, unsupported, or failed this time. Never an invented zero.

use std::borrow::Cow;

use gpupool_core::ReadingField;

/// Reason why a field has no value; empty if the source lacks the field.
pub(crate) type MissingReason = Cow<'static, str>;

/// A field of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reported<T> {
    /// The reported value.
    Value(T),
    /// The device or the source does not support the field.
    Unsupported(MissingReason),
    /// The field is supported, but reading it failed this time.
    Failed(MissingReason),
}

impl<T> Reported<T> {
    /// A field that the source lacks.
    pub const ABSENT: Self = Self::Unsupported(Cow::Borrowed(""));

    /// Returns the value, if any.
    pub const fn value(&self) -> Option<&T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported(_) | Self::Failed(_) => None,
        }
    }

    /// Whether the source lacks the field, so that another source may fill it in.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Unsupported(reason) if reason.is_empty())
    }

    /// Returns the owned value, if any.
    pub(crate) fn into_value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported(_) | Self::Failed(_) => None,
        }
    }

    /// Converts the value.
    pub(crate) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Reported<U> {
        self.and_then(|value| Reported::Value(convert(value)))
    }

    /// Converts the value with a function that may reject it.
    pub(crate) fn and_then<U>(self, convert: impl FnOnce(T) -> Reported<U>) -> Reported<U> {
        match self {
            Self::Value(value) => convert(value),
            Self::Unsupported(reason) => Reported::Unsupported(reason),
            Self::Failed(reason) => Reported::Failed(reason),
        }
    }

    /// Returns this field, or `other` if this field has no value and `other` is more informative.
    pub(crate) fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Value(_), _) => self,
            (_, Self::Value(_)) => other,
            _ if self.is_absent() => other,
            _ => self,
        }
    }

    /// Replaces this field by `other` if this field has no value.
    pub(crate) fn fill(&mut self, other: Self) {
        *self = std::mem::take(self).or(other);
    }

    /// Treats zero as unsupported, for quantities that cannot be zero.
    pub(crate) fn without_zero(self, reason: &'static str) -> Self
    where
        T: Default + PartialEq,
    {
        self.and_then(|value| if value == T::default() { Self::Unsupported(reason.into()) } else { Self::Value(value) })
    }

    /// Converts the field for the core.
    pub(crate) fn to_reading_field(&self) -> ReadingField<T>
    where
        T: Copy,
    {
        match self {
            Self::Value(value) => ReadingField::Value(*value),
            Self::Unsupported(_) => ReadingField::Unsupported,
            Self::Failed(_) => ReadingField::Failed,
        }
    }

    /// Reads a cell of a tool's output with `parse`, unless the cell means that there is no value.
    ///
    /// Text that `parse` rejects is a failure with the text as its reason.
    pub(crate) fn from_cell(cell: &str, parse: impl FnOnce(&str) -> Option<T>) -> Self {
        let cell = cell.trim();
        match MissingKind::classify(cell) {
            Some(MissingKind::Unsupported) => Self::Unsupported(truncate_text(cell)),
            Some(MissingKind::Failed) => Self::Failed(truncate_text(cell)),
            None => parse(cell).map_or_else(|| Self::Failed(truncate_text(cell)), Self::Value),
        }
    }
}

impl<T> Default for Reported<T> {
    fn default() -> Self {
        Self::ABSENT
    }
}

/// Limits a text from outside to [`limits::TEXT_CHARS`](crate::limits::TEXT_CHARS) characters.
pub(crate) fn truncate_text(text: &str) -> MissingReason {
    Cow::Owned(text.chars().take(crate::limits::TEXT_CHARS).collect())
}

/// Meaning of a cell without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissingKind {
    Unsupported,
    Failed,
}

impl MissingKind {
    /// Classifies a cell, or returns `None` if the cell may hold a value.
    ///
    /// Known phrases for "not available" are unsupported; other bracketed text and known error phrases are failures.
    fn classify(cell: &str) -> Option<Self> {
        let bare = cell.trim_start_matches('[').trim_end_matches(']').trim();
        let bracketed = cell.starts_with('[');
        let lower = bare.to_ascii_lowercase();
        const UNSUPPORTED: [&str; 8] = [
            "n/a",
            "na",
            "none",
            "not supported",
            "unsupported",
            "not available",
            "function not found",
            "requested functionality has been deprecated",
        ];
        const FAILURES: [&str; 8] = [
            "err!",
            "error",
            "unknown error",
            "gpu is lost",
            "gpu requires reset",
            "insufficient permissions",
            "unknown",
            "no permission",
        ];
        let has_prefix = lower.starts_with("n/a ") || lower.starts_with("not available ");
        let is_unsupported = bare.is_empty() || UNSUPPORTED.contains(&lower.as_str()) || has_prefix;
        match (is_unsupported, bracketed || FAILURES.contains(&lower.as_str())) {
            (true, _) => Some(Self::Unsupported),
            (false, true) => Some(Self::Failed),
            (false, false) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(cell: &str) -> Reported<u32> {
        Reported::from_cell(cell, |text| text.parse().ok())
    }

    #[test]
    fn a_cell_is_a_value_or_a_reason_for_none() {
        assert_eq!(number(" 42 "), Reported::Value(42));
        for is_unsupported in [
            "[N/A]",
            "N/A",
            "[Not Supported]",
            "[Function Not Found]",
            "N/A (Secondary die)",
            "Not available in WDDM",
            "",
        ] {
            assert!(matches!(number(is_unsupported), Reported::Unsupported(_)), "{is_unsupported}");
        }
        assert!(matches!(
            number("[Requested functionality has been deprecated]"),
            Reported::Unsupported(reason) if reason == "[Requested functionality has been deprecated]"
        ));
        for failed in ["ERR!", "[Unknown Error]", "[GPU requires reset]", "[Insufficient Permissions]", "[new words]"] {
            assert!(matches!(number(failed), Reported::Failed(_)), "{failed}");
        }
        assert_eq!(number("forty"), Reported::Failed("forty".into()));
    }

    #[test]
    fn a_value_of_another_source_fills_a_missing_one() {
        assert_eq!(Reported::ABSENT.or(Reported::Value(1)), Reported::Value(1));
        assert_eq!(Reported::Failed("x".into()).or(Reported::<u8>::ABSENT), Reported::Failed("x".into()));
        assert_eq!(Reported::Value(1).or(Reported::Value(2)), Reported::Value(1));
    }
}
