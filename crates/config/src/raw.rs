//! A value as somebody wrote it, before anybody knows what it should be.

use std::fmt;

use toml::de::DeValue;

use crate::limits;

/// A value as it was written in a flag, a variable or the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Raw {
    /// Text: a variable, a flag, or something in quotes.
    Text(String),
    /// A number of the file, in decimal digits.
    Number(String),
    /// A number of the file written as `0o…`.
    Octal(u32),
    /// `true` or `false`.
    Flag(bool),
    /// A list of texts.
    List(Vec<String>),
    /// Something no setting takes, such as a date or a table.
    Other(&'static str),
}

impl Raw {
    pub(crate) fn from_toml(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Boolean(flag) => Self::Flag(*flag),
            DeValue::Float(number) => Self::Number(number.as_str().to_owned()),
            DeValue::Integer(number) => match number.radix() {
                10 => Self::Number(number.as_str().to_owned()),
                8 => u32::from_str_radix(number.as_str(), 8).map_or(Self::Other("a huge number"), Self::Octal),
                radix => match i64::from_str_radix(number.as_str(), radix) {
                    Ok(number) => Self::Number(number.to_string()),
                    Err(_) => Self::Other("a huge number"),
                },
            },
            DeValue::Array(entries) => {
                let texts = entries.iter().map(|entry| entry.get_ref().as_str().map(str::to_owned));
                texts.collect::<Option<_>>().map_or(Self::Other("a list with something else than texts"), Self::List)
            }
            DeValue::Datetime(_) => Self::Other("a date"),
            DeValue::Table(_) => Self::Other("a table"),
        }
    }

    /// Text or number, as it was written.
    pub(crate) fn words(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Number(text) => Some(text.trim()),
            Self::Octal(_) | Self::Flag(_) | Self::List(_) | Self::Other(_) => None,
        }
    }

    /// Text only: where a number is meant as a name it stands in quotes.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text.trim()),
            _ => None,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.text().is_some_and(str::is_empty)
    }
}

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{:?}", shortened(text)),
            Self::Number(number) => f.write_str(&shortened(number)),
            Self::Octal(number) => write!(f, "0o{number:o}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::List(entries) => write!(f, "{}", shortened(&format!("{entries:?}"))),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// At most so many characters of `text` as a message repeats.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(limits::QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
