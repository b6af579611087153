//! Kinds of setting values: how each is parsed, described and shown.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use gpupool_core::{Bytes, IsolationLevel, Percent, PlacementStrategy, QueueOrder, RequestSize, Share};
use serde_json::Value as Json;
use toml::de::DeValue;

use crate::problem::nearest;
use crate::{limits, units};

/// Value as written: of the file, or the text of a flag or variable.
pub(crate) type RawValue<'v> = DeValue<'v>;

/// Parses a raw value; `None` if it is not allowed.
type ParseFn<T> = Box<dyn Fn(&RawValue<'_>) -> Option<T>>;

/// Kind of a value: how to parse, describe and show it.
pub(crate) struct ValueKind<T> {
    /// Description of the allowed values, to follow "it must be".
    pub allowed: String,
    /// Parses a raw value.
    pub read: ParseFn<T>,
    pub show: Box<dyn Fn(&T) -> Json>,
    /// Suggests a correction of a value that is not allowed.
    pub suggest: ParseFn<String>,
    /// Whether an empty text is a value rather than no value.
    pub takes_empty: bool,
    /// Whether the value is never shown.
    pub secret: bool,
}

impl<T> ValueKind<T> {
    fn new(
        allowed: impl Into<String>,
        read: impl Fn(&RawValue<'_>) -> Option<T> + 'static,
        show: impl Fn(&T) -> Json + 'static,
    ) -> Self {
        let (read, show) = (Box::new(read), Box::new(show));
        Self { allowed: allowed.into(), read, show, suggest: Box::new(|_| None), takes_empty: false, secret: false }
    }
}

/// Returns the kind of an optional value.
pub(crate) fn optional<T: 'static>(kind: ValueKind<T>) -> ValueKind<Option<T>> {
    let ValueKind { allowed, read, show, suggest, takes_empty, secret } = kind;
    let read = Box::new(move |raw: &RawValue<'_>| read(raw).map(Some));
    let show = Box::new(move |value: &Option<T>| value.as_ref().map_or(Json::Null, &show));
    ValueKind { allowed, read, show, suggest, takes_empty, secret }
}

/// Returns the kind of a list: an array in the file, separated by commas elsewhere. Blank and repeated entries are
/// ignored.
pub(crate) fn list<T: PartialEq + 'static>(each: ValueKind<T>) -> ValueKind<Vec<T>> {
    let ValueKind { allowed, read, show, suggest, .. } = each;
    let read = Rc::new(read);
    let read_each = read.clone();
    let read_all = move |raw: &RawValue<'_>| {
        let mut list = Vec::new();
        for entry in entries(raw)? {
            let value = read_each(&entry)?;
            if !list.contains(&value) {
                list.push(value);
            }
        }
        (list.len() <= limits::ENTRIES).then_some(list)
    };
    let show_all = move |list: &Vec<T>| list.iter().map(&show).collect();
    ValueKind {
        suggest: Box::new(move |raw| suggest(&entries(raw)?.into_iter().find(|entry| read(entry).is_none())?)),
        ..ValueKind::new(format!("a list with entries that are each {allowed}"), read_all, show_all)
    }
}

fn entries<'v>(raw: &'v RawValue<'_>) -> Option<Vec<RawValue<'v>>> {
    let texts: Vec<&str> = match raw {
        RawValue::Array(_) => list_of_texts(raw)?,
        _ => text_of(raw)?.split(',').collect(),
    };
    let texts = texts.into_iter().map(str::trim).filter(|text| !text.is_empty());
    Some(texts.map(|text| RawValue::String(text.into())).collect())
}

pub(crate) fn boolean() -> ValueKind<bool> {
    let read = |raw: &RawValue<'_>| match raw {
        RawValue::Boolean(flag) => Some(*flag),
        _ => match number_or_text(raw)?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Some(true),
            "false" | "0" | "no" | "off" => Some(false),
            _ => None,
        },
    };
    ValueKind::new("true or false (also 1/0, yes/no, on/off)", read, |flag| (*flag).into())
}

pub(crate) fn path() -> ValueKind<PathBuf> {
    let is_path = |text: &&str| !text.is_empty() && !text.contains('\0');
    let read = move |raw: &RawValue<'_>| text_of(raw).filter(is_path).map(PathBuf::from);
    ValueKind::new("a path", read, |path| path.to_string_lossy().into())
}

// Amounts: numbers, times, percentages, parts of GPUs and memory.

