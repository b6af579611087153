//! The kinds of values that settings have: how each is read, what is allowed, and how it is shown.

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

/// A value as it was written: a value of the file, or the text of a flag or a variable.
pub(crate) type Raw<'v> = DeValue<'v>;

/// Makes something of a written value, if it can.
type Reading<T> = Box<dyn Fn(&Raw<'_>) -> Option<T>>;

/// A kind of values: what is allowed, and how one is read and shown.
pub(crate) struct Kind<T> {
    /// What is allowed, in words that follow "it must be".
    pub allowed: String,
    /// The value that a written one stands for, if it is allowed.
    pub read: Reading<T>,
    pub show: Box<dyn Fn(&T) -> Json>,
    /// What was probably meant by a value that is not allowed.
    pub meant: Reading<String>,
    /// Whether an empty text is a value of its own rather than no value.
    pub takes_empty: bool,
    /// Whether it is never shown.
    pub secret: bool,
}

impl<T> Kind<T> {
    fn new(
        allowed: impl Into<String>,
        read: impl Fn(&Raw<'_>) -> Option<T> + 'static,
        show: impl Fn(&T) -> Json + 'static,
    ) -> Self {
        let (read, show) = (Box::new(read), Box::new(show));
        Self { allowed: allowed.into(), read, show, meant: Box::new(|_| None), takes_empty: false, secret: false }
    }
}

/// A value that may be left out.
pub(crate) fn optional<T: 'static>(kind: Kind<T>) -> Kind<Option<T>> {
    let Kind { allowed, read, show, meant, takes_empty, secret } = kind;
    let read = Box::new(move |raw: &Raw<'_>| read(raw).map(Some));
    let show = Box::new(move |value: &Option<T>| value.as_ref().map_or(Json::Null, &show));
    Kind { allowed, read, show, meant, takes_empty, secret }
}

/// A list: texts in the file, separated by commas elsewhere; blanks and repetitions do not count.
pub(crate) fn list<T: PartialEq + 'static>(each: Kind<T>) -> Kind<Vec<T>> {
    let Kind { allowed, read, show, meant, .. } = each;
    let read = Rc::new(read);
    let read_each = read.clone();
    let read_all = move |raw: &Raw<'_>| {
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
    Kind {
        meant: Box::new(move |raw| meant(&entries(raw)?.into_iter().find(|entry| read(entry).is_none())?)),
        ..Kind::new(format!("a list of which each is {allowed}"), read_all, show_all)
    }
}

fn entries<'v>(raw: &'v Raw<'_>) -> Option<Vec<Raw<'v>>> {
    let texts: Vec<&str> = match raw {
        Raw::Array(_) => list_of_texts(raw)?,
        _ => text_of(raw)?.split(',').collect(),
    };
    let texts = texts.into_iter().map(str::trim).filter(|text| !text.is_empty());
    Some(texts.map(|text| Raw::String(text.into())).collect())
}

pub(crate) fn boolean() -> Kind<bool> {
    let read = |raw: &Raw<'_>| match raw {
        Raw::Boolean(flag) => Some(*flag),
        _ => match words_of(raw)?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Some(true),
            "false" | "0" | "no" | "off" => Some(false),
            _ => None,
        },
    };
    Kind::new("true or false (also 1/0, yes/no, on/off)", read, |flag| (*flag).into())
}

pub(crate) fn path() -> Kind<PathBuf> {
    let is_path = |text: &&str| !text.is_empty() && !text.contains('\0');
    let read = move |raw: &Raw<'_>| text_of(raw).filter(is_path).map(PathBuf::from);
    Kind::new("a path", read, |path| path.to_string_lossy().into())
}

// Amounts: numbers, times, percentages, parts of GPUs and memory.

pub(crate) fn whole<N>(range: RangeInclusive<N>) -> Kind<N>
where
    N: FromStr + PartialOrd + Display + Copy + Into<Json> + 'static,
{
    let allowed = format!("a whole number from {} to {}", range.start(), range.end());
    Kind::new(allowed, move |raw| words_of(raw)?.parse().ok().filter(|n| range.contains(n)), |n| (*n).into())
}

/// A number that may have a fraction.
pub(crate) fn number(range: RangeInclusive<f64>) -> Kind<f64> {
    let allowed = format!("a number from {} to {}", range.start(), range.end());
    Kind::new(allowed, move |raw| words_of(raw)?.parse().ok().filter(|n| range.contains(n)), |n| number_shown(*n))
}

/// A time in seconds or with a unit; shown in seconds.
pub(crate) fn seconds(range: RangeInclusive<f64>) -> Kind<Duration> {
    let allowed = format!("seconds from {} to {}, or a time such as \"90s\" or \"2h\"", range.start(), range.end());
    let read =
        move |raw: &Raw<'_>| units::parse_duration(&words_of(raw)?).filter(|time| range.contains(&time.as_secs_f64()));
    Kind::new(allowed, read, |time| number_shown(time.as_secs_f64()))
}

