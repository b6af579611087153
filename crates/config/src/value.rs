//! What kinds of value settings have: how each is read, what is allowed, and how it is shown. Numbers are in
//! [`crate::amounts`].

use std::path::PathBuf;

use gpupool_core::request::{Isolation, Strategy};
use serde_json::Value as Json;

use crate::limits;
use crate::raw::Raw;
use crate::suggest::nearest;

/// A type a setting can have.
pub(crate) trait Value: Sized {
    /// What narrows it, such as a range.
    type Bounds: 'static;
    /// Whether it is never shown.
    const SECRET: bool = false;

    /// The value `raw` stands for, if it is allowed.
    fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self>;
    /// What is allowed, in words that follow "it must be".
    fn allowed(bounds: &Self::Bounds) -> String;
    /// How it is shown.
    fn shown(&self) -> Json;
    /// What was probably meant by a value that is not allowed.
    fn meant(_: &Raw, _: &Self::Bounds) -> Option<String> {
        None
    }
    /// Whether an empty text is a value of its own rather than no value.
    fn takes_empty(_: &Self::Bounds) -> bool {
        false
    }
}

impl Value for bool {
    type Bounds = ();

    fn read(raw: &Raw, (): &()) -> Option<Self> {
        if let Raw::Flag(flag) = raw {
            return Some(*flag);
        }
        match raw.words()?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Some(true),
            "false" | "0" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    fn allowed((): &()) -> String {
        "true or false (also 1/0, yes/no, on/off)".to_owned()
    }

    fn shown(&self) -> Json {
        (*self).into()
    }
}

/// Which texts are allowed, and how one is tidied.
pub(crate) struct Rule {
    pub says: &'static str,
    pub empty: bool,
    pub read: fn(&str) -> Option<String>,
}

impl Value for String {
    type Bounds = Rule;

    fn read(raw: &Raw, rule: &Rule) -> Option<Self> {
        (rule.read)(raw.text()?)
    }

    fn allowed(rule: &Rule) -> String {
        rule.says.to_owned()
    }

    fn shown(&self) -> Json {
        self.as_str().into()
    }

    /// What is most often forgotten stands at the front.
    fn meant(raw: &Raw, rule: &Rule) -> Option<String> {
        let text = raw.text()?;
        ["http://", "/"].into_iter().find_map(|start| (rule.read)(&format!("{start}{text}")))
    }

    fn takes_empty(rule: &Rule) -> bool {
        rule.empty
    }
}

impl Value for PathBuf {
    type Bounds = ();

    fn read(raw: &Raw, (): &()) -> Option<Self> {
        let text = raw.text()?;
        (!text.is_empty() && !text.contains('\0')).then(|| Self::from(text))
    }

    fn allowed((): &()) -> String {
        "a path".to_owned()
    }

    fn shown(&self) -> Json {
        self.to_string_lossy().into()
    }
}

impl<T: Value> Value for Option<T> {
    type Bounds = T::Bounds;
    const SECRET: bool = T::SECRET;

    fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self> {
        T::read(raw, bounds).map(Some)
    }

    fn allowed(bounds: &Self::Bounds) -> String {
        T::allowed(bounds)
    }

    fn shown(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::shown)
    }

    fn meant(raw: &Raw, bounds: &Self::Bounds) -> Option<String> {
        T::meant(raw, bounds)
    }

    fn takes_empty(bounds: &Self::Bounds) -> bool {
        T::takes_empty(bounds)
    }
}

/// A list: texts in the file, separated by commas elsewhere; blanks and repetitions do not count.
impl<T: Value + PartialEq> Value for Vec<T> {
    type Bounds = T::Bounds;

    fn read(raw: &Raw, bounds: &Self::Bounds) -> Option<Self> {
        let mut list = Self::new();
        for entry in entries(raw)? {
            let value = T::read(&entry, bounds)?;
            if !list.contains(&value) {
                list.push(value);
            }
        }
        (list.len() <= limits::ENTRIES).then_some(list)
    }

    fn allowed(bounds: &Self::Bounds) -> String {
        format!("a list of which each is {}", T::allowed(bounds))
    }

    fn shown(&self) -> Json {
        self.iter().map(T::shown).collect()
    }

    fn meant(raw: &Raw, bounds: &Self::Bounds) -> Option<String> {
        let bad = entries(raw)?.into_iter().find(|entry| T::read(entry, bounds).is_none())?;
        T::meant(&bad, bounds)
    }
}

fn entries(raw: &Raw) -> Option<Vec<Raw>> {
    let texts: Vec<&str> = match raw {
        Raw::List(entries) => entries.iter().map(String::as_str).collect(),
        _ => raw.text()?.split(',').collect(),
    };
    let texts = texts.into_iter().map(str::trim).filter(|text| !text.is_empty());
    Some(texts.map(|text| Raw::Text(text.to_owned())).collect())
}

/// A type whose values have names.
pub(crate) trait Named: Copy + PartialEq + 'static {
    /// Every value by its name; further names of one follow the first.
    const NAMES: &'static [(&'static str, Self)];
}

impl<T: Named> Value for T {
    type Bounds = ();

    /// Case and the choice between `-` and `_` do not matter.
    fn read(raw: &Raw, (): &()) -> Option<Self> {
        let plain = |name: &str| name.to_ascii_lowercase().replace('_', "-");
        let wanted = plain(raw.text()?);
        T::NAMES.iter().find(|(name, _)| plain(name) == wanted).map(|(_, value)| *value)
    }

    fn allowed((): &()) -> String {
        let names: Vec<_> = T::NAMES.iter().map(|(name, _)| *name).collect();
        format!("one of {}", names.join(", "))
    }

    fn shown(&self) -> Json {
        name_of(self).into()
    }

    fn meant(raw: &Raw, (): &()) -> Option<String> {
        nearest(raw.text()?, T::NAMES.iter().map(|(name, _)| *name)).map(str::to_owned)
    }
}

/// The first name of a value.
pub(crate) fn name_of<T: Named>(value: &T) -> &'static str {
    T::NAMES.iter().find(|(_, named)| named == value).map_or("", |(name, _)| name)
}

macro_rules! named_in_core {
    ($($type:ty),+) => {$(
        impl Value for $type {
            type Bounds = ();

            fn read(raw: &Raw, (): &()) -> Option<Self> {
                raw.text()?.to_ascii_lowercase().replace('_', "-").parse().ok()
            }

            fn allowed((): &()) -> String {
                format!("one of {}", Self::ALL.iter().map(|each| each.name()).collect::<Vec<_>>().join(", "))
            }

            fn shown(&self) -> Json {
                self.name().into()
            }

            fn meant(raw: &Raw, (): &()) -> Option<String> {
                nearest(raw.text()?, Self::ALL.iter().map(|each| each.name())).map(str::to_owned)
            }
        }
    )+};
}

named_in_core!(Isolation, Strategy);