pub(crate) fn whole<N>(range: RangeInclusive<N>) -> ValueKind<N>
where
    N: FromStr + PartialOrd + Display + Copy + Into<Json> + 'static,
{
    let allowed = format!("a whole number from {} to {}", range.start(), range.end());
    ValueKind::new(allowed, move |raw| number_or_text(raw)?.parse().ok().filter(|n| range.contains(n)), |n| (*n).into())
}

/// Returns the kind of a number with or without decimals.
pub(crate) fn number(range: RangeInclusive<f64>) -> ValueKind<f64> {
    let allowed = format!("a number from {} to {}", range.start(), range.end());
    ValueKind::new(
        allowed,
        move |raw| number_or_text(raw)?.parse().ok().filter(|n| range.contains(n)),
        |n| number_as_json(*n),
    )
}

/// Returns the kind of a duration in seconds or with a unit; shown in seconds.
pub(crate) fn seconds(range: RangeInclusive<f64>) -> ValueKind<Duration> {
    let allowed = format!("seconds from {} to {}, or a duration such as \"90s\" or \"2h\"", range.start(), range.end());
    let read = move |raw: &RawValue<'_>| {
        units::parse_duration(&number_or_text(raw)?).filter(|time| range.contains(&time.as_secs_f64()))
    };
    ValueKind::new(allowed, read, |time| number_as_json(time.as_secs_f64()))
}

pub(crate) fn percent() -> ValueKind<Percent> {
    let read = |raw: &RawValue<'_>| {
        let words = number_or_text(raw)?;
        Percent::from_number(words.strip_suffix('%').unwrap_or(&words).trim().parse().ok()?)
    };
    ValueKind::new("a number from 0 to 100", read, |percent| number_as_json(percent.as_number()))
}

pub(crate) fn fraction() -> ValueKind<Share> {
    let read = |raw: &RawValue<'_>| units::parse_fraction(&number_or_text(raw)?);
    ValueKind::new("a fraction from 0.001 to 1.0, or a percentage such as \"50%\"", read, |share| {
        number_as_json(share.as_fraction())
    })
}

pub(crate) fn memory() -> ValueKind<Bytes> {
    let allowed = "an amount of memory with its unit, such as \"512MiB\" or \"24GiB\"";
    let read = |raw: &RawValue<'_>| units::parse_memory(text_of(raw)?).filter(|bytes| !bytes.is_zero());
    ValueKind::new(allowed, read, |bytes| bytes.to_string().into())
}

/// Converts a number to JSON, as an integer if possible.
fn number_as_json(number: f64) -> Json {
    if number.fract() == 0.0 && number.abs() < 1e15 { (number as i64).into() } else { number.into() }
}

// Choices among names.

/// Returns the kind of a choice among named values; further names of a value follow its first. Case and the choice
/// between `-` and `_` are ignored.
pub(crate) fn choice<T: Copy + PartialEq + 'static>(names: Vec<(&'static str, T)>) -> ValueKind<T> {
    let names: Rc<[(&'static str, T)]> = names.into();
    let only_names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
    let known = names.clone();
    let read = move |raw: &RawValue<'_>| {
        let plain = |name: &str| name.to_ascii_lowercase().replace('_', "-");
        let normalized_name = plain(text_of(raw)?);
        known.iter().find(|(name, _)| plain(name) == normalized_name).map(|(_, value)| *value)
    };
    let show = move |value: &T| names.iter().find(|(_, named)| named == value).map_or("", |(name, _)| name).into();
    ValueKind {
        allowed: format!("one of {}", only_names.join(", ")),
        suggest: Box::new(move |raw| nearest(text_of(raw)?, only_names.iter().copied()).map(str::to_owned)),
        ..ValueKind::new("", read, show)
    }
}

pub(crate) fn queue_order() -> ValueKind<QueueOrder> {
    choice(vec![("fifo", QueueOrder::Fifo), ("fair-share", QueueOrder::FairShare)])
}

pub(crate) fn size() -> ValueKind<RequestSize> {
    let (part, whole) = (("part", RequestSize::Part), ("whole", RequestSize::Whole));
    choice(vec![("host-only", RequestSize::HostOnly), part, whole, ("several", RequestSize::Several)])
}

pub(crate) fn isolation() -> ValueKind<IsolationLevel> {
    choice(IsolationLevel::ALL.iter().map(|each| (each.name(), *each)).collect())
}

pub(crate) fn strategy() -> ValueKind<PlacementStrategy> {
    choice(PlacementStrategy::ALL.iter().map(|each| (each.name(), *each)).collect())
}

macro_rules! choices {
    ($($(#[$doc:meta])* $type:ident { $($variant:ident = $($name:literal)|+),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type { $($variant),+ }

        impl $type {
            const NAMES: &'static [(&'static str, Self)] = &[$($(($name, Self::$variant)),+),+];

            pub(crate) fn kind() -> ValueKind<Self> {
                choice(Self::NAMES.to_vec())
            }

            /// Returns the name in settings.
            pub fn name(self) -> &'static str {
                Self::NAMES.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name)
            }
        }
    )+};
}