pub(crate) fn percent() -> Kind<Percent> {
    let read = |raw: &Raw<'_>| {
        let words = words_of(raw)?;
        Percent::from_number(words.strip_suffix('%').unwrap_or(&words).trim().parse().ok()?)
    };
    Kind::new("a number from 0 to 100", read, |percent| number_shown(percent.as_number()))
}

pub(crate) fn fraction() -> Kind<Share> {
    let read = |raw: &Raw<'_>| units::parse_fraction(&words_of(raw)?);
    Kind::new("a part of a GPU from 0.001 to 1.0, or \"50%\"", read, |share| number_shown(share.as_fraction()))
}

pub(crate) fn memory() -> Kind<Bytes> {
    let allowed = "an amount of memory with its unit, such as \"512MiB\" or \"24GiB\"";
    let read = |raw: &Raw<'_>| units::parse_memory(text_of(raw)?).filter(|bytes| !bytes.is_zero());
    Kind::new(allowed, read, |bytes| bytes.to_string().into())
}

/// A number without a needless fraction.
fn number_shown(number: f64) -> Json {
    if number.fract() == 0.0 && number.abs() < 1e15 { (number as i64).into() } else { number.into() }
}

// Choices among names.

/// One of several values by its name; further names of one follow the first. Case and the choice between `-` and `_` do not
/// matter.
pub(crate) fn choice<T: Copy + PartialEq + 'static>(names: Vec<(&'static str, T)>) -> Kind<T> {
    let names: Rc<[(&'static str, T)]> = names.into();
    let only_names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
    let known = names.clone();
    let read = move |raw: &Raw<'_>| {
        let plain = |name: &str| name.to_ascii_lowercase().replace('_', "-");
        let wanted = plain(text_of(raw)?);
        known.iter().find(|(name, _)| plain(name) == wanted).map(|(_, value)| *value)
    };
    let show = move |value: &T| names.iter().find(|(_, named)| named == value).map_or("", |(name, _)| name).into();
    Kind {
        allowed: format!("one of {}", only_names.join(", ")),
        meant: Box::new(move |raw| nearest(text_of(raw)?, only_names.iter().copied()).map(str::to_owned)),
        ..Kind::new("", read, show)
    }
}

pub(crate) fn queue_order() -> Kind<QueueOrder> {
    choice(vec![("fifo", QueueOrder::Fifo), ("fair-share", QueueOrder::FairShare)])
}

pub(crate) fn size() -> Kind<RequestSize> {
    let (part, whole) = (("part", RequestSize::Part), ("whole", RequestSize::Whole));
    choice(vec![("host-only", RequestSize::HostOnly), part, whole, ("several", RequestSize::Several)])
}

pub(crate) fn isolation() -> Kind<IsolationLevel> {
    choice(IsolationLevel::ALL.iter().map(|each| (each.name(), *each)).collect())
}

pub(crate) fn strategy() -> Kind<PlacementStrategy> {
    choice(PlacementStrategy::ALL.iter().map(|each| (each.name(), *each)).collect())
}

macro_rules! choices {
    ($($(#[$doc:meta])* $type:ident { $($variant:ident = $($name:literal)|+),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type { $($variant),+ }

        impl $type {
            const NAMES: &'static [(&'static str, Self)] = &[$($(($name, Self::$variant)),+),+];

            pub(crate) fn kind() -> Kind<Self> {
                choice(Self::NAMES.to_vec())
            }

            /// Its name, as people write it.
            pub fn name(self) -> &'static str {
                Self::NAMES.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name)
            }
        }
    )+};
}

choices! {
    /// How much the agent tells in its log.
    LogLevel {
        Trace = "trace",
        Debug = "debug",
        Info = "info",
        Warn = "warn" | "warning",
        Error = "error" | "critical" | "fatal",
        Off = "off",
    }

    /// Log lines for people, or one JSON object a line for programs.
    LogFormat { Text = "text", Json = "json" }

    /// How a client chooses among several endpoints: the highest share of available GPUs, each in turn, or in proportion to
    /// their GPUs.
    Balancing { Availability = "availability", RoundRobin = "round_robin", Weighted = "weighted" }
}

/// A name that no way of balancing has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("load_balancing_strategy is {0:?}, and must be availability, round_robin or weighted")]
pub struct UnknownBalancing(String);

impl FromStr for Balancing {
    type Err = UnknownBalancing;

