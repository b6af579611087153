//! One field as a source told it: a value, unsupported, or failed this time. Never a made-up zero.

use std::borrow::Cow;

use gpupool_core::ReadingField;

/// MissingReason that came with a field that has no value; empty where the source just does not have the field.
pub(crate) type MissingReason = Cow<'static, str>;

/// One field of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reported<T> {
    /// The source said so.
    Value(T),
    /// The device or the source cannot say; in its own words where it used any.
    Unsupported(MissingReason),
    /// It can, and failed to this time.
    Failed(MissingReason),
}

impl<T> Reported<T> {
    /// The source has no such field.
    pub const ABSENT: Self = Self::Unsupported(Cow::Borrowed(""));

    /// The value, where there is one.
    pub const fn value(&self) -> Option<&T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported(_) | Self::Failed(_) => None,
        }
    }

    /// Whether the source has no such field at all, so that another source may fill it in.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Unsupported(words) if words.is_empty())
    }

    /// The value itself, where there is one.
    pub(crate) fn into_value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported(_) | Self::Failed(_) => None,
        }
    }

    /// The value turned into another.
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U) -> Reported<U> {
        self.and_then(|value| Reported::Value(f(value)))
    }

    /// What the value means, where there is one.
    pub(crate) fn and_then<U>(self, f: impl FnOnce(T) -> Reported<U>) -> Reported<U> {
        match self {
            Self::Value(value) => f(value),
            Self::Unsupported(words) => Reported::Unsupported(words),
            Self::Failed(words) => Reported::Failed(words),
        }
    }

    /// What this field is, or else what `other` told.
    pub(crate) fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Value(_), _) => self,
            (_, Self::Value(_)) => other,
            _ if self.is_absent() => other,
            _ => self,
        }
    }

    /// Takes what `other` told where this field has no value.
    pub(crate) fn fill(&mut self, other: Self) {
        *self = std::mem::take(self).or(other);
    }

    /// The same, with zero as unsupported: of some amounts nothing is no answer.
    pub(crate) fn without_zero(self, words: &'static str) -> Self
    where
        T: Default + PartialEq,
    {
        self.and_then(|value| if value == T::default() { Self::Unsupported(words.into()) } else { Self::Value(value) })
    }

    /// The field as the core keeps it.
    pub(crate) fn field(&self) -> ReadingField<T>
    where
        T: Copy,
    {
        match self {
            Self::Value(value) => ReadingField::Value(*value),
            Self::Unsupported(_) => ReadingField::Unsupported,
            Self::Failed(_) => ReadingField::Failed,
        }
    }

    /// A cell of some tool's output, read by `parse` unless it holds the words of a field without a value.
    ///
    /// Text that is neither is a failure that keeps the text.
    pub(crate) fn from_cell(cell: &str, parse: impl FnOnce(&str) -> Option<T>) -> Self {
        let cell = cell.trim();
        match Missing::of(cell) {
            Some(Missing::Unsupported) => Self::Unsupported(truncate_text(cell)),
            Some(Missing::Failed) => Self::Failed(truncate_text(cell)),
            None => parse(cell).map_or_else(|| Self::Failed(truncate_text(cell)), Self::Value),
        }
    }
}

impl<T> Default for Reported<T> {
    fn default() -> Self {
        Self::ABSENT
    }
}

/// Text from outside, kept at a bounded length.
pub(crate) fn truncate_text(text: &str) -> MissingReason {
    Cow::Owned(text.chars().take(crate::limits::TEXT_CHARS).collect())
}

/// What a cell without a value means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Unsupported,
    Failed,
}

impl Missing {
    /// What the words of a cell mean, or `None` where it may be a value.
    ///
    /// Known ways to say "cannot" are unsupported; any other text in brackets, and known error words, are failures.
    fn of(cell: &str) -> Option<Self> {
        let bare = cell.trim_start_matches('[').trim_end_matches(']').trim();
        let bracketed = cell.starts_with('[');
        let lower = bare.to_ascii_lowercase();
        const CANNOT: [&str; 8] = [
            "n/a",
            "na",
            "none",
            "not supported",
            "unsupported",
            "not available",
            "function not found",
            "requested functionality has been deprecated",
        ];
        const FAILED: [&str; 8] = [
            "err!",
            "error",
            "unknown error",
            "gpu is lost",
            "gpu requires reset",
            "insufficient permissions",
            "unknown",
            "no permission",
        ];
        let begins = lower.starts_with("n/a ") || lower.starts_with("not available ");
        let cannot = bare.is_empty() || CANNOT.contains(&lower.as_str()) || begins;
        match (cannot, bracketed || FAILED.contains(&lower.as_str())) {
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
    fn a_cell_is_a_value_or_says_why_not() {
        assert_eq!(number(" 42 "), Reported::Value(42));
        for cannot in [
            "[N/A]",
            "N/A",
            "[Not Supported]",
            "[Function Not Found]",
            "N/A (Secondary die)",
            "Not available in WDDM",
            "",
        ] {
            assert!(matches!(number(cannot), Reported::Unsupported(_)), "{cannot}");
        }
        assert!(matches!(
            number("[Requested functionality has been deprecated]"),
            Reported::Unsupported(words) if words == "[Requested functionality has been deprecated]"
        ));
        for failed in ["ERR!", "[Unknown Error]", "[GPU requires reset]", "[Insufficient Permissions]", "[new words]"] {
            assert!(matches!(number(failed), Reported::Failed(_)), "{failed}");
        }
        assert_eq!(number("forty"), Reported::Failed("forty".into()));
    }

    #[test]
    fn a_value_from_another_source_beats_no_value() {
        assert_eq!(Reported::ABSENT.or(Reported::Value(1)), Reported::Value(1));
        assert_eq!(Reported::Failed("x".into()).or(Reported::<u8>::ABSENT), Reported::Failed("x".into()));
        assert_eq!(Reported::Value(1).or(Reported::Value(2)), Reported::Value(1));
    }
}