choices! {
    /// Log level of the agent.
    LogLevel {
        Trace = "trace",
        Debug = "debug",
        Info = "info",
        Warn = "warn" | "warning",
        Error = "error" | "critical" | "fatal",
        Off = "off",
    }

    /// Text lines or one JSON object per line.
    LogFormat { Text = "text", Json = "json" }

    /// Strategy of a client with several endpoints: the highest share of available GPUs, round robin, or in proportion
    /// to the GPUs.
    Balancing { Availability = "availability", RoundRobin = "round_robin", Weighted = "weighted" }
}

/// Unknown balancing strategy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("load_balancing_strategy is {0:?}; it must be availability, round_robin or weighted")]
pub struct UnknownBalancing(String);

impl FromStr for Balancing {
    type Err = UnknownBalancing;

    fn from_str(text: &str) -> Result<Self, UnknownBalancing> {
        let named = Self::NAMES.iter().find(|(name, _)| *name == text);
        named.map(|(_, value)| *value).ok_or_else(|| UnknownBalancing(text.to_owned()))
    }
}

// Texts: hosts, paths of URLs, endpoints, names, backends.

/// Values of `GPUPOOL_BACKEND`.
pub const BACKENDS: [&str; 8] = ["auto", "nvidia", "amd", "nvml", "nvidia-smi", "amd-sysfs", "amd-smi", "rocm-smi"];

const MAX_SHORT_TEXT_BYTES: usize = 253;
const MAX_LONG_TEXT_BYTES: usize = 4_096;

/// Returns the kind of a text that `tidy` normalizes, or rejects with `None`.
fn text(allowed: impl Into<String>, tidy: fn(&str) -> Option<String>) -> ValueKind<String> {
    ValueKind {
        // The most common mistake is a missing prefix.
        suggest: Box::new(move |raw| {
            let text = text_of(raw)?;
            ["http://", "/"].into_iter().find_map(|start| tidy(&format!("{start}{text}")))
        }),
        ..ValueKind::new(allowed, move |raw| tidy(text_of(raw)?), |text| text.as_str().into())
    }
}

pub(crate) fn short_text() -> ValueKind<String> {
    text("text of at most 253 bytes", tidy_short)
}

pub(crate) fn owner() -> ValueKind<String> {
    text("a name of 1 to 253 bytes", tidy_short)
}

pub(crate) fn name() -> ValueKind<String> {
    text("1 to 253 letters, digits or . - _", tidy_name)
}

pub(crate) fn host() -> ValueKind<String> {
    text("an IP address or a host name, without scheme or port", tidy_host)
}

pub(crate) fn url_path() -> ValueKind<String> {
    text("a path that begins with /, such as /docs", tidy_url_path)
}

pub(crate) fn url_prefix() -> ValueKind<String> {
    ValueKind { takes_empty: true, ..text("empty, or a path that begins with /, such as /api", tidy_url_prefix) }
}

pub(crate) fn visible_devices() -> ValueKind<String> {
    let tidy = |text: &str| if text.is_empty() { Some(String::new()) } else { limited_text(MAX_LONG_TEXT_BYTES, text) };
    ValueKind { takes_empty: true, ..text("indices or UUIDs of GPUs, separated by commas; empty for none", tidy) }
}

pub(crate) fn simulated_devices() -> ValueKind<String> {
    let allowed = "devices such as 4xH100 or 2xMI300X,1xRTX4090, or a file that describes them";
    text(allowed, |text| limited_text(MAX_LONG_TEXT_BYTES, text))
}

pub(crate) fn backend() -> ValueKind<String> {
    text(format!("one of {}", BACKENDS.join(", ")), tidy_backend)
}

pub(crate) fn endpoint() -> ValueKind<String> {
    let allowed = "a URL such as http://gpu-box:8000 or unix:/run/gpupool/agent.sock (no user, query or fragment)";
    text(allowed, tidy_endpoint)
}