    fn from_str(text: &str) -> Result<Self, UnknownBalancing> {
        let named = Self::NAMES.iter().find(|(name, _)| *name == text);
        named.map(|(_, value)| *value).ok_or_else(|| UnknownBalancing(text.to_owned()))
    }
}

// Texts: hosts, paths of URLs, endpoints, names, backends.

/// What `GPUPOOL_BACKEND` may name.
pub const BACKENDS: [&str; 8] = ["auto", "nvidia", "amd", "nvml", "nvidia-smi", "amd-sysfs", "amd-smi", "rocm-smi"];

const TEXT_BYTES: usize = 253;
const LONG_BYTES: usize = 4_096;

/// Texts that `tidy` allows.
fn text(allowed: impl Into<String>, tidy: fn(&str) -> Option<String>) -> Kind<String> {
    Kind {
        // What is most often forgotten stands at the front.
        meant: Box::new(move |raw| {
            let text = text_of(raw)?;
            ["http://", "/"].into_iter().find_map(|start| tidy(&format!("{start}{text}")))
        }),
        ..Kind::new(allowed, move |raw| tidy(text_of(raw)?), |text| text.as_str().into())
    }
}

pub(crate) fn short_text() -> Kind<String> {
    text("a text of at most 253 bytes", tidy_short)
}

pub(crate) fn owner() -> Kind<String> {
    text("a name of 1 to 253 bytes", tidy_short)
}

pub(crate) fn name() -> Kind<String> {
    text("1 to 253 letters, digits or . - _", tidy_name)
}

pub(crate) fn host() -> Kind<String> {
    text("an IP address or a host name, without scheme or port", tidy_host)
}

pub(crate) fn page() -> Kind<String> {
    text("a path that begins with /, such as /docs", tidy_page)
}

pub(crate) fn prefix() -> Kind<String> {
    Kind { takes_empty: true, ..text("empty, or a path that begins with /, such as /api", tidy_prefix) }
}

pub(crate) fn devices() -> Kind<String> {
    let tidy = |text: &str| if text.is_empty() { Some(String::new()) } else { up_to(LONG_BYTES, text) };
    Kind { takes_empty: true, ..text("indices or UUIDs of GPUs, separated by commas; empty for none", tidy) }
}

pub(crate) fn simulated_devices() -> Kind<String> {
    let allowed = "devices such as 4xH100 or 2xMI300X,1xRTX4090, or a file that describes them";
    text(allowed, |text| up_to(LONG_BYTES, text))
}

pub(crate) fn backend() -> Kind<String> {
    text(format!("one of {}", BACKENDS.join(", ")), tidy_backend)
}

pub(crate) fn endpoint() -> Kind<String> {
    let allowed = "a URL such as http://gpu-box:8000 or unix:/run/gpupool/agent.sock (no user, query or fragment)";
    text(allowed, tidy_endpoint)
}

fn up_to(bytes: usize, text: &str) -> Option<String> {
    (!text.is_empty() && text.len() <= bytes && !text.chars().any(char::is_control)).then(|| text.to_owned())
}

pub(crate) fn tidy_short(text: &str) -> Option<String> {
    up_to(TEXT_BYTES, text)
}

fn tidy_name(text: &str) -> Option<String> {
    tidy_short(text).filter(|text| text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)))
}

fn tidy_host(text: &str) -> Option<String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    bare.parse::<IpAddr>().map_or_else(|_| tidy_name(text), |address| Some(address.to_string()))
}

fn tidy_page(text: &str) -> Option<String> {
    let path = tidy_short(text)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._~-".contains(c);
    (path.starts_with('/') && path.len() > 1 && !path.contains("//") && path.chars().all(plain))
        .then(|| path.trim_end_matches('/').to_owned())
}

fn tidy_prefix(text: &str) -> Option<String> {
    if text.is_empty() || text == "/" { Some(String::new()) } else { tidy_page(text) }
}

fn tidy_backend(text: &str) -> Option<String> {
    let name = text.to_ascii_lowercase().replace('_', "-");
    BACKENDS.contains(&name.as_str()).then_some(name)
}

