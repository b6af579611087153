//! Replacement strings: which argument stands in their place, and what of it.

use bytes::Bytes;

/// A replacement string, such as `{}`, `{2/.}` or `{#}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replacement {
    pub which: Which,
    pub part: Part,
}

/// What stands in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The arguments of all sources.
    All,
    /// The argument of one source, from 0.
    Source(usize),
    /// The task's number, from 1.
    Sequence,
    /// The worker's number, from 1, known when it runs.
    Slot,
}

/// What of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it: `{}`.
    Whole,
    /// Without its extension: `{.}`.
    Stem,
    /// Without its directory: `{/}`.
    Name,
    /// Its directory: `{//}`.
    Directory,
    /// Without directory and extension: `{/.}`.
    NameStem,
}

impl Replacement {
    /// All of the arguments.
    pub const ALL: Self = Self { which: Which::All, part: Part::Whole };

    /// The replacement string a text begins with, and its length.
    pub fn at(text: &[u8]) -> Option<(Self, usize)> {
        let end = text.iter().take(LONGEST).position(|byte| *byte == b'}')?;
        let inside = text[..end].strip_prefix(b"{")?;
        Self::parse(inside).map(|replacement| (replacement, end + 1))
    }

    fn parse(inside: &[u8]) -> Option<Self> {
        let whole = |which| Some(Self { which, part: Part::Whole });
        match inside {
            b"#" => return whole(Which::Sequence),
            b"%" => return whole(Which::Slot),
            _ => {}
        }
        let digits = inside.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let which = match std::str::from_utf8(&inside[..digits]).ok()? {
            "" => Which::All,
            number => Which::Source(number.parse::<usize>().ok()?.checked_sub(1)?),
        };
        let part = match &inside[digits..] {
            b"" => Part::Whole,
            b"." => Part::Stem,
            b"/" => Part::Name,
            b"//" => Part::Directory,
            b"/." => Part::NameStem,
            _ => return None,
        };
        Some(Self { which, part })
    }

    /// What stands in its place, one for each argument it means; the slot is not known here.
    pub fn values(self, arguments: &[Bytes], seq: u64) -> Vec<Bytes> {
        match self.which {
            Which::All => arguments.iter().map(|argument| self.part.of(argument)).collect(),
            Which::Source(nth) => arguments.get(nth).map(|argument| self.part.of(argument)).into_iter().collect(),
            Which::Sequence => vec![Bytes::from(seq.to_string())],
            Which::Slot => Vec::new(),
        }
    }
}

/// Numbers of sources have at most so many digits.
const LONGEST: usize = 8;

impl Part {
    fn of(self, argument: &Bytes) -> Bytes {
        let name_at = argument.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        // Without a dot, or with nothing behind it, there is no extension.
        let dot = argument[name_at..].iter().rposition(|byte| *byte == b'.').map(|dot| name_at + dot);
        let stem_end = dot.filter(|dot| dot + 1 < argument.len()).unwrap_or(argument.len());
        match self {
            Self::Whole => argument.clone(),
            Self::Stem => argument.slice(..stem_end),
            Self::Name => argument.slice(name_at..),
            Self::NameStem => argument.slice(name_at..stem_end),
            Self::Directory => directory(argument, name_at),
        }
    }
}

fn directory(argument: &Bytes, name_at: usize) -> Bytes {
    let length = argument[..name_at].iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    match (name_at, length) {
        (0, _) => Bytes::from_static(b"."),
        (_, 0) => Bytes::from_static(b"/"),
        (_, length) => argument.slice(..length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(of: &str, argument: &'static str) -> String {
        let (replacement, length) = Replacement::at(of.as_bytes()).unwrap_or_else(|| panic!("{of} is known"));
        assert_eq!(length, of.len());
        let values = replacement.values(&[Bytes::from_static(b"first"), Bytes::from_static(argument.as_bytes())], 3);
        String::from_utf8(values[0].to_vec()).unwrap()
    }

    #[test]
    fn parts_of_paths_are_those_people_expect() {
        for (argument, stem, name, directory, name_stem) in [
            ("a/b.tar.gz", "a/b.tar", "b.tar.gz", "a", "b.tar"),
            ("b", "b", "b", ".", "b"),
            ("/b.x", "/b", "b.x", "/", "b"),
            ("a.b/c", "a.b/c", "c", "a.b", "c"),
            ("a//b.", "a//b.", "b.", "a", "b."),
            ("a/", "a/", "", "a", ""),
            ("", "", "", ".", ""),
        ] {
            let parts = ["{2.}", "{2/}", "{2//}", "{2/.}"].map(|of| value(of, argument));
            assert_eq!(parts, [stem, name, directory, name_stem], "{argument:?}");
        }
        assert_eq!((value("{#}", ""), value("{1}", ""), value("{}", "")), ("3".into(), "first".into(), "first".into()));
    }

    #[test]
    fn what_is_no_replacement_string_stays() {
        for text in ["{print}", "{", "{}x}"[3..].into(), "{0}", "{1/./}", "{-1}", "{99999999999}", "{ }", "x{}"] {
            assert_eq!(Replacement::at(text.as_bytes()), None, "{text}");
        }
    }
}