fn limited_text(bytes: usize, text: &str) -> Option<String> {
    (!text.is_empty() && text.len() <= bytes && !text.chars().any(char::is_control)).then(|| text.to_owned())
}

pub(crate) fn tidy_short(text: &str) -> Option<String> {
    limited_text(MAX_SHORT_TEXT_BYTES, text)
}

fn tidy_name(text: &str) -> Option<String> {
    tidy_short(text).filter(|text| text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)))
}

fn tidy_host(text: &str) -> Option<String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    bare.parse::<IpAddr>().map_or_else(|_| tidy_name(text), |address| Some(address.to_string()))
}

fn tidy_url_path(text: &str) -> Option<String> {
    let path = tidy_short(text)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._~-".contains(c);
    (path.starts_with('/') && path.len() > 1 && !path.contains("//") && path.chars().all(plain))
        .then(|| path.trim_end_matches('/').to_owned())
}

fn tidy_url_prefix(text: &str) -> Option<String> {
    if text.is_empty() || text == "/" { Some(String::new()) } else { tidy_url_path(text) }
}

fn tidy_backend(text: &str) -> Option<String> {
    let name = text.to_ascii_lowercase().replace('_', "-");
    BACKENDS.contains(&name.as_str()).then_some(name)
}

/// Normalizes an endpoint and removes its trailing `/`.
fn tidy_endpoint(text: &str) -> Option<String> {
    let text = limited_text(MAX_LONG_TEXT_BYTES, text).filter(|text| !text.contains(char::is_whitespace))?;
    let (scheme, rest) = text.split_once(':')?;
    let scheme = scheme.to_ascii_lowercase();
    if scheme == "unix" {
        let path = rest.strip_prefix("//").unwrap_or(rest);
        return (path.starts_with('/') && path.len() > 1).then(|| format!("unix:{path}"));
    }
    let rest = rest.strip_prefix("//").filter(|_| matches!(scheme.as_str(), "http" | "https"))?;
    let (host, port) = split_port(rest.split('/').next()?)?;
    let tidy =
        !rest.contains(['@', '?', '#', '\\']) && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    (tidy && tidy_host(host).is_some()).then(|| format!("{scheme}://{}", rest.trim_end_matches('/')))
}

pub(crate) fn split_port(authority: &str) -> Option<(&str, Option<&str>)> {
    if let Some(address) = authority.strip_prefix('[') {
        let (address, after) = address.split_once(']')?;
        return match after {
            "" => Some((address, None)),
            _ => Some((address, Some(after.strip_prefix(':')?))),
        };
    }
    Some(authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))))
}

// Secrets, and the permission bits of the socket.

/// Text shown instead of a secret.
pub(crate) const HIDDEN_TEXT: &str = "(hidden)";

/// Text that is neither printed nor logged.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretString(String);

impl SecretString {
    /// Creates a secret from trimmed text.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().trim().to_owned())
    }

    /// Returns the text, for the request that carries it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN_TEXT)
    }
}

/// Returns the kind of a secret that is sent in a header: one line of visible characters.
pub(crate) fn secret() -> ValueKind<SecretString> {
    let allowed = "a token as `gpupool token create` prints it, on one line without blanks";
    let visible = |text: &&str| !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
    let read = move |raw: &RawValue<'_>| text_of(raw).filter(visible).map(SecretString::new);
    ValueKind { secret: true, ..ValueKind::new(allowed, read, |_| HIDDEN_TEXT.into()) }
}

/// Permission bits of a file, in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode(pub u32);

/// Returns the kind of permission bits. A decimal number such as `660` is refused because it is ambiguous.
pub(crate) fn file_mode() -> ValueKind<FileMode> {
    let read = |raw: &RawValue<'_>| {
        let digits = match raw {
            RawValue::Integer(number) if number.radix() == 8 => number.as_str(),
            _ => text_of(raw).map(|text| text.strip_prefix("0o").unwrap_or(text))?,
        };
        let bits = u32::from_str_radix(digits, 8).ok().filter(|_| !digits.starts_with('+'))?;
        (bits <= 0o777).then_some(FileMode(bits))
    };
    let allowed = "permission bits in octal, in quotes: \"0600\", \"0660\" or \"0666\"";
    ValueKind::new(allowed, read, |mode| format!("{:04o}", mode.0).into())
}

// Access to raw values.

/// Returns a text; numbers in the file are not texts.
pub(crate) fn text_of<'v>(raw: &'v RawValue<'_>) -> Option<&'v str> {
    raw.as_str().map(str::trim)
}