/// An endpoint without its trailing `/`.
fn tidy_endpoint(text: &str) -> Option<String> {
    let text = up_to(LONG_BYTES, text).filter(|text| !text.contains(char::is_whitespace))?;
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

/// The text that stands in the place of a secret.
pub(crate) const HIDDEN: &str = "(hidden)";

/// A text that is neither printed nor logged.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretString(String);

impl SecretString {
    /// Takes a secret; blanks and line ends around it are not part of it.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().trim().to_owned())
    }

    /// The text itself, for the request that must carry it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

/// It travels in a header, so it is one line of visible characters.
pub(crate) fn secret() -> Kind<SecretString> {
    let allowed = "a token as `gpupool token create` prints it, on one line without blanks";
    let visible = |text: &&str| !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
    let read = move |raw: &Raw<'_>| text_of(raw).filter(visible).map(SecretString::new);
    Kind { secret: true, ..Kind::new(allowed, read, |_| HIDDEN.into()) }
}

/// Permission bits of a file, written in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode(pub u32);

/// A decimal number is refused: `660` could be meant either way.
pub(crate) fn file_mode() -> Kind<FileMode> {
    let read = |raw: &Raw<'_>| {
        let digits = match raw {
            Raw::Integer(number) if number.radix() == 8 => number.as_str(),
            _ => text_of(raw).map(|text| text.strip_prefix("0o").unwrap_or(text))?,
        };
        let bits = u32::from_str_radix(digits, 8).ok().filter(|_| !digits.starts_with('+'))?;
        (bits <= 0o777).then_some(FileMode(bits))
    };
    let allowed = "permission bits in octal, in quotes: \"0600\", \"0660\" or \"0666\"";
    Kind::new(allowed, read, |mode| format!("{:04o}", mode.0).into())
}

// Values as they were written.

/// Text only: where a number is meant as a name it stands in quotes.
pub(crate) fn text_of<'v>(raw: &'v Raw<'_>) -> Option<&'v str> {
    raw.as_str().map(str::trim)
}

/// Text or number, as it was written; a number in hexadecimal or binary in decimal digits.
fn words_of<'v>(raw: &'v Raw<'_>) -> Option<Cow<'v, str>> {
    match raw {
        Raw::String(text) => Some(text.trim().into()),
        Raw::Float(number) => Some(number.as_str().into()),
        Raw::Integer(number) => match number.radix() {
            10 => Some(number.as_str().into()),
            8 => None,
            radix => i64::from_str_radix(number.as_str(), radix).ok().map(|number| number.to_string().into()),
        },
        Raw::Boolean(_) | Raw::Datetime(_) | Raw::Array(_) | Raw::Table(_) => None,
    }
}

fn list_of_texts<'v>(raw: &'v Raw<'_>) -> Option<Vec<&'v str>> {
    raw.as_array()?.iter().map(|entry| entry.get_ref().as_str()).collect()
}

/// A value as a message repeats it.
pub(crate) fn quoted(raw: &Raw<'_>) -> String {
    match raw {
        Raw::String(text) if text.trim().is_empty() => "an empty text".to_owned(),
        Raw::String(text) => format!("{:?}", shortened(text)),
        Raw::Boolean(flag) => flag.to_string(),
        Raw::Integer(number) if number.radix() == 8 => {
            u32::from_str_radix(number.as_str(), 8).map_or("a huge number".to_owned(), |bits| format!("0o{bits:o}"))
        }
        Raw::Integer(_) | Raw::Float(_) => words_of(raw).map_or("a huge number".to_owned(), |words| shortened(&words)),
        Raw::Array(entries) if entries.iter().any(|entry| entry.get_ref().is_table()) => "a table".to_owned(),
        Raw::Array(_) => list_of_texts(raw)
            .map_or("a list with something else than texts".to_owned(), |texts| shortened(&format!("{texts:?}"))),
        Raw::Datetime(_) => "a date".to_owned(),
        Raw::Table(_) => "a table".to_owned(),
    }
}

/// At most so many characters of `text` as a message repeats.
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
    fn hosts_and_paths_are_tidied() {
        assert_eq!(tidy_host("[::]").as_deref(), Some("::"));
        assert_eq!((tidy_host("http://x"), tidy_host("a:80"), tidy_host("")), (None, None, None));
        assert_eq!(
            (tidy_prefix("/api/"), tidy_prefix("/"), tidy_prefix("api")),
            (Some("/api".into()), Some(String::new()), None)
        );
        assert_eq!(tidy_page("/docs/").as_deref(), Some("/docs"));
        assert_eq!((tidy_page("/"), tidy_page("/a//b"), tidy_page("/a b")), (None, None, None));
        assert_eq!(tidy_backend("cuda"), None);
        assert_eq!(tidy_backend("NVIDIA_SMI").as_deref(), Some("nvidia-smi"));
    }

    #[test]
    fn permission_bits_are_octal_and_a_decimal_number_is_refused() {
        let kind = file_mode();
        let text = |text: &str| (kind.read)(&Raw::String(text.into())).map(|mode| mode.0);
        assert_eq!((text("0660"), text("660"), text("0o600")), (Some(0o660), Some(0o660), Some(0o600)));
        assert_eq!((text("0888"), text("7777"), text("+660")), (None, None, None));
        let written = |text| (kind.read)(Raw::parse(text).unwrap().get_ref()).map(|mode| mode.0);
        assert_eq!((written("0o640"), written("660")), (Some(0o640), None));
    }
}