/// Returns a text or number as written; hexadecimal and binary numbers in decimal digits.
fn number_or_text<'v>(raw: &'v RawValue<'_>) -> Option<Cow<'v, str>> {
    match raw {
        RawValue::String(text) => Some(text.trim().into()),
        RawValue::Float(number) => Some(number.as_str().into()),
        RawValue::Integer(number) => match number.radix() {
            10 => Some(number.as_str().into()),
            8 => None,
            radix => i64::from_str_radix(number.as_str(), radix).ok().map(|number| number.to_string().into()),
        },
        RawValue::Boolean(_) | RawValue::Datetime(_) | RawValue::Array(_) | RawValue::Table(_) => None,
    }
}

fn list_of_texts<'v>(raw: &'v RawValue<'_>) -> Option<Vec<&'v str>> {
    raw.as_array()?.iter().map(|entry| entry.get_ref().as_str()).collect()
}

/// Quotes a value for a message.
pub(crate) fn quoted(raw: &RawValue<'_>) -> String {
    match raw {
        RawValue::String(text) if text.trim().is_empty() => "an empty value".to_owned(),
        RawValue::String(text) => format!("{:?}", shortened(text)),
        RawValue::Boolean(flag) => flag.to_string(),
        RawValue::Integer(number) if number.radix() == 8 => {
            u32::from_str_radix(number.as_str(), 8).map_or("a huge number".to_owned(), |bits| format!("0o{bits:o}"))
        }
        RawValue::Integer(_) | RawValue::Float(_) => {
            number_or_text(raw).map_or("a huge number".to_owned(), |words| shortened(&words))
        }
        RawValue::Array(entries) if entries.iter().any(|entry| entry.get_ref().is_table()) => "a table".to_owned(),
        RawValue::Array(_) => list_of_texts(raw)
            .map_or("a list with entries that are not strings".to_owned(), |texts| shortened(&format!("{texts:?}"))),
        RawValue::Datetime(_) => "a date".to_owned(),
        RawValue::Table(_) => "a table".to_owned(),
    }
}

/// Shortens a text for a message.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(limits::QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_needs_a_scheme_and_loses_its_trailing_slash() {
        assert_eq!(tidy_endpoint("http://gpu-box:8000//").as_deref(), Some("http://gpu-box:8000"));
        assert_eq!(tidy_endpoint("HTTPS://[::1]:8443/api/").as_deref(), Some("https://[::1]:8443/api"));
        assert_eq!(tidy_endpoint("unix:///run/agent.sock").as_deref(), Some("unix:/run/agent.sock"));
        for bad in [
            "gpu-box:8000",
            "http://",
            "http:/x",
            "ftp://x",
            "http://a b",
            "http://u:p@host",
            "http://h:99999",
            "http://h:0",
            "unix:agent.sock",
            "http://h/?q",
            "http://[::1",
            "http://[::1]x",
        ] {
            assert_eq!(tidy_endpoint(bad), None, "{bad}");
        }
    }

    #[test]
    fn hosts_and_paths_are_normalized() {
        assert_eq!(tidy_host("[::]").as_deref(), Some("::"));
        assert_eq!((tidy_host("http://x"), tidy_host("a:80"), tidy_host("")), (None, None, None));
        assert_eq!(
            (tidy_url_prefix("/api/"), tidy_url_prefix("/"), tidy_url_prefix("api")),
            (Some("/api".into()), Some(String::new()), None)
        );
        assert_eq!(tidy_url_path("/docs/").as_deref(), Some("/docs"));
        assert_eq!((tidy_url_path("/"), tidy_url_path("/a//b"), tidy_url_path("/a b")), (None, None, None));
        assert_eq!(tidy_backend("cuda"), None);
        assert_eq!(tidy_backend("NVIDIA_SMI").as_deref(), Some("nvidia-smi"));
    }

    #[test]
    fn permission_bits_are_octal_and_decimal_numbers_are_refused() {
        let kind = file_mode();
        let text = |text: &str| (kind.read)(&RawValue::String(text.into())).map(|mode| mode.0);
        assert_eq!((text("0660"), text("660"), text("0o600")), (Some(0o660), Some(0o660), Some(0o600)));
        assert_eq!((text("0888"), text("7777"), text("+660")), (None, None, None));
        let written = |text| (kind.read)(RawValue::parse(text).unwrap().get_ref()).map(|mode| mode.0);
        assert_eq!((written("0o640"), written("660")), (Some(0o640), None));
    }
}
